import pytest

from metagym.models import ModelConfig, ModelError, YarnRope
from metagym.models.families import FAMILIES

RAW = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_config_round_trip():
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = ModelConfig.from_dict({**RAW, "rope_scaling": scaling})
    assert config.head_dim == 4
    assert config.groups == 2
    assert ModelConfig.from_dict(config.to_dict()) == config
    newer = {**RAW, "rope_parameters": {**scaling, "rope_theta": 5e5}}
    assert ModelConfig.from_dict(newer).rope_theta == 5e5
    assert ModelConfig.from_dict(newer).rope_scaling == config.rope_scaling


def test_yarn_defaults_are_those_of_the_config():
    """Qwen2.5's: factor 4 of the 32,768 positions that it was trained on."""
    raw = {**RAW, "model_type": "qwen2", "max_position_embeddings": 32768}
    config = ModelConfig.from_dict({**raw, "rope_scaling": {"type": "yarn", "factor": 4.0}})
    assert config.rope_scaling == YarnRope(4.0, 32768)
    assert config.qkv_bias
    assert config.context == 131_072
    assert ModelConfig.from_dict(raw).context == 32768


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_round_trips(model_type):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    config = ModelConfig.from_dict({**RAW, "model_type": model_type, **experts})
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert config.to_dict()["architectures"] == [FAMILIES[model_type].architecture]
    assert config.routing_width == (2 if model_type == "qwen3_moe" else 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, ["model_type", "'gpt2'", "llama"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, ["rope_type", "dynamic", "yarn"]),
        ({"rope_scaling": {"type": "yarn"}}, ["'factor'", "missing"]),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "mscale": 1}}, ["yarn", "mscale"]),
        ({"model_type": "qwen2", "use_sliding_window": True}, ["use_sliding_window", "qwen2"]),
        ({"model_type": "qwen3_moe"}, ["'num_experts'", "missing"]),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, ["mlp_only_layers", "[0]"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
        ({"vocab_size": None}, ["vocab_size", "missing"]),
    ],
)
def test_configs_that_are_refused(change, words):
    raw = {k: v for k, v in {**RAW, **change}.items() if v is not None}
    with pytest.raises(ModelError) as e:
        ModelConfig.from_dict(raw, "some/config.json")
    assert all(w in str(e.value) for w in ["some/config.json", *words])

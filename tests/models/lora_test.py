import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

from metagym.models import (
    Decoder,
    Lora,
    ModelConfig,
    ModelError,
    load,
    load_adapter,
    make_mesh,
    make_policy,
    save,
    save_adapter,
    trainable,
)
from metagym.models.lora import merge
from metagym.rl.train_step import init_state

CONFIG = ModelConfig(
    vocab_size=320,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    lora=Lora(2, 4.0),
)


@pytest.fixture(scope="module")
def adapted():
    """A model whose adapter is not zero."""
    model = Decoder(CONFIG, seed=1)
    rng = np.random.default_rng(0)
    for name, param in vars(model.layers).items():
        if name.endswith("_proj_b"):
            param.set_value(jnp.asarray(rng.normal(size=param[...].shape) / 4, jnp.float32))
    return model


@pytest.fixture(scope="module")
def batch(random_batch):
    return random_batch([[20], [7, 9]])


def logprobs(model, batch):
    graphdef, params = nnx.split(model)
    return make_policy(graphdef, chunk=64)(params, batch)[0]


def test_equals_the_merged_model(adapted, batch):
    plain = merge(adapted)
    assert plain.config.lora is None
    np.testing.assert_allclose(logprobs(adapted, batch), logprobs(plain, batch), rtol=1e-5, atol=1e-5)
    w, x = adapted._own(), plain._stacked()
    want = w["down"][1] + 2.0 * (w["down_proj_a"][1] @ w["down_proj_b"][1])  # alpha / rank = 2
    np.testing.assert_allclose(x["down"][1], want, rtol=1e-5, atol=1e-6)


def test_a_new_adapter_changes_nothing(tmp_path, batch):
    directory = save(Decoder(dataclasses.replace(CONFIG, lora=None), seed=1), tmp_path / "base")
    plain, _ = load(directory)
    fresh, _ = load(directory, lora=CONFIG.lora)
    np.testing.assert_array_equal(logprobs(fresh, batch), logprobs(plain, batch))
    again = load(save(fresh, tmp_path / "merged"))[0]
    np.testing.assert_array_equal(logprobs(again, batch), logprobs(plain, batch))


def test_only_the_adapter_is_trained(adapted, batch):
    graphdef, params = nnx.split(adapted)
    policy, mask = make_policy(graphdef, chunk=64), trainable(params)
    assert sum(jax.tree.leaves(mask)) == 14
    labels = jax.tree.map(lambda own: "train" if own else "freeze", mask)
    optimizer = optax.multi_transform({"train": optax.adam(1e-2), "freeze": optax.set_to_zero()}, labels)
    mesh = make_mesh((1,), devices=jax.devices()[:1])
    state = init_state(params, optimizer, jax.random.key(0), mesh).opt_state
    moments = sum(x.size for x in jax.tree.leaves(state))
    assert moments < 2.1 * sum(
        x.size for x, own in zip(jax.tree.leaves(params), jax.tree.leaves(mask), strict=True) if own
    )
    gradient = jax.jit(jax.grad(lambda p: -policy(p, batch)[0].sum()))(params)
    updates, _ = optimizer.update(gradient, state, params)
    after = optax.apply_updates(params, updates)
    leaves = zip(*map(jax.tree.leaves, (params, after, mask, gradient)), strict=True)
    for before, now, own, g in leaves:
        assert bool((before == now).all()) != own
        assert own or not jnp.any(g)
    assert float(policy(after, batch)[0].sum()) > float(policy(params, batch)[0].sum())


def test_peft_files_round_trip(adapted, tmp_path, batch):
    directory = save_adapter(adapted, tmp_path / "adapter", base="base")
    tensors = load_file(directory / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 7
    assert tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"].shape == (2, 16)
    assert tensors["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"].shape == (24, 2)
    about = json.loads((directory / "adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"], about["peft_type"]) == (2, 4.0, "LORA")
    other = Decoder(CONFIG, seed=1)
    load_adapter(other, directory)
    np.testing.assert_array_equal(logprobs(other, batch), logprobs(adapted, batch))


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        (Lora(2, 4.0, ("embed_tokens",)), "'embed_tokens' is not supported"),
        (Lora(0, 4.0), "at least 1"),
    ],
)
def test_adapters_that_are_refused(lora, words):
    with pytest.raises(ModelError, match=words):
        Decoder(dataclasses.replace(CONFIG, lora=lora))


def test_files_of_another_adapter_are_refused(adapted, tmp_path):
    directory = save_adapter(adapted, tmp_path / "adapter")
    with pytest.raises(ModelError, match="rank=2"):
        load_adapter(Decoder(dataclasses.replace(CONFIG, lora=Lora(4, 4.0))), directory)
    about = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(about | {"use_dora": True}))
    with pytest.raises(ModelError, match="use_dora"):
        load_adapter(adapted, directory)
    with pytest.raises(ModelError, match="no adapter"):
        save_adapter(merge(adapted), tmp_path / "none")

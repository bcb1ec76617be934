"""The embedded engine serves what families add (biases, YaRN, normalised heads, experts, adapters): what it
samples has the log-probs of the trainer's forward pass, and the experts of every token are recorded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from metagym.models import Decoder, Lora, ModelConfig, YarnRope, make_policy
from metagym.proxy.backends.embedded import EmbeddedBackend, Tiles
from metagym.rl.batching import empty_batch
from metagym.types import Sampling

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "rope_scaling": YarnRope(4.0, 32),
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "qk_norm": True}
FAMILIES = {
    "qwen2": ModelConfig(**SHAPE, model_type="qwen2", qkv_bias=True, tie_word_embeddings=True),
    "qwen3_moe": ModelConfig(**SHAPE, **EXPERTS, model_type="qwen3_moe"),
    "llama with an adapter": ModelConfig(**SHAPE, lora=Lora(2, 4.0)),
}
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]


def model_of(name: str) -> Decoder:
    """Its zeros, biases and the adapter's B, are not."""
    model = Decoder(FAMILIES[name], seed=1)
    rng = np.random.default_rng(0)
    for path, param in vars(model.layers).items():
        if path.endswith(("_b", "_bias")):
            param.set_value(jnp.asarray(rng.normal(size=param[...].shape) / 4, jnp.float32))
    return model


def scored(model: Decoder, prompt, generation, *, replay: bool = False) -> np.ndarray:
    """The trainer's log-probs of a generation."""
    ids = [*prompt, *generation.tokens.tolist()]
    n, R = len(ids) - 1, model.config.routing_width
    batch = empty_batch(1, 64, R)
    batch.tokens[0, :n], batch.targets[0, :n] = ids[:-1], ids[1:]
    batch.positions[0, :n], batch.segments[0, :n] = np.arange(n), 1
    batch.mask[0, len(prompt) - 1 : n] = 1
    batch.routing[:] = -1
    batch.routing[0, :n] = np.concatenate([generation.prompt_routing, generation.routing])[:-1]
    graphdef, params = nnx.split(model)
    logprobs, _ = jax.jit(make_policy(graphdef, chunk=64, replay=replay))(params, batch)
    return np.asarray(logprobs)[0, len(prompt) - 1 : n]


@pytest.mark.parametrize("name", FAMILIES)
def test_sampled_log_probs_are_the_trainers(name):
    model = model_of(name)
    # More than the 32 positions of the config, within what YaRN stretches them to.
    tiles = Tiles(prefill=((1, 16),), decode=(1,), pages=(13,))  # few shapes: each is compiled
    backend = EmbeddedBackend(model, slots=1, context=100, page_size=8, tiles=tiles)
    try:
        generation = backend.submit(PROMPT, Sampling(max_tokens=40, seed=3)).result()
        again = backend.submit(PROMPT, Sampling(max_tokens=40, seed=3)).result()
    finally:
        backend.close()
    assert len(generation.tokens) == 40
    np.testing.assert_allclose(generation.logprobs, scored(model, PROMPT, generation), rtol=0, atol=2e-5)
    R = model.config.routing_width
    assert generation.routing.shape == (40, R)
    assert generation.prompt_routing.shape == (len(PROMPT), R)
    if R:
        whole = np.concatenate([generation.prompt_routing, generation.routing])
        assert ((whole[:-1] >= 0) & (whole[:-1] < 8)).all()
        assert (whole[-1] == -1).all()  # read by nobody
        replayed = scored(model, PROMPT, generation, replay=True)
        np.testing.assert_allclose(generation.logprobs, replayed, rtol=0, atol=2e-5)
    for a, b in zip(dataclasses.astuple(generation), dataclasses.astuple(again), strict=True):
        np.testing.assert_array_equal(a, b)  # the second prompt came from the cache

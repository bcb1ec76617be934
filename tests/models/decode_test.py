"""Several steps of decoding in one program are as many steps of `extend`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metagym.models import Decoder, ModelConfig, init_cache
from metagym.models.decode import Limits, decode, split

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": True,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "qk_norm": True}
START = np.asarray([5, 3, 7, -1], np.int32)  # tokens read before; the last row is padding
TABLE = np.asarray([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [0, 0, 0, 0]], np.int32)
MOST = 8


def greedy(logits, _):
    return jnp.argmax(logits, -1).astype(jnp.int32), jax.nn.log_softmax(logits).max(-1)


def limits(steps=6, patience=MOST, left=99, stop=-1):
    return Limits(np.asarray(steps), np.asarray(patience), np.full(4, left, np.int32), np.full((4, 1), stop))


@pytest.fixture(scope="module", params=[{}, MOE | {"model_type": "qwen3_moe"}], ids=["dense", "experts"])
def model(request):
    return Decoder(ModelConfig(**SHAPE, **request.param), seed=1)


@pytest.fixture(scope="module")
def begun(model):
    """The tokens that are read next, and the cache with those before."""
    ids = np.random.default_rng(0).integers(0, 97, (4, 8)).astype(np.int32)
    at = np.arange(8, dtype=np.int32)
    positions = np.where(at < START[:, None], at, -1).astype(np.int32)
    cache = init_cache(model.config, 13, 4)
    _, cache = jax.jit(lambda cache: model.extend(cache, ids, positions, TABLE))(cache)
    return ids[np.arange(4), START], cache


@pytest.fixture(scope="module")
def run(model, begun):
    """run(limits): what `decode` returns."""
    program = jax.jit(
        lambda weights, l: decode(
            model, weights, begun[1], begun[0], jnp.asarray(START), jnp.asarray(TABLE), l, greedy, most=MOST
        )
    )
    weights = split(model, jnp.float32)
    return lambda l: jax.device_get(program(weights, l))


def test_steps_are_those_of_extend(model, begun, run):
    tokens, logprobs, done, new = run(limits())
    assert done == 6

    @jax.jit
    def one(cache, token, positions):
        hidden, cache = model.extend(cache, token[:, None], positions[:, None], TABLE)
        return *greedy(model.logits(hidden[:, 0]), 0), cache

    token, cache = begun
    for i in range(6):
        token, logprob, cache = one(cache, token, np.where(START >= 0, START + i, -1).astype(np.int32))
        assert tokens[i, :3].tolist() == token[:3].tolist()
        np.testing.assert_allclose(logprobs[i, :3], logprob[:3], atol=1e-5, rtol=0)
    for ours, theirs in zip(new, cache, strict=True):
        if theirs is not None:
            np.testing.assert_allclose(ours[:, 1:], theirs[:, 1:], atol=1e-5, rtol=0)


def test_it_ends_with_the_sequences(run):
    tokens = run(limits())[0]
    assert run(limits(left=3))[2] == 3, "all have ended"
    stop = int(tokens[1, 0])
    assert np.flatnonzero((tokens[:, :3] == stop).any(1))[0] <= 1
    assert run(limits(patience=0, stop=stop))[2] <= 2, "one has ended, and nobody waits for the rest"
    assert run(limits(patience=4, stop=stop))[2] == 4

"""The deterministic engine: the same seed, the same bits, whatever else the engine does."""

import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from metagym.errors import InputError
from metagym.models import Llama, ModelConfig
from metagym.proxy.backends.embedded import EmbeddedBackend, Tiles
from metagym.types import Sampling

CONFIG = ModelConfig(
    vocab_size=430,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    tie_word_embeddings=True,
    max_position_embeddings=256,
)


@pytest.fixture(scope="module")
def model():
    return Llama(CONFIG, seed=1)


def engine(model, **kwargs):
    kwargs = {"slots": 12, "context": 128, "page_size": 4, "deterministic": True, **kwargs}
    return EmbeddedBackend(model, **kwargs)


def requests():
    """Prompts that share beginnings of every length, groups of equal ones, and ends inside and at the edge of
    a page."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 430, 80).tolist()
    made = []
    for i in range(24):
        ids = base[: int(rng.integers(1, 80))] + rng.integers(0, 430, int(rng.integers(0, 9))).tolist()
        made += [(ids, Sampling(max_tokens=int(rng.integers(1, 24)), seed=100 * i + m)) for m in range(2)]
    return made


def bits(generations):
    return [(g.tokens.tobytes(), g.logprobs.tobytes(), g.finish) for g in generations]


def one_by_one(model, asked, **kwargs):
    """Each in an engine state without any cache of the others."""
    backend = engine(model, **kwargs)
    try:
        found = []
        for ids, sampling in asked:
            backend._table.clear()
            found.append(backend.submit(ids, sampling).result(300))
        assert backend.stats()["prefilled_tokens"] == sum(len(ids) for ids, _ in asked)
        return found
    finally:
        backend.close()


@pytest.fixture(scope="module")
def alone(model):
    """The requests, others that continue the first twelve replies, which decoding leaves in the cache; and
    what came of each alone."""
    first = requests()
    found = one_by_one(model, first)
    more = [
        ([*ids, *g.tokens.tolist(), 7, 8], Sampling(max_tokens=9, seed=i))
        for i, ((ids, _), g) in enumerate(zip(first[:12], found, strict=False))
    ]
    return first + more, bits(found + one_by_one(model, more))


def test_shuffled_arrivals_concurrency_and_cache_change_no_bit(model, alone):
    asked, expected = alone
    rng = np.random.default_rng(1)
    backend = engine(model)
    try:
        for threads in (1, 2, 5):
            futures = {}

            def submit(indices, pauses, futures=futures):
                for i, pause in zip(indices, pauses, strict=True):
                    futures[int(i)] = backend.submit(*asked[i])
                    time.sleep(pause)

            order, pauses = rng.permutation(len(asked)), rng.exponential(0.002, len(asked))
            parts = [(order[k::threads], pauses[k::threads]) for k in range(threads)]
            running = [threading.Thread(target=submit, args=part) for part in parts]
            for t in running:
                t.start()
            for t in running:
                t.join()
            assert bits(futures[i].result(300) for i in range(len(asked))) == expected
        stats = backend.stats()
        assert stats["whole_hits"] > 20
        assert stats["prefilled_tokens"] < 0.5 * stats["prompt_tokens"], "much came from the cache"
        assert stats["compilations"] == 3, (
            "one shape for prompts and replies, one to sample, one to copy pages"
        )
    finally:
        backend.close()


def test_neither_do_pages_that_run_out(model, alone):
    asked, expected = alone
    backend = engine(model, num_pages=40)
    try:
        got = [f.result(300) for f in [backend.submit(*r) for r in asked]]
        assert bits(got) == expected
        assert backend.stats()["preemptions"] > 0
        assert backend.stats()["evictions"] > 0
    finally:
        backend.close()


def test_nor_the_number_of_slots_below_a_tile(model, alone):
    """Engines of fewer slots have a smaller tile, and their own bits; of more, the same ones."""
    asked, expected = alone
    backend = engine(model, slots=30)
    try:
        assert bits(f.result(300) for f in [backend.submit(*r) for r in asked]) == expected
    finally:
        backend.close()


def test_it_is_the_models_distribution(model, alone):
    asked, _ = alone
    fast = EmbeddedBackend(model, slots=12, context=128, page_size=4)
    exact = engine(model)
    try:
        for ids, sampling in asked[:8]:
            a, b = (e.submit(ids, sampling).result(300) for e in (fast, exact))
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5, rtol=0)
    finally:
        fast.close()
        exact.close()


def test_bf16(model):
    asked = requests()[:16]
    expected = bits(one_by_one(model, asked, dtype=jnp.bfloat16))
    backend = engine(model, dtype=jnp.bfloat16)
    try:
        assert bits(f.result(300) for f in [backend.submit(*r) for r in asked[::-1]])[::-1] == expected
    finally:
        backend.close()


def test_new_weights_find_no_old_cache(model, alone):
    asked, expected = alone
    backend = engine(model)
    try:
        other = nnx.split(Llama(CONFIG, seed=2))[1]
        backend.load(other, 1)
        [backend.submit(*r).result(300) for r in asked[:10]]
        backend.load(nnx.split(model)[1], 2)
        assert bits(f.result(300) for f in [backend.submit(*r) for r in asked]) == expected
    finally:
        backend.close()


def test_its_one_shape_is_not_the_callers(model):
    with pytest.raises(InputError, match="one shape"):
        engine(model, tiles=Tiles.default(12, 128, 4))

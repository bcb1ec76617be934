"""One token per row: by the row's seed, filters and temperature, with the log-prob it was drawn with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metagym.proxy.backends.sampling import Rows, sample

P = np.array([0.5, 0.25, 0.15, 0.1], np.float32)


def draw(n=4000, seed=0, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
    """n tokens and log-probs of the distribution P, from n steps of one seed."""

    def full(value, dtype):
        return np.full(n, value, dtype)

    how = Rows(
        np.full((n, 2), seed, np.uint32),
        np.arange(n, dtype=np.int32),
        full(temperature, np.float32),
        full(top_p, np.float32),
        full(top_k, np.int32),
        full(min_p, np.float32),
    )
    tokens, logprobs = jax.jit(sample)(jnp.broadcast_to(jnp.log(P), (n, 4)), how)
    return np.asarray(tokens), np.asarray(logprobs)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, P),
        ({"temperature": 0.5}, P**2 / (P**2).sum()),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.5}, [1, 0, 0, 0]),
        ({"top_p": 0.51}, [2 / 3, 1 / 3, 0, 0]),
        ({"min_p": 0.25}, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        ({"top_k": 3, "top_p": 0.6}, [2 / 3, 1 / 3, 0, 0]),
    ],
)
def test_frequencies_and_logprobs(how, expected):
    tokens, logprobs = draw(**how)
    expected = np.asarray(expected)
    for token, p in enumerate(expected):
        share = (tokens == token).mean()
        assert abs(share - p) <= 4 * np.sqrt(p * (1 - p) / len(tokens)), (token, share, p)
    np.testing.assert_allclose(logprobs, np.log(np.maximum(expected, 1e-9))[tokens], atol=2e-6)


def test_greedy_takes_the_first_and_reports_the_full_softmax():
    tokens, logprobs = draw(n=5, temperature=0.0, top_k=1, top_p=0.1, min_p=0.9)
    assert tokens.tolist() == [0] * 5
    np.testing.assert_allclose(logprobs, np.log(0.5), atol=1e-6)


def test_a_row_does_not_depend_on_the_others():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 50)).astype(np.float32)
    how = Rows(
        np.arange(10, dtype=np.uint32).reshape(5, 2),
        np.arange(5, dtype=np.int32),
        np.array([1, 0, 0.5, 1, 1], np.float32),
        np.array([1, 1, 1, 0.7, 1], np.float32),
        np.array([0, 0, 0, 0, 7], np.int32),
        np.zeros(5, np.float32),
    )
    tokens, logprobs = jax.jit(sample)(logits, how)
    for i in range(5):
        one, p = jax.jit(sample)(logits[i : i + 1], Rows(*(x[i : i + 1] for x in how)))
        assert one[0] == tokens[i]
        np.testing.assert_array_equal(p[0], logprobs[i])


def test_seeds_and_steps_give_independent_tokens():
    a, _ = draw(n=2000, seed=1)
    b, _ = draw(n=2000, seed=2)
    assert abs((a == b).mean() - (P**2).sum()) < 0.05
    assert (a[1:] == a[:-1]).mean() < 0.45
    assert (draw(n=2000, seed=1)[0] == a).all()


def test_a_certain_token_has_no_positive_logprob():
    logits = 300 + 40 * np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    how = Rows(*(np.zeros((64, 2) if name == "seed" else 64, np.float32) for name in Rows._fields))
    how = how._replace(
        seed=how.seed.astype(np.uint32), step=how.step.astype(np.int32), top_k=how.top_k.astype(np.int32)
    )
    how = how._replace(temperature=np.ones(64, np.float32), top_p=np.ones(64, np.float32))
    _, logprobs = jax.jit(sample)(logits, how)
    assert float(logprobs.max()) <= 0
    assert (np.asarray(logprobs) > -1e-4).any()


def test_a_large_vocabulary_is_drawn_by_its_weights():
    """Blocks of 256 tokens with very different sums; tokens of weight 0 are never drawn."""
    n, V = 8000, 1000
    weights = np.zeros(V, np.float32)
    weights[[3, 255, 256, 700, 999]] = [4, 1, 2, 0.5, 2.5]
    one = np.ones(n, np.float32)
    how = Rows(
        np.full((n, 2), 3, np.uint32),
        np.arange(n, dtype=np.int32),
        one,
        one,
        np.zeros(n, np.int32),
        0 * one,
    )
    with np.errstate(divide="ignore"):
        logits = jnp.broadcast_to(jnp.log(weights), (n, V))
    tokens, logprobs = jax.jit(sample)(logits, how)
    share, expected = np.bincount(tokens, minlength=V) / n, weights / weights.sum()
    assert (share[weights == 0] == 0).all()
    assert (abs(share - expected) <= 4 * np.sqrt(expected * (1 - expected) / n)).all()
    np.testing.assert_allclose(logprobs, np.log(np.maximum(expected, 1e-9))[tokens], atol=2e-6)

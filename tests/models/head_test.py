import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metagym.models.head import token_logprobs


def naive(hidden, head, targets):
    logp = jax.nn.log_softmax(hidden @ head.T)
    chosen = jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
    return chosen, -(jnp.exp(logp) * logp).sum(-1)


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(3, 50, 32)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(200, 32)) / 3, jnp.float32)
    return hidden, head, jnp.asarray(rng.integers(0, 200, (3, 50)))


@pytest.mark.parametrize("chunk", [1, 7, 48, 10**6])
def test_equals_naive_in_value_and_gradient(case, chunk):
    hidden, head, targets = case
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 50)), jnp.float32)

    def loss(function):
        def f(hidden, head):
            logprobs, entropy = function(hidden, head)
            return (weights[0] * logprobs + weights[1] * entropy).sum(), (logprobs, entropy)

        return jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(hidden, head)

    (_, got), gradients = loss(lambda h, w: token_logprobs(h, w, targets, chunk=chunk))
    (_, want), expected = loss(lambda h, w: naive(h, w, targets))
    for a, b in zip((*got, *gradients), (*want, *expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.8])
def test_masked_targets_are_zero_and_change_nothing_else(share):
    """Few and many trained tokens; the gradient is that of the trained ones alone."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(2, 400, 32)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(200, 32)) / 3, jnp.float32)
    targets = jnp.asarray(rng.integers(0, 200, (2, 400)))
    mask = jnp.asarray(rng.random((2, 400)) < share, jnp.float32)
    weights = jnp.asarray(rng.normal(size=(2, 2, 400)), jnp.float32)

    def loss(hidden, head, *mask_argument):
        logprobs, entropy = token_logprobs(hidden, head, targets, *mask_argument, chunk=256)
        return (mask * (weights[0] * logprobs + weights[1] * entropy)).sum(), (logprobs, entropy)

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, got), gradients = run(hidden, head, mask)
    (_, want), expected = run(hidden, head)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b * mask)
    for a, b in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * max(float(jnp.abs(b).max()), 1e-9))


def test_numbers_by_hand():
    """Logits (0, ln 3): probabilities 1/4 and 3/4."""
    hidden = jnp.ones((1, 2, 1), jnp.float32)
    head = jnp.asarray([[0.0], [np.log(3.0)]], jnp.float32)
    logprobs, entropy = token_logprobs(hidden, head, jnp.asarray([[0, 1]]), chunk=1)
    np.testing.assert_allclose(logprobs, [[np.log(0.25), np.log(0.75)]], rtol=1e-6)
    np.testing.assert_allclose(entropy, [[-0.25 * np.log(0.25) - 0.75 * np.log(0.75)] * 2], rtol=1e-6)


def test_huge_logits_stay_finite():
    hidden = jnp.full((1, 4, 2), 1e4, jnp.float32)
    head = jnp.asarray([[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]], jnp.float32)
    targets = jnp.asarray([[0, 1, 2, 0]])
    (value, gradient) = jax.value_and_grad(lambda h: token_logprobs(h, head, targets, chunk=2)[0].sum())(
        hidden
    )
    assert bool(jnp.isfinite(value))
    assert bool(jnp.isfinite(gradient).all())


def test_no_buffer_of_tokens_by_vocabulary():
    """Forward and backward of 2048 tokens and 8192 words: under a tenth of the 67 MB of all logits."""
    tokens, vocabulary, chunk = 2048, 8192, 64
    shapes = (
        jax.ShapeDtypeStruct((2, tokens // 2, 16), jnp.float32),
        jax.ShapeDtypeStruct((vocabulary, 16), jnp.float32),
        jax.ShapeDtypeStruct((2, tokens // 2), jnp.int32),
    )

    def loss(hidden, head, targets):
        logprobs, entropy = token_logprobs(hidden, head, targets, chunk=chunk)
        return logprobs.sum() + entropy.sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < tokens * vocabulary * 4 / 10

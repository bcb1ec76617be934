"""Losses: the reference numbers, with and without jit, and the invariants."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metagym.rl import losses
from metagym.rl.advantages import standardized
from metagym.rl.algorithms import cispo, dapo, dr_grpo, grpo, gspo, reinforce_pp, rft, rloo
from metagym.rl.batching import empty_batch
from metagym.rl.losses import loss_terms, token_weights
from metagym.rl.types import Algorithm, LossInputs

O = np.array([[-1, -0.5, -2, -0.3], [-0.7, -1.2, -0.1, -0.9]], np.float32)
L = np.array([[-0.8, -0.9, -1, -0.3], [-0.7, -0.6, -0.1, -5]], np.float32)
Q = np.array([[-1.1, -0.5, -2.9, -0.3], [-0.7, -1.2, -0.1, -0.2]], np.float32)
A = np.array([1.5, -0.5], np.float32)[:, None].repeat(4, 1)
X = np.array([[1, 0, 1, 1], [1, 1, 1, 0]], np.float32)
Y = np.array([[1, 1, 1, 1], [1, 0, 0, 0]], np.float32)
PPO = partial(losses.ppo_loss, low=0.2, high=0.28)


def inputs(*arrays):
    return LossInputs(*map(jnp.asarray, arrays))


def algorithm(policy_loss=PPO, reduction="token-mean", **more) -> Algorithm:
    return Algorithm("test", standardized, policy_loss, reduction, **more)


def batch_of(alg, mask=X, o=O, q=Q, a=A):
    rollout = np.arange(mask.shape[0])[:, None].repeat(mask.shape[1], 1)
    return dataclasses.replace(
        empty_batch(*mask.shape),
        mask=mask.astype(np.float32),
        weight=token_weights(mask > 0, rollout, alg.reduction, constant=alg.constant).astype(np.float32),
        advantages=a,
        behavior_logprobs=q,
        old_logprobs=o,
        segments=np.ones(mask.shape, np.int32),
        rollout=rollout.astype(np.int32),
    )


def value(alg, batch, l=L, on_policy=False, entropy=None, jit=jax.jit):
    """(loss, gradient w.r.t. l, clipped)."""
    entropy = np.zeros_like(l) if entropy is None else entropy

    def f(x):
        return loss_terms(alg, x, jnp.asarray(entropy), batch, on_policy)

    (loss, clipped), grad = jit(jax.value_and_grad(f, has_aux=True))(jnp.asarray(l))
    return float(loss), np.asarray(grad), np.asarray(clipped)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_batch_x_clipped_surrogate():
    for reduction, expected in {
        "token-mean": -0.556841,
        "seq-mean-token-mean": -0.556841,
        "seq-mean-token-sum": -1.670522,
    }.items():
        alg = algorithm(reduction=reduction)
        close(value(alg, batch_of(alg))[0], expected)
    alg = algorithm()
    close(value(alg, batch_of(alg), jit=lambda f: f)[0], -0.556841)
    _, grad, clipped = value(alg, batch_of(alg))
    close(grad, [[-0.305351, 0, 0, -0.25], [0.083333, 0.151843, 0.083333, 0]])
    close((clipped * X).sum() / X.sum(), 1 / 6)
    close(value(alg, batch_of(alg), l=O)[0], -0.5)
    close(value(alg, batch_of(alg, o=np.full_like(O, np.nan)), on_policy=True)[0], -0.5)


def test_batch_y_reductions():
    for reduction, constant, expected in [
        ("token-mean", 0, -1.151517),
        ("seq-mean-token-mean", 0, -0.532198),
        ("seq-mean-token-sum", 0, -2.878792),
        ("constant", 4, -0.719698),
    ]:
        alg = algorithm(reduction=reduction, constant=constant)
        close(value(alg, batch_of(alg, mask=Y))[0], expected)


def test_batch_y_in_micro_batches_of_one_row():
    alg = algorithm()
    whole = batch_of(alg, mask=Y)
    parts = [jax.tree.map(lambda x, r=r: x[r : r + 1], whole) for r in range(2)]
    close(sum(value(alg, p, l=L[r : r + 1])[0] for r, p in enumerate(parts)), -1.151517)
    grads = np.concatenate([value(alg, p, l=L[r : r + 1])[1] for r, p in enumerate(parts)])
    close(grads, value(alg, whole)[1])


def test_gspo():
    alg = algorithm(gspo().policy_loss, "seq-mean-token-mean")
    loss, grad, _ = value(alg, batch_of(alg))
    close(loss, -0.444949)
    close(grad, [[0, 0, 0, 0], [0.101784, 0.101784, 0.101784, 0]])
    alg = algorithm(partial(losses.gspo_loss, low=0.2, high=0.28), "seq-mean-token-mean")
    close(value(alg, batch_of(alg))[0], -0.654649)


def test_cispo():
    alg = cispo(cap=5.0)
    loss, grad, _ = value(alg, batch_of(alg))
    close(loss, 0.841078)
    close(grad, [[-0.305351, 0, -0.679570, -0.25], [0.083333, 0.151843, 0.083333, 0]])


def test_corrections():
    tis = algorithm(correction=partial(losses.truncated_importance, cap=2.0))
    close(value(tis, batch_of(tis))[0], -0.908955)
    icepop = algorithm(correction=partial(losses.icepop, low=0.5, high=5.0))
    close(value(icepop, batch_of(icepop))[0], -1.056028)
    plain = algorithm()
    assert value(tis, batch_of(tis, q=O))[0] == value(plain, batch_of(plain))[0]
    everything = algorithm(correction=partial(losses.icepop, low=0.0, high=np.inf))
    by_hand = losses.ppo_loss(inputs(L, O, Q, A, X > 0, X), low=0.2, high=0.28)[0] * np.exp(O - Q)
    close(value(everything, batch_of(everything))[0], float((by_hand * X).sum() / 6))


def test_sequence_corrections_by_hand():
    """Of batch X, sum over a row's trained tokens of o - q: row 1 .1 + .9 + 0, row 2 0."""
    x = inputs(L, O, Q, A, X > 0, np.ones_like(X, np.int32))
    weights = losses.sequence_importance(x, cap=2.0)
    close(weights[0], np.full(4, 2.0))
    close(losses.sequence_importance(x, cap=9.0)[0], np.full(4, np.e))
    close(weights[1], np.ones(4))
    mean = np.exp(1.0 / 3)  # 1.3956
    assert np.asarray(losses.sequence_mask(x, low=0.5, high=mean + 0.01)).tolist() == np.ones((2, 4)).tolist()
    assert np.asarray(losses.sequence_mask(x, low=0.5, high=mean - 0.01))[:, 0].tolist() == [0, 1]
    assert np.asarray(losses.sequence_mask(x, low=1.1, high=2.0))[:, 0].tolist() == [1, 0]
    # q - l over row 2: 0, -.6, 0 (mean -.2). Only rows with A < 0 are ever masked.
    assert np.asarray(losses.off_policy_mask(x, bound=-0.1))[:, 0].tolist() == [1, 1]
    assert np.asarray(losses.off_policy_mask(x, bound=-0.3))[:, 0].tolist() == [1, 0]
    assert np.asarray(losses.off_policy_mask(x._replace(advantages=-A), bound=-0.8))[:, 0].tolist() == [0, 1]


def test_corrections_multiply():
    both = losses.product(losses.truncated_importance, partial(losses.sequence_mask, low=0.5, high=1.39))
    alg = algorithm(correction=both)
    tis = algorithm(correction=losses.truncated_importance)
    loss, grad, _ = value(alg, batch_of(alg))
    whole, other, _ = value(tis, batch_of(tis))
    assert np.array_equal(grad, other * np.array([[0], [1]]))
    assert loss != whole


def test_three_policies_are_kept_apart():
    """r compares l with o, the correction o with q: by hand for one token of each kind."""
    l, o, q = (np.array([[x]], np.float32) for x in (-1.0, -1.1, -1.4))
    one = np.ones((1, 1), np.float32)
    alg = algorithm(correction=losses.truncated_importance)

    def loss(**more):
        given = {"l": l, "o": o, "q": q} | more
        batch = batch_of(alg, mask=one, o=given["o"], q=given["q"], a=one)
        return value(alg, batch, l=given["l"])[:2]

    close(loss()[0], -np.exp(0.1) * np.exp(0.3))  # -r w A
    close(loss()[1], [[-np.exp(0.1) * np.exp(0.3)]])  # w is not differentiated
    close(loss(q=o)[0], -np.exp(0.1))  # sampler and trainer agree: the ratio alone is left
    close(loss(l=o)[0], -np.exp(0.3))  # nothing learned yet: the correction alone is left
    close(loss(q=q - 1)[0], -np.exp(0.1) * 2)  # cut at 2; the ratio does not see q
    close(loss(o=o - 1, q=q - 1)[0], -1.28 * np.exp(0.3))  # clipped at 1.28; the weight does not see l
    batch = batch_of(alg, mask=one, o=np.full_like(o, np.nan), q=q, a=one)
    close(value(alg, batch, l=l, on_policy=True)[0], -np.exp(0.4))  # one minibatch: o is l, detached


def test_icepop_over_everything_is_plain_importance_sampling():
    x = inputs(L, O, Q, A, X > 0, X)
    close(losses.icepop(x, low=0.0, high=np.inf), np.exp(O - Q))
    close(losses.icepop(x, low=0.5, high=2.0)[0], [np.exp(0.1), 1, 0, 1])


def test_the_log_loss():
    alg = algorithm(losses.log_loss)
    loss, grad, clipped = value(alg, batch_of(alg, a=np.ones_like(A)))
    close(loss, -(L * X).sum() / 6)
    close(grad, -X / 6)
    assert not clipped.any()


def test_kl_in_the_reward_is_not_in_the_loss_too():
    batch = batch_of(grpo(reduction="token-mean"), a=np.zeros_like(A))
    batch = dataclasses.replace(batch, ref_logprobs=L - np.float32(0.4))
    assert value(grpo(kl_coef=0.5, kl_in="reward"), batch)[0] == 0.0
    for name, kl in {"k1": 0.4, "k2": 0.08, "k3": 0.070320}.items():
        close(value(grpo(kl_coef=0.5, kl=getattr(losses, name)), batch)[0], 0.5 * kl)


def test_the_gradient_of_k2_is_the_kl_s_and_that_of_k3_is_not():
    """Over a distribution of two tokens: the expected gradient of k2 under the policy equals that of
    KL(policy || reference); k3's is that of the reverse KL."""
    ref = jnp.log(jnp.array([0.3, 0.7]))

    def expected(estimator, z):
        p = jax.lax.stop_gradient(jax.nn.softmax(z))
        return jnp.sum(p * estimator(jax.nn.log_softmax(z)[None], ref[None])[0])

    def kl(z):
        logp = jax.nn.log_softmax(z)
        return jnp.sum(jnp.exp(logp) * (logp - ref))

    def reverse(z):
        return jnp.sum(jnp.exp(ref) * (ref - jax.nn.log_softmax(z)))

    z = jnp.array([0.4, -0.9])
    close(jax.grad(partial(expected, losses.k2))(z), jax.grad(kl)(z))
    close(jax.grad(partial(expected, losses.k3))(z), jax.grad(reverse)(z))
    assert np.abs(jax.grad(kl)(z) - jax.grad(reverse)(z)).max() > 0.05
    close(
        jax.grad(partial(expected, losses.k1))(z), [0, 0]
    )  # the score function: k1 in the loss does nothing


def test_dual_clip():
    l, o, a = (np.array([[x]], np.float32) for x in (3.0, 0.0, -1.0))
    loss, clipped = losses.clipped_surrogate(jnp.asarray(l - o), a, low=0.2, high=0.28, dual=3.0)
    close(loss, [[3.0]])
    assert clipped[0, 0] == 1
    for made in (grpo, dapo, rloo, reinforce_pp, partial(dr_grpo, max_tokens=1)):
        x = inputs(l, o, o, a, l > 0, np.ones((1, 1), np.int32))
        close(made(dual=3.0).policy_loss(x)[0], [[3.0]])
        close(made().policy_loss(x)[0], [[np.exp(3.0)]])


def test_kl_estimators():
    difference = np.array([[0.4, -0.4, 0, 0.1, 0.2, -1]], np.float32)
    zero = np.zeros_like(difference)
    close(losses.k3(difference, zero), [[0.070320, 0.091825, 0, 0.004837, 0.018731, 0.718282]])
    close(losses.k1(difference, zero), difference)
    close(losses.k2(difference, zero), difference**2 / 2)


def test_kl_and_entropy_enter_the_loss():
    ref = L - np.float32(0.4)
    entropy = np.full_like(L, 2.0)
    alg = grpo(kl_coef=0.5, entropy_coef=0.1, reduction="token-mean")
    batch = dataclasses.replace(batch_of(alg, a=np.zeros_like(A)), ref_logprobs=ref)
    close(value(alg, batch, entropy=entropy)[0], 0.5 * 0.070320 - 0.2)


EVERY = [grpo(), dapo(), dr_grpo(max_tokens=4), rloo(), gspo(), cispo(), reinforce_pp(), rft()]


@pytest.mark.parametrize("alg", EVERY, ids=lambda a: a.name)
def test_an_all_masked_batch_has_loss_and_gradient_zero(alg):
    nothing = np.full_like(L, np.nan)
    batch = batch_of(alg, mask=np.zeros_like(X), o=nothing, q=nothing, a=nothing)
    for on_policy in (True, False):
        loss, grad, _ = value(alg, batch, l=nothing, on_policy=on_policy, entropy=nothing)
        assert loss == 0.0
        assert np.array_equal(grad, np.zeros_like(L))


@pytest.mark.parametrize(
    "alg",
    [
        grpo(entropy_coef=0.1, kl_coef=0.1, correction=losses.truncated_importance),
        gspo(clip_low=0.2, clip_high=0.28, correction=losses.icepop),
        cispo(),
    ],
    ids=lambda a: a.name,
)
def test_garbage_in_masked_slots_changes_nothing(alg):
    clean = dataclasses.replace(batch_of(alg), ref_logprobs=O)
    off = X == 0

    def spoil(x):
        return np.where(off, np.nan, x).astype(np.float32)

    spoiled = dataclasses.replace(
        clean,
        advantages=spoil(A),
        behavior_logprobs=spoil(Q),
        old_logprobs=spoil(O),
        ref_logprobs=spoil(O),
    )
    entropy = np.ones_like(L)
    expected = value(alg, clean, entropy=entropy)
    found = value(alg, spoiled, l=spoil(L), entropy=spoil(entropy))
    for a, b in zip(expected, found, strict=True):
        assert np.array_equal(a, b)
    assert np.array_equal(found[1][off], np.zeros(off.sum()))


def test_absurd_log_ratios_stay_finite():
    alg = algorithm()
    l = np.full_like(L, -1e4)
    for sign in (1, -1):
        loss, grad, _ = value(alg, batch_of(alg, a=A * sign, o=np.full_like(O, -1e5)), l=l)
        assert np.isfinite(loss)
        assert np.all(np.isfinite(grad))


WIDE_GSPO = gspo(clip_low=0.2, clip_high=0.28)
GSPO_TERMS = jax.jit(partial(loss_terms, WIDE_GSPO))
ragged = st.integers(0, 2**32 - 1).map(np.random.default_rng)


def random_batch(rng, alg, rows=3, length=6):
    mask = (rng.random((rows, length)) < 0.6).astype(np.float32)
    l, o, q = (-rng.exponential(1.0, mask.shape).astype(np.float32) for _ in range(3))
    a = rng.normal(size=(rows, 1)).repeat(length, 1).astype(np.float32)
    return batch_of(alg, mask=mask, o=o, q=q, a=a), l


@settings(max_examples=15, deadline=None)
@given(rng=ragged, padding=st.sampled_from([(0, 3), (3, 0)]))
def test_padding_side_and_length_change_nothing(rng, padding):
    batch, l = random_batch(rng, WIDE_GSPO)

    def pad(x):
        fill = np.nan if x.dtype.kind == "f" and x is not batch.mask and x is not batch.weight else 0
        return np.pad(x, ((0, 0), padding), constant_values=fill) if x.ndim == 2 else x

    padded = jax.tree.map(pad, batch)
    loss, _ = GSPO_TERMS(l, np.zeros_like(l), batch, False)
    other, _ = GSPO_TERMS(pad(l), np.zeros_like(pad(l)), padded, False)
    np.testing.assert_allclose(loss, other, rtol=1e-6, atol=1e-7)


@settings(max_examples=15, deadline=None)
@given(rng=ragged)
def test_gspo_on_sequences_of_length_one_is_ppo(rng):
    ppo = algorithm(partial(losses.ppo_loss, low=0.2, high=0.28))
    batch, l = random_batch(rng, ppo, rows=6, length=1)
    o = batch.old_logprobs
    x = inputs(l, o, o, batch.advantages, batch.mask > 0, batch.segments)
    sequence = losses.gspo_loss(x, low=0.2, high=0.28)
    token = losses.ppo_loss(x, low=0.2, high=0.28)
    on = batch.mask > 0
    np.testing.assert_array_equal(np.asarray(sequence[0])[on], np.asarray(token[0])[on])


@settings(max_examples=15, deadline=None)
@given(rng=ragged)
def test_every_policy_loss_is_positively_homogeneous(rng):
    for alg in (grpo(dual=3.0), gspo(dual=3.0), cispo(), rft()):
        batch, l = random_batch(rng, alg)
        o = batch.old_logprobs
        x = inputs(l, o, o, batch.advantages, batch.mask > 0, batch.segments)
        one, _ = alg.policy_loss(x)
        four, _ = alg.policy_loss(x._replace(advantages=4 * x.advantages))
        np.testing.assert_array_equal(4 * np.asarray(one), np.asarray(four))


@settings(max_examples=30, deadline=None)
@given(rng=ragged)
def test_k3_is_never_negative(rng):
    l, ref = rng.normal(size=(2, 2, 5)).astype(np.float32)
    assert float(jnp.min(losses.k3(l, ref))) >= -1e-6


def test_zero_advantage_means_zero_gradient():
    alg = grpo()
    _, grad, clipped = value(alg, batch_of(alg, a=np.zeros_like(A)))
    assert np.array_equal(grad, np.zeros_like(L))
    assert np.array_equal(clipped, np.zeros_like(L))


def test_bad_shapes_are_refused():
    with pytest.raises(ValueError, match="one shape"):
        losses.log_ratio(jnp.zeros((2, 3)), jnp.zeros((2, 1)))
    with pytest.raises(ValueError, match="constant"):
        token_weights(np.ones((1, 2), bool), np.zeros((1, 2)), "constant")

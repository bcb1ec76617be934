"""Losses per token, and the weights that turn them into one number. Pure functions of `[B, L]` arrays.

l = log-prob under the policy being trained, o = under the trainer's policy before its first update (old),
q = as the sampler reported it (behavior), A = advantage. Every policy loss is positively homogeneous in A,
and so is its product with a correction, which reads no more of A than its sign.

Deviations from the papers, by decision:

1. Log-ratios are cut to [-20, 20], so that one absurd token gives a large loss and not inf or NaN.
2. GSPO's sequence is a segment: one unbroken token trace. For an episode of one trace it is the paper's.
3. A sequence without a trained token does not count in a mean over sequences; a batch without any has loss 0.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from metagym.rl.types import Algorithm, Batch, CorrectionFn, LossInputs, Reduction

MAX_LOG_RATIO = 20.0


def _check(*arrays: jax.Array) -> None:
    if any(x.ndim != 2 or x.shape != arrays[0].shape for x in arrays):
        raise ValueError(f"expected arrays of one shape [B, L], got {[x.shape for x in arrays]}")


def log_ratio(l: jax.Array, o: jax.Array) -> jax.Array:
    """l - o, cut to [-20, 20]. f32[B, L]."""
    _check(l, o)
    return jnp.clip(l - o, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def over_segments(
    log_ratios: jax.Array, mask: jax.Array, segments: jax.Array, *, mean: bool = True
) -> jax.Array:
    """The mean (or sum) of the log-ratios over a segment's trained tokens, at each of its positions.

    f32[B, L], bool[B, L], i32[B, L] -> f32[B, L]. Padding (segment 0) counts as a segment of its own.
    """
    _check(log_ratios, mask, segments)

    def row(x: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
        total = jax.ops.segment_sum(jnp.where(m, x, 0.0), s, num_segments=x.shape[0] + 1)
        count = jax.ops.segment_sum(m.astype(x.dtype), s, num_segments=x.shape[0] + 1)
        return (total / jnp.maximum(count, 1.0) if mean else total)[s]

    return jax.vmap(row)(log_ratios, mask, segments)


def clipped_surrogate(
    log_ratios: jax.Array, advantages: jax.Array, *, low: float, high: float, dual: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """PPO's -min(r A, clip(r, 1 - low, 1 + high) A); with `dual` c also max'ed to c A from below where A < 0.

    f32[B, L] x 2 -> (loss f32[B, L], f32[B, L]: 1 where a bound replaced r A and stopped the gradient).
    """
    _check(log_ratios, advantages)
    ratio = jnp.exp(log_ratios)
    plain = ratio * advantages
    bounded = jnp.clip(ratio, 1.0 - low, 1.0 + high) * advantages
    clipped = bounded < plain
    surrogate = jnp.where(clipped, bounded, plain)
    if dual is not None:
        floor = dual * advantages
        below = (advantages < 0) & (surrogate < floor)
        surrogate, clipped = jnp.where(below, floor, surrogate), clipped | below
    return -surrogate, clipped.astype(jnp.float32)


def ppo_loss(
    x: LossInputs, *, low: float, high: float, dual: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """The clipped surrogate with one ratio a token, as GRPO (2402.03300) and DAPO (2503.14476) use it."""
    return clipped_surrogate(log_ratio(x.logprobs, x.old), x.advantages, low=low, high=high, dual=dual)


def gspo_loss(
    x: LossInputs, *, low: float, high: float, dual: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """GSPO (2507.18071): the clipped surrogate with one ratio a sequence, the geometric mean of its
    tokens'."""
    ratios = over_segments(log_ratio(x.logprobs, x.old), x.mask, x.segments)
    return clipped_surrogate(ratios, x.advantages, low=low, high=high, dual=dual)


def cispo_loss(x: LossInputs, *, cap: float) -> tuple[jax.Array, jax.Array]:
    """CISPO (2506.13585): -sg(min(r, cap)) A l. The weight is cut, the gradient of no token is."""
    ratio = jnp.exp(log_ratio(x.logprobs, x.old))
    weight = jax.lax.stop_gradient(jnp.minimum(ratio, cap))
    return -weight * x.advantages * x.logprobs, (ratio > cap).astype(jnp.float32)


def log_loss(x: LossInputs) -> tuple[jax.Array, jax.Array]:
    """-A l: supervised fine-tuning where A is 1, REINFORCE where it is an advantage. No bound, no ratio."""
    _check(*x)
    return -x.advantages * x.logprobs, jnp.zeros_like(x.logprobs)


# Corrections for the distance between the policies: detached weights f32[B, L] that the policy loss is
# multiplied with. A sequence is a segment, as in GSPO.


def truncated_importance(x: LossInputs, *, cap: float = 2.0) -> jax.Array:
    """TIS: min(exp(o - q), cap)."""
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio(x.old, x.behavior)), cap))


def icepop(x: LossInputs, *, low: float = 0.5, high: float = 5.0) -> jax.Array:
    """IcePop (2510.18855): exp(o - q) inside [low, high], else 0."""
    weight = jnp.exp(log_ratio(x.old, x.behavior))
    return jax.lax.stop_gradient(jnp.where((weight >= low) & (weight <= high), weight, 0.0))


def sequence_importance(x: LossInputs, *, cap: float = 2.0) -> jax.Array:
    """TIS with one weight a sequence: min(exp(sum of o - q), cap)."""
    total = over_segments(log_ratio(x.old, x.behavior), x.mask, x.segments, mean=False)
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(jnp.clip(total, -MAX_LOG_RATIO, MAX_LOG_RATIO)), cap))


def sequence_mask(x: LossInputs, *, low: float = 0.5, high: float = 2.0) -> jax.Array:
    """1 for a sequence whose exp(mean of o - q) lies in [low, high], else 0: sampler and trainer disagree."""
    ratio = jnp.exp(over_segments(log_ratio(x.old, x.behavior), x.mask, x.segments))
    return jax.lax.stop_gradient(((ratio >= low) & (ratio <= high)).astype(jnp.float32))


def off_policy_mask(x: LossInputs, *, bound: float) -> jax.Array:
    """DeepSeek-V3.2 (2512.02556): 0 where A < 0 and the mean of q - l over the sequence is above `bound`,
    else 1: what the policy has left behind is not pushed down further."""
    gone = over_segments(log_ratio(x.behavior, x.logprobs), x.mask, x.segments) > bound
    return jax.lax.stop_gradient(jnp.where(gone & (x.advantages < 0), 0.0, 1.0))


def product(*corrections: CorrectionFn) -> CorrectionFn:
    """The correction whose weights are the products of several corrections' weights."""

    def weights(x: LossInputs) -> jax.Array:
        return functools.reduce(jnp.multiply, [c(x) for c in corrections])

    return weights


def k1(l: jax.Array, ref: jax.Array) -> jax.Array:
    """l - ref: unbiased, of either sign. f32[B, L]."""
    return l - ref


def k2(l: jax.Array, ref: jax.Array) -> jax.Array:
    """(l - ref)^2 / 2: its gradient's expectation is the KL's. f32[B, L]."""
    return 0.5 * jnp.square(l - ref)


def k3(l: jax.Array, ref: jax.Array) -> jax.Array:
    """exp(ref - l) - (ref - l) - 1: unbiased and >= 0; its gradient's expectation is not the KL's. f32[B,
    L]."""
    difference = log_ratio(ref, l)
    return jnp.exp(difference) - difference - 1.0


def token_weights(
    mask: np.ndarray, sequence: np.ndarray, reduction: Reduction, *, constant: int = 0
) -> np.ndarray:
    """The share of each token in the loss, over a whole minibatch: the loss is the sum of weight x token
    loss.

    `mask` bool[...] and `sequence` i32[...] (which sequence a token belongs to) of any one shape -> f64 of
    it.

    - token-mean: 1 / trained tokens of the minibatch (DAPO)
    - seq-mean-token-mean: the mean over sequences of the mean over their tokens (GRPO's paper)
    - seq-mean-token-sum: the mean over sequences of the sum over their tokens
    - constant: the sum over tokens / (sequences x `constant`) (Dr.GRPO, as TRL does it)
    """
    mask, sequence = np.asarray(mask, bool), np.asarray(sequence)
    if mask.shape != sequence.shape:
        raise ValueError(f"mask and sequence have one shape; got {mask.shape}, {sequence.shape}")
    weights = np.zeros(mask.shape, np.float64)
    if not mask.any():
        return weights
    _, index, counts = np.unique(sequence[mask], return_inverse=True, return_counts=True)
    match reduction:
        case "token-mean":
            weights[mask] = 1.0 / index.size
        case "seq-mean-token-mean":
            weights[mask] = 1.0 / (counts.size * counts[index])
        case "seq-mean-token-sum":
            weights[mask] = 1.0 / counts.size
        case "constant":
            if constant < 1:
                raise ValueError(
                    f"reduction 'constant' divides by `constant` tokens a sequence; got {constant}"
                )
            weights[mask] = 1.0 / (counts.size * constant)
    return weights


def loss_terms(
    algorithm: Algorithm, logprobs: jax.Array, entropy: jax.Array, batch: Batch, on_policy: jax.Array | bool
) -> tuple[jax.Array, jax.Array]:
    """The loss of one micro-batch, a sum that adds up over the micro-batches of a minibatch, and f32[B, L]:
    clipped.

    `on_policy`: the old log-probs are this very program's, detached, and `batch.old_logprobs` is not read.
    Whatever stands off the mask, NaN included, reaches neither the loss nor its gradient.
    """
    mask = jnp.asarray(batch.mask) > 0

    def masked(x: jax.Array | np.ndarray) -> jax.Array:
        return jnp.where(mask, x, 0.0)

    l, entropy = masked(logprobs), masked(entropy)
    o = jnp.where(on_policy, jax.lax.stop_gradient(l), masked(batch.old_logprobs))
    q, advantages = masked(batch.behavior_logprobs), masked(batch.advantages)
    inputs = LossInputs(l, o, q, advantages, mask, jnp.asarray(batch.segments))
    loss, clipped = algorithm.policy_loss(inputs)
    if algorithm.correction is not None:
        loss = loss * algorithm.correction(inputs)
    if algorithm.kl is not None and algorithm.kl_in == "loss":
        loss = loss + algorithm.kl_coef * algorithm.kl(l, masked(batch.ref_logprobs))
    loss = loss - algorithm.entropy_coef * entropy
    return jnp.sum(masked(batch.weight) * masked(loss)), masked(clipped)

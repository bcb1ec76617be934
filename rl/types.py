"""The device-side types: pytrees that a jitted step takes and returns, and the record that is an
algorithm."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import numpy as np

Array = jax.Array | np.ndarray
Reduction = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "tokens",
        "targets",
        "mask",
        "weight",
        "advantages",
        "behavior_logprobs",
        "old_logprobs",
        "ref_logprobs",
        "positions",
        "segments",
        "rollout",
        "routing",
    ],
    meta_fields=[],
)
@dataclass(frozen=True)
class Batch:
    """One micro-batch: `B` rows of `L` positions, each row packed with segments (token traces).

    Position t reads `tokens[t]` and is asked for `targets[t]`, the next token; everything that belongs to the
    target (mask, weight, advantage, the log-probs) stands at t too. Off the mask the log-probs are NaN.

    Equal rows may be merged into one: `mask` then counts them, `weight` is the sum of theirs and `advantages`
    the mean under these weights.
    """

    tokens: Array  # i32[B, L], 0 in padding
    targets: Array  # i32[B, L]
    mask: Array  # f32[B, L], how many sampled tokens of the batch the target stands for; 0: not trained
    weight: (
        Array  # f32[B, L], share in the loss, which is the sum of weight x the token's loss; 0 off the mask
    )
    advantages: Array  # f32[B, L]
    behavior_logprobs: Array  # f32[B, L], as sampled
    old_logprobs: Array  # f32[B, L], as the trainer recomputed them before its first update; NaN until then
    ref_logprobs: Array  # f32[B, L], of the reference policy; NaN where there is none
    positions: Array  # i32[B, L], 0, 1, 2, ... within a segment
    segments: Array  # i32[B, L], 1, 2, ... within a row; 0 is padding
    rollout: Array  # i32[B, L], index of the trajectory within the step; -1 is padding
    routing: Array  # i32[B, L, R], experts that position t was sent to while sampling; R = 0 for dense models


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "opt_state", "step", "version", "rng"],
    meta_fields=[],
)
@dataclass(frozen=True)
class TrainState:
    """All that lives on the devices between steps."""

    params: Any  # f32 leaves
    opt_state: Any
    step: Array  # i32[], minibatches seen
    version: Array  # i32[], updates applied: names these weights
    rng: Array  # typed PRNG key


# Of an episode: one number for all it said, or f64[C], one for each of its model calls (`TokenTrace.turn`).
Advantage = float | np.ndarray
# (rewards f64[N], outcomes f64[N]) of one group -> advantages f64[N]
AdvantageFn = Callable[[np.ndarray, np.ndarray], np.ndarray]
# (logprobs, old, advantages f32[B, L], mask bool[B, L], segments i32[B, L]) -> (loss, clipped f32[B, L])
PolicyLossFn = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
# (old_logprobs, behavior_logprobs f32[B, L]) -> weights f32[B, L]
CorrectionFn = Callable[[jax.Array, jax.Array], jax.Array]
# (logprobs, ref_logprobs f32[B, L]) -> f32[B, L]
KLFn = Callable[[jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class Algorithm:
    """What makes GRPO GRPO: functions and numbers, made by `grpo()`, `dapo()`, ..."""

    name: str
    advantages: AdvantageFn
    policy_loss: (
        PolicyLossFn  # per token; positively homogeneous in the advantages, so that equal rows can be merged
    )
    reduction: Reduction
    correction: CorrectionFn | None = None  # weights between the trainer's old policy and the sampler
    kl: KLFn | None = None  # added to the loss; needs reference parameters
    kl_coef: float = 0.0
    entropy_coef: float = 0.0  # the bonus that is subtracted from the loss
    constant: int = 0  # tokens per sequence that "constant" divides by
    drop_equal: bool = False  # groups whose raw outcomes are all equal stay out of batch and denominators

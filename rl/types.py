"""The device-side types: pytrees that a jitted step takes and returns, and the record that is an
algorithm."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from metagym.types import Group, Trajectory

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
        "turn",
        "version",
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
    turn: Array  # i32[B, L], model call that the target belongs to; 0 in padding
    version: Array  # i32[B, L], of the weights that sampled the target, trained or not; -1: not sampled
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
# (group of N, its advantages f64[N]) -> N advantages, f64[C] each
CreditFn = Callable[[Group, np.ndarray], Sequence[Advantage]]
# an episode -> what of it is trained, or None
SelectFn = Callable[[Trajectory], Trajectory | None]


class LossInputs(NamedTuple):
    """What a policy loss and a correction read of a batch; 0 off the mask."""

    logprobs: jax.Array  # f32[B, L], l: of the policy that is trained
    old: jax.Array  # f32[B, L], o: of the trainer's policy before its first update
    behavior: jax.Array  # f32[B, L], q: as sampled
    advantages: jax.Array  # f32[B, L], A
    mask: jax.Array  # bool[B, L]
    segments: jax.Array  # i32[B, L]


# -> (loss f32[B, L], f32[B, L]: 1 where a bound stopped the gradient)
PolicyLossFn = Callable[[LossInputs], tuple[jax.Array, jax.Array]]
# -> weights f32[B, L], detached
CorrectionFn = Callable[[LossInputs], jax.Array]
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
    constant: int = 0  # tokens per sequence that "constant" divides by
    credit: CreditFn | None = None  # shares an episode's advantage out to its calls; None: all get it whole
    whiten: bool = False  # advantages are normalised over the trained tokens of the step
    correction: CorrectionFn | None = None  # weights for the distance between the policies, detached
    kl: KLFn | None = None  # needs reference parameters
    kl_coef: float = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    entropy_coef: float = 0.0  # the bonus that is subtracted from the loss
    drop_equal: bool = False  # groups whose raw outcomes are all equal stay out of batch and denominators
    select: SelectFn | None = None  # what is trained of an episode; it counts in its group's baseline anyway

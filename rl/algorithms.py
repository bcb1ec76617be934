"""Algorithms: each a few lines that say which functions and numbers it is made of."""

from functools import partial

from metagym.rl import advantages, losses
from metagym.rl.types import Algorithm, CorrectionFn, KLFn, Reduction


def grpo(
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    reduction: Reduction = "token-mean",
    kl_coef: float = 0.0,
    kl: KLFn = losses.k3,
    entropy_coef: float = 0.0,
    dual: float | None = None,
    correction: CorrectionFn | None = None,
    drop_equal: bool = True,
) -> Algorithm:
    """GRPO (2402.03300). Deviations: a token-mean and no KL by default, as in common use (the paper: a mean
    over sequences of means, KL 0.04); groups that teach nothing stay out of the denominator unless
    `drop_equal` is false.
    """
    return Algorithm(
        name="grpo",
        advantages=advantages.standardized,
        policy_loss=partial(
            losses.ppo_loss, low=clip, high=clip if clip_high is None else clip_high, dual=dual
        ),
        reduction=reduction,
        correction=correction,
        kl=kl if kl_coef else None,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        drop_equal=drop_equal,
    )


def dapo(
    *, clip_low: float = 0.2, clip_high: float = 0.28, correction: CorrectionFn | None = None
) -> Algorithm:
    """DAPO (2503.14476): clip-higher, token-mean, no KL, groups of equal outcome dropped. The overlong
    penalty is part of the reward (`advantages.overlong_penalty`)."""
    return Algorithm(
        name="dapo",
        advantages=advantages.standardized,
        policy_loss=partial(losses.ppo_loss, low=clip_low, high=clip_high),
        reduction="token-mean",
        correction=correction,
        drop_equal=True,
    )


def dr_grpo(*, max_tokens: int, clip: float = 0.2, correction: CorrectionFn | None = None) -> Algorithm:
    """Dr.GRPO (2503.20783): advantages not scaled by the spread, tokens summed over a constant
    `max_tokens`."""
    return Algorithm(
        name="dr_grpo",
        advantages=advantages.centered,
        policy_loss=partial(losses.ppo_loss, low=clip, high=clip),
        reduction="constant",
        constant=max_tokens,
        correction=correction,
    )


def rloo(*, clip: float = 0.2, correction: CorrectionFn | None = None) -> Algorithm:
    """RLOO (2402.14740): the others' mean as baseline, sequences summed."""
    return Algorithm(
        name="rloo",
        advantages=advantages.leave_one_out,
        policy_loss=partial(losses.ppo_loss, low=clip, high=clip),
        reduction="seq-mean-token-sum",
        correction=correction,
    )


def gspo(
    *, clip_low: float = 3e-4, clip_high: float = 4e-4, correction: CorrectionFn | None = None
) -> Algorithm:
    """GSPO (2507.18071): one ratio a sequence, a mean over sequences."""
    return Algorithm(
        name="gspo",
        advantages=advantages.standardized,
        policy_loss=partial(losses.gspo_loss, low=clip_low, high=clip_high),
        reduction="seq-mean-token-mean",
        correction=correction,
    )


def cispo(*, cap: float = 5.0, correction: CorrectionFn | None = None) -> Algorithm:
    """CISPO (2506.13585): the importance weight is cut at `cap` (absolute, as in TRL), no gradient is clipped
    away."""
    return Algorithm(
        name="cispo",
        advantages=advantages.standardized,
        policy_loss=partial(losses.cispo_loss, cap=cap),
        reduction="token-mean",
        correction=correction,
        drop_equal=True,
    )

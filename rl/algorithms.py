"""Algorithms: each a few lines that say which functions and numbers it is made of.

Every one takes `Terms` too: what is beside the policy loss (KL, entropy, correction), and how it is averaged.
"""

from functools import partial
from typing import Any, Literal, TypedDict, Unpack

from metagym.rl import advantages, losses, shaping
from metagym.rl.types import (
    AdvantageFn,
    Algorithm,
    CorrectionFn,
    CreditFn,
    KLFn,
    PolicyLossFn,
    Reduction,
    SelectFn,
)


class Terms(TypedDict, total=False):
    """What every algorithm takes; the fields of `Algorithm` with these names say what they mean."""

    reduction: Reduction
    constant: int
    credit: CreditFn | None
    whiten: bool
    correction: CorrectionFn | None
    kl: KLFn  # k3 if not given
    kl_coef: float  # 0: no KL, and no reference model in memory
    kl_in: Literal["loss", "reward"]
    entropy_coef: float
    drop_equal: bool
    select: SelectFn | None


def _algorithm(
    name: str, advantages: AdvantageFn, policy_loss: PolicyLossFn, terms: Terms, **defaults: Any
) -> Algorithm:
    """An `Algorithm` from its two functions; `terms` go before `defaults`."""
    given: dict[str, Any] = {"kl": losses.k3, **defaults, **terms}
    if not given.get("kl_coef"):
        given["kl"] = None
    return Algorithm(name, advantages, policy_loss, **given)


def grpo(
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    dual: float | None = None,
    **terms: Unpack[Terms],
) -> Algorithm:
    """GRPO (2402.03300). Deviations: a token-mean and no KL by default, as in common use (the paper: a mean
    over sequences of means, KL 0.04); groups that teach nothing stay out of the denominator unless
    `drop_equal` is false.
    """
    loss = partial(losses.ppo_loss, low=clip, high=clip if clip_high is None else clip_high, dual=dual)
    return _algorithm("grpo", advantages.standardized, loss, terms, reduction="token-mean", drop_equal=True)


def dapo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual: float | None = None,
    **terms: Unpack[Terms],
) -> Algorithm:
    """DAPO (2503.14476): clip-higher, token-mean, no KL, groups of equal outcome dropped. The overlong
    penalty is part of the reward (`shaping.overlong_penalty`)."""
    loss = partial(losses.ppo_loss, low=clip_low, high=clip_high, dual=dual)
    return _algorithm("dapo", advantages.standardized, loss, terms, reduction="token-mean", drop_equal=True)


def dr_grpo(
    *,
    max_tokens: int,
    clip: float = 0.2,
    clip_high: float | None = None,
    dual: float | None = None,
    **terms: Unpack[Terms],
) -> Algorithm:
    """Dr.GRPO (2503.20783): advantages not scaled by the spread, tokens summed over a constant
    `max_tokens`."""
    loss = partial(losses.ppo_loss, low=clip, high=clip if clip_high is None else clip_high, dual=dual)
    return _algorithm("dr_grpo", advantages.centered, loss, terms, reduction="constant", constant=max_tokens)


def rloo(
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    dual: float | None = None,
    **terms: Unpack[Terms],
) -> Algorithm:
    """RLOO (2402.14740): the others' mean as baseline, sequences summed."""
    loss = partial(losses.ppo_loss, low=clip, high=clip if clip_high is None else clip_high, dual=dual)
    return _algorithm("rloo", advantages.leave_one_out, loss, terms, reduction="seq-mean-token-sum")


def gspo(
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual: float | None = None,
    **terms: Unpack[Terms],
) -> Algorithm:
    """GSPO (2507.18071): one ratio a sequence, a mean over sequences."""
    loss = partial(losses.gspo_loss, low=clip_low, high=clip_high, dual=dual)
    return _algorithm("gspo", advantages.standardized, loss, terms, reduction="seq-mean-token-mean")


def cispo(*, cap: float = 5.0, **terms: Unpack[Terms]) -> Algorithm:
    """CISPO (2506.13585): the importance weight is cut at `cap` (absolute, as in TRL), no gradient is clipped
    away."""
    loss = partial(losses.cispo_loss, cap=cap)
    return _algorithm("cispo", advantages.standardized, loss, terms, reduction="token-mean", drop_equal=True)


def reinforce_pp(
    *,
    baseline: bool = False,
    clip: float = 0.2,
    clip_high: float | None = None,
    dual: float | None = None,
    **terms: Unpack[Terms],
) -> Algorithm:
    """REINFORCE++ (2501.03262): rewards normalised over the whole step instead of over a group; with
    `baseline` the group's mean is taken off first. A KL term is part of the reward. Deviation: it is the
    episode's, not that from each token on.
    """
    loss = partial(losses.ppo_loss, low=clip, high=clip if clip_high is None else clip_high, dual=dual)
    own = advantages.centered if baseline else advantages.returns
    defaults = {"reduction": "token-mean", "whiten": True, "kl_in": "reward", "kl": losses.k1}
    return _algorithm("reinforce_pp", own, loss, terms, **defaults)


def rft(*, above: float = 0.5, mask_format_errors: bool = True, **terms: Unpack[Terms]) -> Algorithm:
    """Rejection fine-tuning: episodes whose outcome is above `above` are learned by heart, replies that could
    not be turned into an action left out (2508.03501). The loss is the mean of -log p over their tokens."""
    select = partial(shaping.successes, above=above, mask_format_errors=mask_format_errors)
    return _algorithm("rft", advantages.ones, losses.log_loss, terms, reduction="token-mean", select=select)

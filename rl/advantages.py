"""Advantages: of the episodes of a group, shared out to their turns, normalised over a step. Host side, f64.

Deviations from the papers, by decision:

1. A group whose raw outcomes are all equal gets exactly 0: nothing was learned about the task, and float
   noise in mean and standard deviation (or a length penalty) would otherwise pass for a signal.
2. A group of one gets 0: there is nothing to compare it with.
"""

from collections.abc import Sequence

import numpy as np

from metagym.rl.types import Advantage, Algorithm
from metagym.types import Group, Trajectory


def _check(rewards: np.ndarray, outcomes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rewards, outcomes = np.asarray(rewards, np.float64), np.asarray(outcomes, np.float64)
    if rewards.ndim != 1 or rewards.shape != outcomes.shape:
        raise ValueError(
            f"rewards and outcomes of one group are two vectors [N]; got {rewards.shape}, {outcomes.shape}"
        )
    if not (np.all(np.isfinite(rewards)) and np.all(np.isfinite(outcomes))):
        raise ValueError("rewards and outcomes must be finite")
    return rewards, outcomes


def all_equal(outcomes: np.ndarray) -> bool:
    """Whether a group [N] teaches nothing: fewer than two members, or equal raw outcomes."""
    outcomes = np.asarray(outcomes)
    return outcomes.size < 2 or bool(np.all(outcomes == outcomes[0]))


def standardized(rewards: np.ndarray, outcomes: np.ndarray, *, eps: float = 1e-6) -> np.ndarray:
    """GRPO (2402.03300): (R - mean) / (std + eps), std with ddof 1. f64[N] -> f64[N]."""
    rewards, outcomes = _check(rewards, outcomes)
    if all_equal(outcomes):
        return np.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + eps)


def centered(rewards: np.ndarray, outcomes: np.ndarray) -> np.ndarray:
    """Dr.GRPO (2503.20783): R - mean. f64[N] -> f64[N]."""
    rewards, outcomes = _check(rewards, outcomes)
    if all_equal(outcomes):
        return np.zeros_like(rewards)
    return rewards - rewards.mean()


def leave_one_out(rewards: np.ndarray, outcomes: np.ndarray) -> np.ndarray:
    """RLOO (2402.14740): R - mean of the others. f64[N] -> f64[N]."""
    rewards, outcomes = _check(rewards, outcomes)
    n = len(rewards)
    if all_equal(outcomes):
        return np.zeros_like(rewards)
    return (rewards - rewards.mean()) * (n / (n - 1))


def returns(rewards: np.ndarray, outcomes: np.ndarray) -> np.ndarray:
    """The rewards themselves, for an algorithm that compares over the whole step. f64[N] -> f64[N]."""
    return _check(rewards, outcomes)[0]


def ones(rewards: np.ndarray, outcomes: np.ndarray) -> np.ndarray:
    """1 for every episode, for an algorithm that imitates what it selects. f64[N] -> f64[N]."""
    return np.ones_like(_check(rewards, outcomes)[0])


def of_group(algorithm: Algorithm, group: Group) -> list[Advantage]:
    """The advantages of a group's members, in their order.

    An episode counts once, whatever the number of its traces, and they all have its advantage. One that is
    not in the loss (infrastructure, invalid reward) is in no mean; its own advantage is NaN.
    """
    counted = [t for t in group.trajectories if t.stop.in_loss]
    rewards, outcomes = np.array([t.reward for t in counted]), np.array([t.outcome for t in counted])
    values = algorithm.advantages(rewards, outcomes)
    shared = iter(values if algorithm.credit is None else algorithm.credit(Group(counted), values))
    return [next(shared) if t.stop.in_loss else np.nan for t in group.trajectories]


def reward_to_go(trajectory: Trajectory, discount: float = 1.0) -> np.ndarray:
    """The discounted rewards from each turn on, f64[T]. What the episode's reward holds beyond its turns'
    (a penalty) belongs to the last one."""
    rewards = np.array([t.reward for t in trajectory.turns], np.float64)
    if not rewards.size:
        return rewards
    rewards[-1] += trajectory.reward - rewards.sum()
    for t in range(len(rewards) - 2, -1, -1):
        rewards[t] += discount * rewards[t + 1]
    return rewards


def by_turn(
    group: Group, episode: np.ndarray, *, discount: float = 1.0, scale: bool = True, weight: float = 0.0
) -> list[np.ndarray]:
    """Turn-wise (as 2505.11821): the reward from a turn on, against that of the members that came to the same
    turn; `scale` divides by their spread. Plus `weight` times the episode's advantage.

    (group of N, f64[N]) -> N x f64[T]. Turn i is the i-th model call, as in `metagym.episode.run`.
    """
    keys = [range(len(t.turns)) for t in group.trajectories]
    return _within(group, keys, episode, discount=discount, scale=scale, step=1.0, whole=weight)


def by_step(
    group: Group, episode: np.ndarray, *, discount: float = 0.95, scale: bool = True, weight: float = 1.0
) -> list[np.ndarray]:
    """Step-wise (GiGPO, 2505.10978): the episode's advantage, plus `weight` times that of each step among all
    steps of the group at which the same observation was seen.

    (group of N, f64[N]) -> N x f64[T]. A step that nobody shares has the episode's advantage alone.
    """
    keys = [[turn.observation for turn in t.turns] for t in group.trajectories]
    return _within(group, keys, episode, discount=discount, scale=scale, step=weight, whole=1.0)


def _within(
    group: Group,
    keys: Sequence[Sequence[object]],
    episode: np.ndarray,
    *,
    discount: float,
    scale: bool,
    step: float,
    whole: float,
) -> list[np.ndarray]:
    """whole x the episode's advantage + step x that of a turn among all turns with its key; f64[T] each."""
    to_go = [reward_to_go(t, discount) for t in group.trajectories]
    alike: dict[object, list[float]] = {}
    for own, values in zip(keys, to_go, strict=True):
        for key, value in zip(own, values, strict=True):
            alike.setdefault(key, []).append(value)
    equal = all_equal(np.array([t.outcome for t in group.trajectories]))

    def among(key: object, value: float) -> float:
        others = np.array(alike[key])
        if equal or np.all(others == others[0]):
            return 0.0
        return (value - others.mean()) / (others.std(ddof=1) + 1e-6 if scale else 1.0)

    return [
        whole * a + step * np.array([among(k, v) for k, v in zip(own, values, strict=True)])
        for a, own, values in zip(episode, keys, to_go, strict=True)
    ]


def whitened(values: np.ndarray) -> np.ndarray:
    """(A - mean) / sqrt(variance + 1e-8), variance with ddof 1; f64[N], one for each trained token of a step.
    Equal values get exactly 0."""
    if values.size < 2 or np.all(values == values[0]):
        return np.zeros_like(values)
    return (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)

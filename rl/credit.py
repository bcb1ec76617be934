"""Advantages of model calls from prefix rollouts (`metagym.prefix`).

The value of an episode at a turn is the mean return of what was played on from there: the continuations, and
the episode itself. What happened between two such turns gets the difference of their values (as VinePPO,
2410.01679, does for every step); before the first one counts the group's mean, after the last one what the
episode got. The parts of an episode add up to its return less the group's mean.
"""

from collections.abc import Sequence

import numpy as np

from metagym.types import Branch, Group, Trajectory


def by_prefix(group: Group, episode: np.ndarray, *, scale: bool = True) -> list[np.ndarray]:
    """A `CreditFn`: (group of N, f64[N]) -> N x f64[C], one advantage for each model call.

    A continuation's own calls get its return less the value where it begins. `scale` divides by the spread
    (ddof 1) of all returns of the group, continuations included. Continuations that are not in the loss count
    nowhere and get 0. An episode without any gets `episode`, at each of its calls. Turn i of an episode is
    its i-th model call.
    """
    members = group.trajectories
    returns = [t.reward for t in members] + [b.trajectory.reward for t in members for b in _good(t)]
    mean = float(np.mean([t.reward for t in members])) if members else 0.0
    equal = len(returns) < 2 or all(r == returns[0] for r in returns)
    spread = 1.0 if equal or not scale else float(np.std(returns, ddof=1)) + 1e-6

    def of(t: Trajectory, whole: float) -> np.ndarray:
        last = max([len(t.turns), *(b.calls[1] for b in t.branches)])
        advantages = np.zeros(last)
        if not _good(t):
            advantages[: len(t.turns)] = whole
            return advantages
        points = sorted({b.at for b in _good(t)})
        values = [mean, *(value(t, at) for at in points), t.reward]
        edges = [0, *points, len(t.turns)]
        for i in range(len(edges) - 1):
            advantages[edges[i] : edges[i + 1]] = (values[i + 1] - values[i]) / spread
        for b in _good(t):
            advantages[b.calls[0] : b.calls[1]] = (b.trajectory.reward - value(t, b.at)) / spread
        return advantages

    return [of(t, float(a)) for t, a in zip(members, episode, strict=True)]


def value(trajectory: Trajectory, at: int) -> float:
    """The mean return from turn `at` on, of the episode and of its continuations from there."""
    returns = [b.trajectory.reward for b in _good(trajectory) if b.at == at]
    return float(np.mean([trajectory.reward, *returns]))


def _good(trajectory: Trajectory) -> Sequence[Branch]:
    return [b for b in trajectory.branches if b.trajectory.stop.in_loss]

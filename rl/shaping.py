"""Shaping and filters: what is added to a reward, which groups, episodes and tasks are trained on. Pure.

The raw outcome is never touched: filters read it, penalties are seen in the reward alone.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from metagym.rl.advantages import all_equal
from metagym.rl.batching import micro_batches, segments
from metagym.rl.types import Algorithm, Batch
from metagym.types import Group, StopReason, Trajectory

# (episode) -> what is added to its reward
Penalty = Callable[[Trajectory], float]
CUT_OFF = (
    StopReason.TURN_LIMIT,
    StopReason.TOKEN_LIMIT,
    StopReason.CONTEXT_OVERFLOW,
    StopReason.AGENT_TIMEOUT,
)


def length_penalty(trajectory: Trajectory, *, threshold: int, maximum: int) -> float:
    """Nebius (2508.03501): 0 below `threshold` turns, then linear to -1 at `maximum`, and beyond."""
    steps = len(trajectory.turns)
    return 0.0 if steps < threshold else (threshold - steps) / (maximum - threshold)


def overlong_penalty(trajectory: Trajectory, *, maximum: int, cache: int) -> float:
    """DAPO (2503.14476): 0 up to `maximum - cache` sampled tokens of the episode, then linear to -1 at
    `maximum`, and -1 beyond."""
    tokens = sum(int(t.trainable.sum()) for t in trajectory.traces)
    return min(0.0, max(-1.0, (maximum - cache - tokens) / cache))


def format_penalty(trajectory: Trajectory, *, cost: float, most: float = 1.0) -> float:
    """-`cost` for each reply that could not be turned into an action, -`most` at most."""
    return -min(most, cost * len(format_errors(trajectory)))


def shaped(trajectory: Trajectory, penalties: Iterable[Penalty]) -> Trajectory:
    """The episode with its penalties in the reward."""
    added = sum(p(trajectory) for p in penalties)
    return dataclasses.replace(trajectory, reward=trajectory.reward + added) if added else trajectory


def format_errors(trajectory: Trajectory) -> list[int]:
    """The turns whose reply could not be turned into an action. One that came too late is not one of them."""
    turns = trajectory.turns
    late = trajectory.stop == StopReason.AGENT_TIMEOUT
    return [i for i, t in enumerate(turns) if t.action is None and not (late and i == len(turns) - 1)]


def teaches(group: Group) -> bool:
    """Whether the raw outcomes of a group differ, those of continuations included; episodes that are not in
    the loss do not count. What dynamic sampling keeps."""
    played = [x for t in group.trajectories for x in (t, *(b.trajectory for b in t.branches))]
    return not all_equal(np.array([t.outcome for t in played if t.stop.in_loss]))


def successes(
    trajectory: Trajectory, *, above: float = 0.5, mask_format_errors: bool = True
) -> Trajectory | None:
    """The episode if its raw outcome is above `above`, else None. With `mask_format_errors` the replies of
    its format errors stay as context and are not trained. Turn i is the i-th model call."""
    if not trajectory.outcome > above:
        return None
    wrong = format_errors(trajectory) if mask_format_errors else []
    if not wrong:
        return trajectory
    traces = [
        dataclasses.replace(t, trainable=t.trainable & ~np.isin(t.turn, wrong)) for t in trajectory.traces
    ]
    return dataclasses.replace(trajectory, traces=tuple(traces))


def complete(trajectory: Trajectory) -> Trajectory | None:
    """The episode unless it was cut off (turns, tokens, context, time): DAPO's overlong filtering."""
    return None if trajectory.stop in CUT_OFF else trajectory


def solvable(solved: int, played: int, *, at_least: int = 1, at_most: float = 2 / 3) -> bool:
    """A curriculum: whether a task that was solved so often is neither out of reach nor known. One that was
    not played yet is kept.

    The defaults drop what was never solved or more than 2/3 of the time; at_most=0.75 after four episodes
    keeps what was solved 1 to 3 times.
    """
    return played == 0 or (solved >= at_least and solved <= at_most * played)


def with_kl(
    groups: Sequence[Group],
    score: Callable[[Batch], np.ndarray],
    algorithm: Algorithm,
    *,
    rows: int,
    length: int,
    align: int = 1,
) -> tuple[list[Group], dict[str, float]]:
    """The groups with `kl_coef` x KL taken off each episode's reward: the sum over its trained tokens, from
    the log-probs as sampled and the reference's, which `score` gives for a micro-batch. And the metric
    `reward/kl`, its mean over the episodes.

    An episode that is longer than a row has no KL; it is not trained either.
    """
    assert algorithm.kl is not None
    none = [np.zeros(len(g.trajectories)) for g in groups]
    total = np.zeros(sum(len(g.trajectories) for g in groups))
    found, _ = segments(groups, none, length)
    for batch in micro_batches(found, rows=rows, length=length, align=align) if found else ():
        on = np.asarray(batch.mask) > 0
        q, ref = (np.where(on, x, 0.0) for x in (batch.behavior_logprobs, score(batch)))
        np.add.at(total, batch.rollout[on], np.asarray(algorithm.kl(q, ref), np.float64)[on])  # pyright: ignore
    taken = iter(algorithm.kl_coef * total)

    def without(t: Trajectory) -> Trajectory:
        return dataclasses.replace(t, reward=t.reward - float(next(taken)))

    metrics = {"reward/kl": float(total.mean()) if total.size else 0.0}
    return [Group(tuple(without(t) for t in g.trajectories)) for g in groups], metrics

"""Advantages from prefix rollouts, with numbers worked by hand."""

import dataclasses

import numpy as np
import pytest

from metagym.rl.advantages import of_group
from metagym.rl.algorithms import grpo
from metagym.rl.batching import pack
from metagym.rl.credit import by_prefix, value
from metagym.rl.shaping import teaches
from metagym.types import Branch, Group, StopReason, Task, TokenTrace, Trajectory, Turn

TASK = Task("t", "tiny", "train")


def episode(turns, reward, branches=(), stop=StopReason.TERMINATED, traces=()):
    spoken = tuple(Turn("o", "r", "a", 0.0) for _ in range(turns))
    return Trajectory(TASK, 0, spoken, traces, reward, reward, stop, branches=tuple(branches))


def branch(at, first, own, reward, stop=StopReason.TERMINATED):
    return Branch(at, (first, first + own), episode(at + own, reward, stop=stop))


# Four turns, return 1; from turn 1 on two continuations got 0 and 0, from turn 3 on two got 1 and 0.
TREE = episode(
    4, 1.0, [branch(1, 4, 3, 0.0), branch(1, 7, 2, 0.0), branch(3, 9, 1, 1.0), branch(3, 10, 1, 0.0)]
)


def test_what_happens_between_two_points_gets_the_difference_of_their_values():
    assert value(TREE, 1) == pytest.approx(1 / 3)
    assert value(TREE, 3) == pytest.approx(2 / 3)
    group = Group((TREE, episode(2, 0.0)))  # the group's mean is 1/2
    tree, other = by_prefix(group, np.array([0.5, -0.5]), scale=False)
    a, b, c = 1 / 3 - 1 / 2, 2 / 3 - 1 / 3, 1 - 2 / 3
    third = 1 / 3
    expected = [a, b, b, c] + [-third] * 5 + [1 - 2 / 3, -2 / 3]
    np.testing.assert_allclose(tree, expected, atol=1e-12)
    np.testing.assert_allclose(other, [-0.5, -0.5])  # no continuations: its advantage as a whole
    assert a + b + c == pytest.approx(1.0 - 0.5)  # the parts add up to the whole
    scaled = by_prefix(group, np.array([0.5, -0.5]))[0]
    spread = np.std([1, 0, 0, 0, 1, 0], ddof=1) + 1e-6
    np.testing.assert_allclose(scaled, np.array(expected) / spread, atol=1e-12)


def test_continuations_that_failed_count_nowhere():
    broken = [branch(1, 4, 2, 99.0, StopReason.INFRA), branch(1, 6, 3, 0.0)]
    one = episode(4, 1.0, broken)
    (found,) = by_prefix(Group((one,)), np.zeros(1), scale=False)
    np.testing.assert_allclose(found, [-0.5, 0.5, 0.5, 0.5, 0, 0, -0.5, -0.5, -0.5])


def test_equal_returns_give_exactly_0():
    group = Group((episode(2, 0.3, [branch(1, 2, 1, 0.3)]), episode(2, 0.3)))
    assert not teaches(group)
    for found in by_prefix(group, np.zeros(2)):
        assert not found.any()


def test_a_group_whose_continuations_alone_differ_teaches():
    assert teaches(Group((episode(2, 1.0, [branch(1, 2, 1, 0.0)]), episode(2, 1.0))))


def trace(turns, trainable):
    """A call a turn: one token asked, one said."""
    sampled = np.tile([False, True], len(turns))
    return TokenTrace(
        tokens=np.repeat(turns, 2).astype(np.int32),
        sampled=sampled,
        trainable=sampled & np.repeat(trainable, 2),
        logprobs=np.where(sampled, -1.0, np.nan).astype(np.float32),
        version=np.where(sampled, 0, -1).astype(np.int32),
        turn=np.repeat(turns, 2).astype(np.int32),
    )


def test_each_token_of_the_tree_is_trained_once_with_the_advantage_of_its_call():
    """Calls 0 and 1 are the episode's, 2 that of a continuation from turn 1: it shares call 0."""
    traces = (trace([0, 1], [True, True]), trace([0, 2], [False, True]))
    one = dataclasses.replace(episode(2, 1.0, [branch(1, 2, 1, 0.0)]), traces=traces)
    group = Group((one, episode(1, 0.0, traces=(trace([0], [True]),))))
    algorithm = grpo(credit=lambda g, values: by_prefix(g, values, scale=False))
    advantages = of_group(algorithm, group)
    packed = pack([group], [advantages], algorithm, rows=4, length=8)
    ((batch,),) = packed.minibatches
    on = batch.mask > 0
    seen = sorted(
        zip(batch.rollout[on].tolist(), batch.turn[on].tolist(), batch.advantages[on].tolist(), strict=True)
    )
    whole = float(np.asarray(advantages[1])[0])
    assert seen == [(0, 0, 0.0), (0, 1, 0.5), (0, 2, -0.5), (1, 0, pytest.approx(whole))]

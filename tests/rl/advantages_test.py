"""Advantages: the reference numbers, what was decided here, and the invariants."""

import dataclasses
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metagym.rl.advantages import (
    by_step,
    by_turn,
    centered,
    leave_one_out,
    of_group,
    ones,
    returns,
    reward_to_go,
    standardized,
    whitened,
)
from metagym.rl.algorithms import grpo, reinforce_pp, rloo
from metagym.rl.batching import pack
from metagym.types import Group, StopReason, Turn

ALL = (standardized, centered, leave_one_out)
rewards = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=2, max_size=8)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_reference_numbers():
    mixed, equal = np.array([1.0, 0, 0, 1]), np.ones(4)
    close(standardized(mixed, mixed), [0.866024, -0.866024, -0.866024, 0.866024])
    close(centered(mixed, mixed), [0.5, -0.5, -0.5, 0.5])
    close(leave_one_out(mixed, mixed), [0.666667, -0.666667, -0.666667, 0.666667])
    uneven = np.array([1, 0.5, 0, -0.25])
    close(standardized(uneven, uneven), [1.240214, 0.338240, -0.563734, -1.014720])
    for advantages in ALL:
        assert np.array_equal(advantages(equal, equal), np.zeros(4))


@pytest.mark.parametrize("advantages", ALL)
def test_equal_outcomes_are_exactly_zero_whatever_the_rewards(advantages):
    noisy = np.full(7, 0.1) * 3  # mean and std are not exact in floats
    assert np.array_equal(advantages(noisy, noisy), np.zeros(7))
    # An all-failed group whose length penalties differ slips through a filter on the shaped reward.
    assert np.array_equal(advantages(np.array([0, -0.7, -0.7, -0.33]), np.zeros(4)), np.zeros(4))


@pytest.mark.parametrize("advantages", ALL)
def test_a_group_of_one_gets_zero(advantages):
    assert np.array_equal(advantages(np.array([1.0]), np.array([1.0])), [0.0])
    assert advantages(np.zeros(0), np.zeros(0)).shape == (0,)


@pytest.mark.parametrize("advantages", ALL)
def test_bad_input_is_refused(advantages):
    with pytest.raises(ValueError, match="finite"):
        advantages(np.array([np.nan, 1.0]), np.array([0.0, 1.0]))
    with pytest.raises(ValueError, match=r"vectors \[N\]"):
        advantages(np.zeros((2, 2)), np.zeros((2, 2)))


@settings(max_examples=30, deadline=None)
@given(values=rewards, shift=st.integers(-4, 4), scale=st.sampled_from([0.5, 2.0, 8.0]), data=st.data())
def test_invariants(values, shift, scale, data):
    r = np.array(values)
    order = np.array(data.draw(st.permutations(range(len(r)))))
    for advantages in ALL:
        a = advantages(r, r)
        assert abs(a.sum()) < 1e-9
        np.testing.assert_allclose(advantages(r + shift, r), a, atol=1e-9)
        np.testing.assert_allclose(advantages(r[order], r[order]), a[order], atol=1e-9)
    np.testing.assert_allclose(standardized(r * scale, r), standardized(r, r), rtol=2e-5, atol=1e-9)


def episode(tiny, rewards, outcome, seen=None, traces=(), bonus=0.0):
    """One whose turns gave these rewards; `bonus` came on top."""
    seen = seen or [str(i) for i in range(len(rewards))]
    turns = tuple(Turn(o, "said", "go", float(r)) for o, r in zip(seen, rewards, strict=True))
    return dataclasses.replace(
        tiny.trajectory(traces, outcome), turns=turns, reward=float(sum(rewards) + bonus)
    )


def test_all_traces_of_an_episode_share_its_advantage_and_count_once(tiny):
    """A rollout of three branches is one member of its group: the mean is over rollouts, not over traces."""
    rng = np.random.default_rng(0)
    branched = tiny.trajectory([tiny.trace(rng) for _ in range(3)], 1.0)
    plain = [tiny.trajectory([tiny.trace(rng)], x) for x in (0.0, 0.0, 1.0)]
    group = Group([branched, *plain])
    values = of_group(grpo(), group)
    close(values, [0.866024, -0.866024, -0.866024, 0.866024])
    packed = pack([group], [values], grpo(), rows=8, length=8)
    ((batch,),) = packed.minibatches
    assert packed.metrics["batch/segments"] == 6
    for rollout, value in enumerate(values):
        found = batch.advantages[(batch.rollout == rollout) & (batch.mask > 0)]
        np.testing.assert_allclose(found, value, rtol=1e-6)
    assert ((batch.rollout == 0) & (batch.mask > 0)).sum() == 6


def test_infrastructure_faults_are_in_no_mean(tiny):
    group = Group([tiny.trajectory([], x) for x in (1.0, 0.0)])
    fault = tiny.trajectory([], 5.0, stop=StopReason.INVALID_REWARD)
    alone, among = of_group(rloo(), group), of_group(rloo(), Group([fault, *group.trajectories]))
    assert among[1:] == alone == [1.0, -1.0]
    assert np.isnan(among[0])


def test_the_reward_from_each_turn_on(tiny):
    one = episode(tiny, [1, 0, 2], 1.0, bonus=-0.5)
    close(reward_to_go(one), [2.5, 1.5, 1.5])
    close(reward_to_go(one, 0.5), [1.375, 0.75, 1.5])
    assert reward_to_go(episode(tiny, [], 0.0)).shape == (0,)


def test_turn_wise_advantages(tiny):
    """By hand: rewards to go [1, 1], [3], [2, 0]; the second turn was reached by two."""
    group = Group([episode(tiny, r, o) for r, o in [([0, 1], 1.0), ([3], 1.0), ([2, 0], 0.0)]])
    found = by_turn(group, np.zeros(3), scale=False)
    for values, expected in zip(found, [[-1, 0.5], [1], [0, -0.5]], strict=True):
        close(values, expected)
    scaled = by_turn(group, np.array([1.0, 0, 0]), weight=10.0)
    close(scaled[0], [10 - 1, 10 + 0.5 / np.sqrt(0.5)])
    algorithm = grpo(credit=by_turn)
    assert [a.tolist() for a in of_group(algorithm, group)] == [
        a.tolist() for a in by_turn(group, np.zeros(3))
    ]
    same = Group([episode(tiny, [r], 1.0) for r in (0, 1)])
    assert [a.tolist() for a in by_turn(same, np.zeros(2))] == [[0], [0]]  # equal raw outcomes


def test_step_wise_advantages(tiny):
    """By hand: the state "x" is seen three times with rewards to go 1, 1 and 0, "y" and "z" once each."""
    group = Group([episode(tiny, [0, 1], 1.0, ["x", "x"]), episode(tiny, [0, 0, 0], 0.0, ["y", "x", "z"])])
    found = by_step(group, np.array([0.7, -0.7]), discount=1.0, scale=False, weight=0.5)
    close(found[0], [0.7 + 0.5 / 3, 0.7 + 0.5 / 3])
    close(found[1], [-0.7, -0.7 - 0.5 * 2 / 3, -0.7])
    scaled = by_step(group, np.zeros(2), discount=1.0)
    close(scaled[1][1], (-2 / 3) / (np.std([1, 1, 0], ddof=1) + 1e-6))


@pytest.mark.parametrize("credit", [by_turn, by_step])
def test_credit_within_a_group_sums_to_zero_and_follows_its_order(tiny, credit):
    rng = np.random.default_rng(3)
    members = [
        episode(tiny, rng.integers(0, 3, n), rng.integers(0, 2), rng.choice(["a", "b"], n).tolist())
        for n in (3, 1, 4, 2, 2)
    ]
    options = {"scale": False} if credit is by_turn else {"scale": False, "weight": 1.0}
    found = credit(Group(members), np.zeros(5), **options)
    assert abs(sum(x.sum() for x in found)) < 1e-9
    order = rng.permutation(5)
    other = credit(Group([members[i] for i in order]), np.zeros(5), **options)
    for i, values in zip(order, other, strict=True):
        np.testing.assert_allclose(values, found[i], atol=1e-12)


def test_step_wise_advantages_reach_their_tokens(tiny):
    trace = tiny.trace(np.random.default_rng(0), 2, 2, turns=2)
    group = Group([episode(tiny, [0, 1], 1.0, traces=[trace]), episode(tiny, [0, 0], 0.0, traces=[trace])])
    algorithm = grpo(credit=partial(by_step, scale=False, discount=1.0, weight=2.0))
    values = of_group(algorithm, group)
    ((batch,),) = pack([group], [values], algorithm, rows=2, length=8).minibatches
    for row in range(2):
        own = values[batch.rollout[row, 0]]
        np.testing.assert_allclose(batch.advantages[row][batch.mask[row] > 0], np.repeat(own, 2), rtol=1e-6)


def test_reinforce_pp_normalises_over_the_tokens_of_the_step(tiny):
    """By hand: rewards 1 (2 tokens) and 0 (4 tokens): mean 1/3, variance 4/15 with ddof 1."""
    rng = np.random.default_rng(0)
    groups = [Group([tiny.trajectory([tiny.trace(rng, 2, n)], x, task=str(x))]) for n, x in [(2, 1), (4, 0)]]
    algorithm = reinforce_pp()
    values = [of_group(algorithm, g) for g in groups]
    assert values == [[1.0], [0.0]]
    for minibatches in (1, 2):
        packed = pack(groups, values, algorithm, rows=2, length=8, minibatches=minibatches)
        flat = [b for m in packed.minibatches for b in m]
        advantages = np.concatenate([b.advantages[b.mask > 0] for b in flat])
        spread = np.sqrt(4 / 15)
        close(np.sort(advantages), [*[(-1 / 3) / spread] * 4, *[(2 / 3) / spread] * 2])
        assert abs(advantages.sum()) < 1e-6
    equal = pack(groups, [[0.3], [0.3]], algorithm, rows=2, length=8)
    assert equal.minibatches == ((),)
    np.testing.assert_array_equal(whitened(np.full(3, 0.1) * 3), np.zeros(3))
    close(of_group(reinforce_pp(baseline=True), Group([tiny.trajectory([], x) for x in (1, 0)])), [0.5, -0.5])


def test_returns_and_ones():
    r = np.array([2.0, -1.0])
    assert returns(r, r).tolist() == [2, -1]
    assert ones(r, r).tolist() == [1, 1]

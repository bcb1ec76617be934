"""Rollouts in the background: what is open, in which order it comes, how old its tokens are, what becomes of
slow, hung, failed and useless ones."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from metagym.errors import EngineError, InputError, TrainingError
from metagym.rl.rollouts import RolloutStream, TaskStream, ThreadExecutor, seed_of
from metagym.types import StopReason, Task, TokenTrace, Trajectory

TASKS = [Task(f"t{i}", "tiny", "train") for i in range(5)]


class Clock:
    """The weights' version, and how long each group takes."""

    def __init__(self, seconds=lambda request: 0.0):
        self.version, self.seconds, self.lock, self.begun = 0, seconds, threading.Lock(), []

    def play(self, request):
        """Two tokens, sampled before and after the wait."""
        with self.lock:
            self.begun.append(request)
        first = self.version
        time.sleep(self.seconds(request))
        outcome = float(request.sampling_seed % 2)
        trace = TokenTrace(
            tokens=np.arange(3, dtype=np.int32),
            sampled=np.array([False, True, True]),
            trainable=np.array([False, True, True]),
            logprobs=np.array([np.nan, -1, -1], np.float32),
            version=np.array([-1, first, self.version], np.int32),
            turn=np.zeros(3, np.int32),
        )
        return Trajectory(request.task, request.seed, (), (trace,), outcome, outcome, StopReason.TERMINATED)


@pytest.fixture
def stream():
    made = []

    def make(clock, *, workers=8, tasks=None, **more):
        settings = {"groups": 2, "group_size": 2, "steps": 100, "seed": 1} | more
        episode = clock if callable(clock) else clock.play
        tasks = tasks or TaskStream(TASKS, seed=0)
        made.append(RolloutStream(episode, tasks, executor=ThreadExecutor(workers), **settings))
        return made[-1]

    before = threading.active_count()
    yield make
    for one in made:
        one.close()
        one.close()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def steps(stream, clock, count, *, train_s=0.0, first=1):
    """That many steps, each with a push of weights at its end. -> (rollouts, groups' places) of each."""
    found = []
    for step in range(first, first + count):
        rollouts = stream.take(step, clock.version)
        found.append((rollouts, list(stream._taken)))
        time.sleep(train_s)
        clock.version += 1
    return found


def ages(found, clock):
    """How many pushes old each trained token was when its step began."""
    return [
        np.concatenate(
            [step - t.version[t.trainable] for g in r.groups for x in g.trajectories for t in x.traces]
        )
        for step, (r, _) in enumerate(found)
    ]


def test_with_a_staleness_of_0_nothing_is_played_between_steps(stream):
    clock = Clock(lambda r: 0.001 * (r.group % 2))
    one = stream(clock)
    time.sleep(0.05)
    assert clock.begun == []
    for step in (1, 2, 3):
        one.take(step, clock.version)
        clock.version += 1
        time.sleep(0.03)
        assert len(clock.begun) == 4 * step
    assert {r.version for r in clock.begun if r.group in (2, 3)} == {1}
    assert [r.metrics["staleness/max"] for r, _ in steps(one, clock, 2, first=4)] == [0, 0]


def test_tasks_seeds_and_ids_are_functions_of_the_place_alone(stream):
    def played(clock, **more):
        steps(stream(clock, **more), clock, 6)
        return {r.id: (r.task, r.seed, r.sampling_seed) for r in clock.begun if r.group < 12}

    calm = played(Clock())
    wild = played(Clock(lambda r: 0.002 * (r.sampling_seed % 7)), staleness=2, in_order=False, workers=24)
    assert calm == wild
    assert len(calm) == 24
    order = TaskStream(TASKS, seed=0).take(12)
    for place in range(12):
        task, world, sampling = calm[f"{place:06d}-01"]
        assert (task, world, sampling) == (order[place], seed_of(1, 1, place), seed_of(1, 1, place, 1))


@pytest.mark.parametrize("staleness", [1, 2])
def test_the_trainer_that_falls_behind_holds_up_the_players(stream, staleness):
    clock = Clock()
    one = stream(clock, staleness=staleness)
    for step in (1, 2):
        one.take(step, 0)
        time.sleep(0.1)  # far longer than the episodes take
        assert len({r.group for r in clock.begun}) == 2 * (step + staleness)


def test_nothing_is_begun_for_steps_that_will_not_be_made(stream):
    clock = Clock()
    found = steps(stream(clock, staleness=3, steps=4), clock, 4)
    assert [places for _, places in found] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert len(clock.begun) == 16


def test_in_order_a_step_has_the_next_groups_whatever_the_clock_says(stream):
    clock = Clock(lambda r: 0.05 if r.group == 2 else 0.0)
    found = steps(stream(clock, staleness=1), clock, 5)
    assert [places for _, places in found] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    for rollouts, places in found:
        assert [g.trajectories[0].task for g in rollouts.groups] == [
            TaskStream(TASKS, seed=0).at(p) for p in places
        ]
        assert rollouts.metrics["staleness/untrained_tokens"] == 0


def test_out_of_order_a_slow_group_comes_later_and_its_old_tokens_are_not_trained(stream):
    """Group 0 takes five steps. Its first token is then five pushes old, its second fresh."""
    release = threading.Event()
    clock = Clock()

    def play(request):
        if request.group == 0 and request.member == 1:
            early = clock.version
            release.wait(10)
            late = clock.play(request)
            trace = replace(late.traces[0], version=np.array([-1, early, clock.version], np.int32))
            return replace(late, traces=(trace,))
        return clock.play(request)

    one = stream(play, staleness=1, in_order=False, group_size=2, workers=16)
    found = steps(one, clock, 5)
    assert all(0 not in places for _, places in found)
    release.set()
    while not any(0 in places for _, places in found):
        time.sleep(0.01)
        found += steps(one, clock, 1, first=len(found) + 1)
    rollouts, places = found[-1]
    assert places[0] == 0  # the oldest that is ready goes first
    slow = rollouts.groups[0].trajectories[1].traces[0]
    assert slow.trainable.tolist() == [False, False, True]
    assert rollouts.metrics["staleness/untrained_tokens"] >= 1
    assert all(a.max() <= 1 for a in ages(found, clock))


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_token_is_trained_beyond_the_bound(stream, staleness, in_order):
    clock = Clock(lambda r: 0.001 * float(np.random.default_rng(r.sampling_seed).exponential(4)))
    one = stream(clock, staleness=staleness, in_order=in_order, groups=3, group_size=3, workers=12)
    found = steps(one, clock, 25, train_s=0.002)
    assert all(a.max(initial=0) <= staleness for a in ages(found, clock))
    assert max(r.metrics["staleness/max"] for r, _ in found) == max(a.max() for a in ages(found, clock))
    places = [p for _, chosen in found for p in chosen]
    assert len(set(places)) == len(places) == 75  # none twice
    if in_order:
        assert places == list(range(75))
        assert all(r.metrics["staleness/untrained_tokens"] == 0 for r, _ in found)
    if staleness == 0:
        assert sorted(places) == list(range(75))


def test_a_hung_episode_holds_a_step_no_longer_than_its_deadline(stream):
    release = threading.Event()
    clock = Clock()

    def play(request):
        if request.group == 1 and request.member == 0:
            release.wait(20)
        return clock.play(request)

    one = stream(play, timeout_s=0.15, retries=1)
    start = time.monotonic()
    rollouts = one.take(1, 0)
    assert time.monotonic() - start >= 0.3  # twice: it was tried again
    assert [len(g.trajectories) for g in rollouts.groups] == [2, 1]
    assert rollouts.metrics["episodes/failed"] == 2
    assert "hangs" in (rollouts.error or "")
    release.set()


def test_out_of_order_a_hung_episode_holds_nothing_up(stream):
    release = threading.Event()
    clock = Clock()

    def play(request):
        if request.group == 1:
            release.wait(20)
        return clock.play(request)

    one = stream(play, staleness=1, in_order=False)
    found = [p for _, places in steps(one, clock, 4) for p in places]
    release.set()  # not before the four steps were full
    assert len(set(found)) == 8
    assert 1 not in found


def test_what_was_not_trained_is_played_again_after_a_resume(stream):
    """Killed at any step, a run trains each place once: what a checkpoint says is open comes first."""
    clock = Clock(lambda r: 0.001 * float(np.random.default_rng(r.sampling_seed).exponential(5)))
    trained: list[int] = []
    state, left = TaskStream(TASKS, seed=0).state(), []
    for life in range(6):
        tasks = TaskStream(TASKS, seed=0)
        tasks.restore(state)
        one = stream(clock, tasks=tasks, staleness=2, in_order=False, again=left, groups=3)
        for _, places in steps(one, clock, 2, first=1 + 2 * life):
            trained += places
        saved = one.state()  # the checkpoint; what comes now is lost
        state, left = saved["tasks"], saved["open"]
        one.take(3 + 2 * life, clock.version)
        one.close()
        assert len(set(trained)) == len(trained) == 6 * (life + 1)
        assert set(trained) == set(range(state["cursor"])) - set(left)


def test_the_state_does_not_depend_on_what_was_begun(stream):
    clock = Clock()
    one = stream(clock, staleness=3)
    one.take(1, 0)
    time.sleep(0.05)
    assert len({r.group for r in clock.begun}) == 8
    tasks = TaskStream(TASKS, seed=0).state() | {"cursor": 2}
    assert one.state() == {"tasks": tasks, "open": [], "since": 1}


def outcomes(*equal):
    """Groups at these places have equal outcomes, all others differ."""

    def play(request):
        value = 1.0 if request.group in equal else float(request.member)
        return replace(Clock().play(request), outcome=value, reward=value)

    return play


def differ(group):
    return len({t.outcome for t in group.trajectories}) > 1


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("in_order", [True, False])
def test_useless_groups_are_replaced_until_the_step_is_full(stream, staleness, in_order):
    one = stream(
        outcomes(0, 3, 4), refill=4, teaches=differ, staleness=staleness, in_order=in_order, workers=1
    )
    rollouts = one.take(1, 0)
    assert one._taken == [0, 1, 2]
    assert rollouts.metrics["groups/played"] == 3
    assert rollouts.metrics["groups/useless"] == rollouts.metrics["groups/refilled"] == 1
    assert rollouts.metrics["episodes/wasted"] == 2 / 6
    one.take(2, 1)
    assert one._taken == [3, 4, 5, 6]
    assert sum(differ(g) for g in one.take(3, 2).groups) == 2


def test_refilling_is_bounded_and_what_is_played_does_not_depend_on_who_ends_first(stream):
    """Five of six are useless; two may be replaced: the step has four groups, of which one teaches."""
    asked = []
    for seed in range(4):
        clock, equal = Clock(), outcomes(0, 1, 2, 4, 5)

        def play(request, seed=seed, equal=equal):
            time.sleep(0.002 * float(np.random.default_rng([seed, request.group]).random()))
            return equal(request)

        one = stream(play, refill=2, teaches=differ)
        rollouts = one.take(1, 0)
        asked.append((one._taken, {k: v for k, v in rollouts.metrics.items() if not k.startswith("time/")}))
        assert len(rollouts.groups) == 4
        assert sum(differ(g) for g in rollouts.groups) == 1
        assert clock.begun == []
    assert all(a == asked[0] for a in asked)


def test_without_refill_useless_groups_take_their_place(stream):
    rollouts = stream(outcomes(0), teaches=differ).take(1, 0)
    assert rollouts.metrics["groups/useless"] == 1
    assert rollouts.metrics["groups/refilled"] == 0
    assert len(rollouts.groups) == 2


def test_little_is_wasted_at_5_percent_of_faults_in_groups_of_8(stream):
    """One that drops a group with each faulty episode would waste 1 - 0.95^8 = 34 %."""
    clock = Clock()

    def play(request):
        if np.random.default_rng([request.group, request.member, request.attempt]).random() < 0.05:
            raise EngineError("gone")
        return clock.play(request)

    one = stream(play, groups=5, group_size=8, refill=5, staleness=1)
    found = steps(one, clock, 20)
    failed = sum(r.metrics["episodes/failed"] for r, _ in found)
    played = sum(r.metrics["episodes/played"] for r, _ in found)
    assert 20 < failed < 80
    assert failed / played < 0.10
    assert all(r.metrics["episodes/missing"] == 0 for r, _ in found)
    assert all(len(g.trajectories) == 8 for r, _ in found for g in r.groups)
    assert np.mean([r.metrics["episodes/wasted"] for r, _ in found]) < 0.10


@pytest.mark.parametrize("staleness", [0, 1])
def test_errors_come_out_where_the_trainer_is(stream, staleness):
    clock = Clock()

    def broken(request):
        if request.group == 2:
            raise KeyError("oops")
        return clock.play(request)

    one = stream(broken, staleness=staleness)
    with pytest.raises(KeyError, match="oops"):
        steps(one, clock, 3)

    def full(request, trajectory):
        if request.group == 2:
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        steps(stream(Clock(), staleness=staleness, on_end=full), clock, 3)

    def dead(request):
        raise EngineError("engine is gone")

    with pytest.raises(TrainingError, match=r"none of 4 episodes was usable, each tried 3 times.*is gone"):
        stream(dead, staleness=staleness).take(1, 0)
    with pytest.raises(InputError, match="must not be negative"):
        stream(clock, staleness=-1)


def test_after_close_nothing_is_begun_and_nothing_is_told(stream):
    told, clock = [], Clock(lambda r: 0.05)
    one = stream(clock, staleness=3, on_end=lambda r, t: told.append(r))
    one.take(1, 0)
    one.close()
    before = len(told), len(clock.begun)
    time.sleep(0.15)
    assert (len(told), len(clock.begun)) == before

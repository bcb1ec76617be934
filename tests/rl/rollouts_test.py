"""Rollouts: order, seeds, failures and refill, stopping; and the stream of tasks."""

import os
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metagym.errors import EngineError, GraderError, InputError, TrainingError
from metagym.protocols import Executor
from metagym.rl.rollouts import TaskStream, ThreadExecutor, collect, seed_of
from metagym.types import StopReason, Task, Trajectory

TASKS = [Task(f"t{i}", "tiny", "train") for i in range(5)]


def good(request, outcome=None):
    outcome = float(request.sampling_seed % 2) if outcome is None else outcome
    return Trajectory(request.task, request.seed, (), (), outcome, outcome, StopReason.TERMINATED, {"x": 2.0})


def run(episode, workers=4, tasks=TASKS, size=3, **more):
    settings = {"seed": 1, "step": 2, "version": 7} | more
    return collect(episode, tasks, size, executor=ThreadExecutor(workers), **settings)


def test_order_and_seeds_do_not_depend_on_who_finishes_first():
    def slow_first(request):
        time.sleep(0.02 if request.group == 0 else 0.0)
        return replace(good(request), outcome=float(request.sampling_seed))

    one, other = run(slow_first), run(lambda r: replace(good(r), outcome=float(r.sampling_seed)), workers=1)
    assert one == other
    assert [g.trajectories[0].task for g in one.groups] == TASKS
    worlds = [{t.seed for t in g.trajectories} for g in one.groups]
    assert all(len(seeds) == 1 for seeds in worlds)
    assert len(set.union(*worlds)) == 5
    assert len({t.outcome for g in one.groups for t in g.trajectories}) == 15


def test_seeds_are_functions_of_their_numbers():
    assert seed_of(0, 1, 2) == seed_of(0, 1, 2) != seed_of(0, 2, 1)
    assert seed_of(0, 0, 0) == 1576890651  # a resumed run, and another machine, must draw the same


def test_failed_episodes_are_played_again_with_the_same_seeds():
    seen = []

    def flaky(request):
        seen.append(request)
        if request.member == 1 and request.attempt < 2:
            raise EngineError("gone")
        return good(request)

    ended = []
    rollouts = run(flaky, on_end=lambda r, t: ended.append((r.id, t.stop)))
    assert [len(g.trajectories) for g in rollouts.groups] == [3] * 5
    assert rollouts.metrics["episodes/failed"] == 10
    assert rollouts.metrics["episodes/played"] == 25
    assert rollouts.metrics["episodes/missing"] == 0
    assert rollouts.metrics["stop/infra"] == 10
    assert rollouts.metrics["episode/x"] == 2.0
    assert rollouts.error == "EngineError: gone"
    assert len(ended) == len(set(ended)) == 25
    assert ("000003-01.1", StopReason.INFRA) in ended
    assert ("000003-01.2", StopReason.TERMINATED) in ended
    for group in range(5):
        assert len({(r.seed, r.sampling_seed) for r in seen if (r.group, r.member) == (group, 1)}) == 1
    assert run(good).groups == rollouts.groups


def test_what_keeps_failing_is_left_out_of_the_statistics():
    def episode(request):
        if request.member == 0:
            raise GraderError("no verdict")
        if request.group == 4:
            return replace(good(request), stop=StopReason.INFRA, error="crash", reward=99.0)
        return good(request, outcome=1.0)

    rollouts = run(episode)
    assert [len(g.trajectories) for g in rollouts.groups] == [2] * 4
    assert rollouts.metrics["reward/mean"] == 1.0
    assert rollouts.metrics["episodes/missing"] == 7
    assert rollouts.metrics["stop/invalid_reward"] == 15


def test_a_reward_that_is_no_number_is_an_invalid_reward():
    rollouts = run(lambda r: good(r, outcome=np.nan if r.member == 0 else 1.0), retries=0)
    assert rollouts.metrics["stop/invalid_reward"] == 5
    assert rollouts.metrics["outcome/mean"] == 1.0


def test_a_step_without_a_usable_episode_stops_the_run():
    def dead(request):
        raise EngineError("engine is closed")

    with pytest.raises(TrainingError, match=r"none of 15 .* 3 times.*engine is closed"):
        run(dead)


def test_programming_errors_are_raised_and_end_the_rest():
    def broken(request):
        raise KeyError("oops")

    before = threading.active_count()
    with pytest.raises(KeyError, match="oops"):
        run(broken)
    with pytest.raises(InputError, match=r"was asked for task 't0'.*returned a trajectory of 't1'"):
        run(lambda r: replace(good(r), task=TASKS[1]))
    assert threading.active_count() == before


def test_threads_are_bounded_and_joined():
    running, most, lock = 0, 0, threading.Lock()

    def episode(request):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.005)
        with lock:
            running -= 1
        return good(request)

    before = threading.active_count()
    run(episode, workers=3)
    assert most == 3
    assert threading.active_count() == before
    assert isinstance(ThreadExecutor(1), Executor)
    with pytest.raises(InputError, match="at least one worker"):
        ThreadExecutor(0)


@pytest.fixture
def ctrl_c():
    """SIGINT raises KeyboardInterrupt, though a shell that starts tests in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_stops_promptly_though_an_episode_hangs():
    release, begun = threading.Event(), []

    def hang(request):
        begun.append(request)
        if len(begun) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        release.wait(20)
        return good(request)

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        collect(hang, TASKS, 3, seed=0, step=0, version=0, executor=ThreadExecutor(2, grace_s=0.1))
    assert time.monotonic() - start < 5
    release.set()
    time.sleep(0.05)
    assert len(begun) == 2  # nothing new was begun


@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 70), seed=st.integers(0, 5))
def test_an_epoch_is_a_permutation(size, seed):
    tasks = [Task(str(i), "x", "train") for i in range(size)]
    stream = TaskStream(tasks, seed=seed)
    for _ in range(2):
        assert sorted(stream.take(size)) == sorted(tasks)
    assert TaskStream(tasks, shuffle=False).take(size) == tasks


def test_the_stream_resumes_and_refuses_other_tasks():
    stream = TaskStream(TASKS, seed=3)
    stream.take(7)
    state, expected = stream.state(), stream.take(9)
    again = TaskStream(TASKS, seed=3)
    again.restore(state)
    assert again.take(9) == expected
    assert TaskStream(TASKS, seed=4).take(50) != TaskStream(TASKS, seed=3).take(50)
    for other in (TaskStream(TASKS[:4], seed=3), TaskStream(TASKS, seed=4), TaskStream(TASKS[::-1], seed=3)):
        with pytest.raises(InputError, match="another list of tasks"):
            other.restore(state)
    with pytest.raises(InputError, match="no tasks"):
        TaskStream([])


def test_a_huge_lazy_sequence_is_never_materialised():
    class Seeds:
        reads = 0

        def __len__(self):
            return 2**31

        def __getitem__(self, i):
            assert 0 <= i < 2**31
            Seeds.reads += 1
            return Task(f"room:{i}", "room", "train")

    stream = TaskStream(Seeds(), seed=0)
    assert len({t.id for t in stream.take(100)}) == 100
    assert Seeds.reads <= 10_100


def test_faults_are_refilled_one_by_one():
    """At 5 % of failing episodes in groups of 8 less than a tenth is wasted; dropping whole groups wastes a
    third."""
    tasks = [Task(str(i), "t", "train") for i in range(100)]

    def episode(request):
        if np.random.default_rng([request.sampling_seed, request.attempt]).random() < 0.05:
            raise EngineError("a fault")
        return good(request)

    found = collect(episode, tasks, 8, seed=3, step=1, version=0, executor=ThreadExecutor(4), retries=9)
    assert [len(g.trajectories) for g in found.groups] == [8] * 100
    played, failed = found.metrics["episodes/played"], found.metrics["episodes/failed"]
    assert failed > 20
    assert failed / played < 0.1


def test_the_time_of_grading_is_not_the_worlds():
    clocks = {"model_seconds": 1.0, "env_seconds": 3.0, "grading_seconds": 2.0}
    found = run(lambda r: replace(good(r), metrics=clocks)).metrics
    names = ("generation", "environment", "grading")
    assert [found[f"time/{name}_s"] for name in names] == [15.0, 15.0, 30.0]

"""From tasks to groups of episodes: which tasks, with which seeds, in threads, and what happens to failed
ones."""

import hashlib
import math
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from metagym.errors import GraderError, InfraError, InputError, TrainingError
from metagym.protocols import Executor
from metagym.types import Group, StopReason, Task, Trajectory

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Request:
    """One episode to play. Two requests that differ in `attempt` alone ask for the same episode again."""

    task: Task
    seed: int  # of the world: the same for all members of a group, and what `Trajectory.seed` must be
    sampling_seed: int  # of the policy's sampling: this member's own
    version: int  # of the weights
    step: int
    group: int
    member: int
    attempt: int = 0

    @property
    def id(self) -> str:
        """Names the episode within its run, e.g. "000012-003-07"; a retry has ".1" and so on behind it."""
        name = f"{self.step:06d}-{self.group:03d}-{self.member:02d}"
        return f"{name}.{self.attempt}" if self.attempt else name


Episode = Callable[[Request], Trajectory]


@dataclass(frozen=True)
class Rollouts:
    """The episodes of one step: groups in the order of their tasks, members in theirs, failed ones left
    out."""

    groups: tuple[Group, ...]
    metrics: Mapping[str, float]
    error: str | None  # of a failed episode, if there was one


def seed_of(*numbers: int) -> int:
    """A seed below 2**31 that is a function of the numbers and nothing else (numpy's SeedSequence)."""
    return int(np.random.SeedSequence((len(numbers), *numbers)).generate_state(1)[0] & 0x7FFFFFFF)


class ThreadExecutor:
    """An `Executor` of at most `workers` threads. Items are taken from their iterator as threads get free.

    Threads are daemons: an episode that hangs cannot keep the process from ending. When the caller stops
    early, by an error or Ctrl-C, no new item is begun, and the running ones are waited for `grace_s` seconds
    at most.
    """

    def __init__(self, workers: int, *, grace_s: float = 2.0):
        if workers < 1:
            raise InputError(f"an executor needs at least one worker; got {workers}")
        self.workers, self.grace_s = workers, grace_s

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Yields results as they end. What `function` raises is raised here."""
        source, lock, stop = iter(items), threading.Lock(), threading.Event()
        results: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

        def work() -> None:
            try:
                while not stop.is_set():
                    with lock:
                        try:
                            item = next(source)
                        except StopIteration:
                            break
                    results.put(("result", function(item)))
            except BaseException as error:  # raised again in the caller's thread
                results.put(("error", error))
            results.put(("end", None))

        threads = [threading.Thread(target=work, daemon=True) for _ in range(self.workers)]
        running = len(threads)
        try:
            for thread in threads:
                thread.start()
            while running:
                kind, value = results.get()
                if kind == "error":
                    raise value
                if kind == "result":
                    yield value
                else:
                    running -= 1
        finally:
            stop.set()
            deadline = time.monotonic() + self.grace_s
            for thread in threads:
                if thread.ident is not None:
                    thread.join(max(0.0, deadline - time.monotonic()))


def collect(
    episode: Episode,
    tasks: Sequence[Task],
    group_size: int,
    *,
    seed: int,
    step: int,
    version: int,
    executor: Executor,
    retries: int = 2,
    timeout_s: float | None = None,
    on_end: Callable[[Request, Trajectory], None] | None = None,
) -> Rollouts:
    """Plays `group_size` episodes of each task and returns them in a fixed order, however they finished.

    Seeds are functions of (seed, step, group, member). An episode that fails (infrastructure, invalid reward,
    a reward that is no number, an InfraError raised) is played again, with the same seeds, up to `retries`
    times; if it still fails, its group is smaller. So is one that takes longer than `timeout_s` seconds: the
    guard against a call that hangs where nothing has a deadline of its own. Its thread cannot be stopped: it
    is left behind, and what it returns one day is dropped. `on_end` is called in this thread with every
    episode, failed ones too.

    Raises TrainingError if no episode at all was usable, and whatever `episode` raises beyond InfraError.
    """
    requests = [
        Request(task, seed_of(seed, step, g), seed_of(seed, step, g, m), version, step, g, m)
        for g, task in enumerate(tasks)
        for m in range(group_size)
    ]

    def play(request: Request) -> list[tuple[Request, Trajectory]]:
        attempts = []
        for attempt in range(retries + 1):
            request = replace(request, attempt=attempt)
            attempts.append((request, _play_once(episode, request, timeout_s)))
            if attempts[-1][1].stop.in_loss:
                break
        return attempts

    last: dict[tuple[int, int], Trajectory] = {}
    failures: list[Trajectory] = []
    results = executor.map(play, requests)
    try:
        for attempts in results:
            for request, trajectory in attempts:
                if on_end is not None:
                    on_end(request, trajectory)
                if not trajectory.stop.in_loss:
                    failures.append(trajectory)
            request, trajectory = attempts[-1]
            last[request.group, request.member] = trajectory
    finally:  # an error or Ctrl-C here must stop the threads now, not when the generator is collected
        if isinstance(results, Generator):
            results.close()
    good = {at: t for at, t in sorted(last.items()) if t.stop.in_loss}
    error = failures[-1].error or str(failures[-1].stop) if failures else None
    if requests and not good:
        raise TrainingError(
            f"step {step}: none of {len(requests)} episodes was usable, each tried {retries + 1} times; "
            f"the last one: {error}"
        )
    groups = tuple(Group(tuple(t for (g, _), t in good.items() if g == index)) for index in range(len(tasks)))
    return Rollouts(
        tuple(g for g in groups if g.trajectories),
        _metrics(list(good.values()), failures, len(requests)),
        error,
    )


def _play_once(episode: Episode, request: Request, timeout_s: float | None) -> Trajectory:
    try:
        trajectory = episode(request) if timeout_s is None else _in_time(episode, request, timeout_s)
    except InfraError as error:
        stop = StopReason.INVALID_REWARD if isinstance(error, GraderError) else StopReason.INFRA
        text = f"{type(error).__name__}: {error}"
        return Trajectory(request.task, request.seed, (), (), 0.0, 0.0, stop, error=text)
    if (trajectory.task, trajectory.seed) != (request.task, request.seed):
        raise InputError(
            f"episode {request.id} was asked for task {request.task.id!r} with seed {request.seed} and "
            f"returned a trajectory of {trajectory.task.id!r} with seed {trajectory.seed}"
        )
    if trajectory.stop.in_loss and not (
        math.isfinite(trajectory.reward) and math.isfinite(trajectory.outcome)
    ):
        text = f"reward {trajectory.reward}, outcome {trajectory.outcome}"
        return replace(trajectory, stop=StopReason.INVALID_REWARD, error=text)
    return trajectory


def _in_time(episode: Episode, request: Request, timeout_s: float) -> Trajectory:
    """Plays in a thread of its own. Raises InfraError if it takes too long, and whatever `episode` raises."""
    done: Future[Trajectory] = Future()

    def play() -> None:
        try:
            done.set_result(episode(request))
        except BaseException as error:  # raised again by the one who waits
            done.set_exception(error)

    threading.Thread(target=play, name=f"episode-{request.id}", daemon=True).start()
    if not wait([done], timeout_s).done:
        raise InfraError(f"episode {request.id} hangs: it did not end within {timeout_s:g} s")
    return done.result()


def _metrics(good: Sequence[Trajectory], failures: Sequence[Trajectory], asked: int) -> dict[str, float]:
    outcomes = [t.outcome for t in good]
    metrics = {
        "episodes/played": float(len(good) + len(failures)),
        "episodes/failed": float(len(failures)),
        "episodes/missing": float(asked - len(good)),
        "reward/mean": float(np.mean([t.reward for t in good])),
        "outcome/mean": float(np.mean(outcomes)),
        "outcome/std": float(np.std(outcomes)),
        "episodes/turns": float(np.mean([len(t.turns) for t in good])),
        "tokens/sampled": float(sum(int(trace.trainable.sum()) for t in good for trace in t.traces)),
    }
    for stop in StopReason:
        metrics[f"stop/{stop}"] = float(sum(t.stop == stop for t in (*good, *failures)))
    names = sorted({name for t in good for name in t.metrics})
    return metrics | {
        # What a clock said, "seconds" and "model_seconds", is kept apart from what can be made again.
        f"{'time/episode_' if name.endswith('seconds') else 'episode/'}{name}": float(
            np.mean([t.metrics[name] for t in good if name in t.metrics])
        )
        for name in names
    }


class TaskStream:
    """An endless, resumable stream of tasks: shuffled epochs, a function of the seed and the position alone.

    Nothing is materialised: `tasks` may be a lazy sequence of any length. With `shuffle=False` tasks come in
    order.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int = 0, shuffle: bool = True):
        if not len(tasks):
            raise InputError("there are no tasks to train on")
        self.tasks, self.seed, self.shuffle, self.cursor = tasks, seed, shuffle, 0
        self._fingerprint = _fingerprint(tasks, seed, shuffle)

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks."""
        taken = [self._at(i) for i in range(self.cursor, self.cursor + count)]
        self.cursor += count
        return taken

    def state(self) -> dict[str, Any]:
        """What `restore` needs, for a checkpoint."""
        return {"cursor": self.cursor, "fingerprint": self._fingerprint}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken. Raises InputError if that was a stream of other tasks, or other
        order."""
        if state["fingerprint"] != self._fingerprint:
            raise InputError(
                f"the checkpoint was made with another list of tasks, seed or order of them (it had taken "
                f"{state['cursor']} tasks of {state['fingerprint']}, this run has {self._fingerprint}). "
                f"Resume with the same tasks, or start a new run in another workdir"
            )
        self.cursor = int(state["cursor"])

    def _at(self, position: int) -> Task:
        epoch, index = divmod(position, len(self.tasks))
        return self.tasks[_permuted(index, len(self.tasks), (self.seed, epoch)) if self.shuffle else index]


def _permuted(index: int, size: int, key: tuple[int, int]) -> int:
    """Where a keyed permutation of range(size) sends `index`: a Feistel network on the next power of 4,
    walked until it lands inside."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for round in range(4):
            digest = hashlib.blake2b(f"{key}{round}{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & low)
        index = (left << half) | right
        if index < size:
            return index


def _fingerprint(tasks: Sequence[Task], seed: int, shuffle: bool, sample: int = 10_000) -> str:
    """Names a task list, its seed and order. Of more than `sample` tasks, as many evenly spaced ones are
    read."""
    digest = hashlib.sha256(f"{len(tasks)} {seed} {shuffle}".encode())
    for i in range(min(sample, len(tasks))):
        task = tasks[i if len(tasks) <= sample else i * (len(tasks) - 1) // (sample - 1)]
        digest.update(f"{task.id}\0{task.type}\0{task.split}\0".encode())
    return f"{len(tasks)} tasks, {digest.hexdigest()[:16]}"

"""From tasks to groups of episodes: which tasks, with which seeds, in threads, when, and what happens to
failed ones.

`collect` plays a list of tasks and waits. `RolloutStream` plays on in the background while a trainer makes
its steps, and hands out the groups of one step at a time; with a staleness of 0 it plays only while the
trainer waits.
"""

import functools
import hashlib
import math
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from metagym.errors import GraderError, InfraError, InputError, TrainingError
from metagym.protocols import Executor
from metagym.types import Group, StopReason, Task, TokenTrace, Trajectory

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Request:
    """One episode to play. Two requests that differ in `attempt` alone ask for the same episode again."""

    task: Task
    seed: int  # of the world: the same for all members of a group, and what `Trajectory.seed` must be
    sampling_seed: int  # of the policy's sampling: this member's own
    version: int  # of the weights, when it was asked for
    step: int  # that was being made when it was asked for
    group: int  # place in the order of the run's tasks
    member: int
    attempt: int = 0

    @property
    def id(self) -> str:
        """Names the episode within its run, e.g. "000012-07"; a retry has ".1" and so on behind it."""
        name = f"{self.group:06d}-{self.member:02d}"
        return f"{name}.{self.attempt}" if self.attempt else name


Episode = Callable[[Request], Trajectory]
Attempts = list[tuple[Request, Trajectory]]  # of one episode: those that failed, then the one that counts
OnEnd = Callable[[Request, Trajectory], None]
TRAINING = 1  # stands in training's seeds where `collect` has a step; evaluations are at step 0
# Seconds of an episode, as it measured them, by what they were spent on.
CLOCKS = {"generation": "model_seconds", "environment": "env_seconds", "grading": "grading_seconds"}


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
    on_end: OnEnd | None = None,
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
    groups = [_Played(step) for _ in tasks]
    results = executor.map(functools.partial(_play, episode, retries, timeout_s), requests)
    try:
        for attempts in results:
            for request, trajectory in attempts:
                if on_end is not None:
                    on_end(request, trajectory)
            groups[attempts[-1][0].group].add(attempts)
    finally:  # an error or Ctrl-C here must stop the threads now, not when the generator is collected
        if isinstance(results, Generator):
            results.close()
    return _rollouts(groups, group_size, f"step {step}", retries)


@dataclass
class _Played:
    """What is there of a group that is being played."""

    step: int  # that was being made when it was begun
    members: dict[int, Trajectory] = field(default_factory=dict)  # the last attempt of each that ended
    failures: list[Trajectory] = field(default_factory=list)
    useless: bool = False  # all of it ended, and it teaches nothing

    def add(self, attempts: Attempts) -> None:
        self.failures += [t for _, t in attempts if not t.stop.in_loss]
        request, trajectory = attempts[-1]
        self.members[request.member] = trajectory

    @property
    def group(self) -> Group:
        """The usable members, in order."""
        return Group(tuple(t for _, t in sorted(self.members.items()) if t.stop.in_loss))


def _rollouts(played: Sequence[_Played], size: int, where: str, retries: int) -> Rollouts:
    """Raises TrainingError if there is no usable episode in them."""
    groups = tuple(g for g in (p.group for p in played) if g.trajectories)
    failures = [t for p in played for t in p.failures]
    error = failures[-1].error or str(failures[-1].stop) if failures else None
    asked = size * len(played)
    if asked and not groups:
        raise TrainingError(
            f"{where}: none of {asked} episodes was usable, each tried {retries + 1} times; "
            f"the last one: {error}"
        )
    good = [t for g in groups for t in g.trajectories]
    return Rollouts(groups, _metrics(good, failures, asked), error)


def _play(episode: Episode, retries: int, timeout_s: float | None, request: Request) -> Attempts:
    """Plays an episode until it is usable, `retries` times more at most."""
    attempts: Attempts = []
    for attempt in range(retries + 1):
        request = replace(request, attempt=attempt)
        attempts.append((request, _play_once(episode, request, timeout_s)))
        if attempts[-1][1].stop.in_loss:
            break
    return attempts


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
    }
    metrics["episodes/failed_share"] = metrics["episodes/failed"] / max(1.0, metrics["episodes/played"])
    kinds: dict[str, int] = {}
    for trace in (trace for t in good for trace in t.traces):
        kinds[trace.kind] = kinds.get(trace.kind, 0) + int(trace.trainable.sum())
    sampled = sum(kinds.values())
    metrics["tokens/sampled"] = float(sampled)
    metrics["tokens/trained_share"] = sampled / max(1, sum(len(x.tokens) for t in good for x in t.traces))
    metrics |= {f"tokens/share_{kind}": n / max(1, sampled) for kind, n in sorted(kinds.items())}
    for stop in StopReason:
        metrics[f"stop/{stop}"] = float(sum(t.stop == stop for t in (*good, *failures)))
    for name, clock in CLOCKS.items():
        metrics[f"time/{name}_s"] = float(sum(t.metrics.get(clock, 0.0) for t in (*good, *failures)))
    metrics["time/environment_s"] -= metrics["time/grading_s"]  # the world graded in its last step
    names = sorted({name for t in good for name in t.metrics})
    return metrics | {
        # What a clock said, "seconds" and "model_seconds", is kept apart from what can be made again.
        f"{'time/episode_' if name.endswith('seconds') else 'episode/'}{name}": float(
            np.mean([t.metrics[name] for t in good if name in t.metrics])
        )
        for name in names
    }


class RolloutStream:
    """Plays the groups of an endless list of tasks in the background and hands them out, a step's at a time.

    Groups are begun in the order of their tasks, and seeds are functions of (seed, place in that order,
    member), whenever they are played. At most `staleness + 1` steps' worth of groups are open (begun and not
    yet trained): the trainer that falls behind holds up the players. So with a staleness of 0 the next step's
    groups are begun when it is asked for.

    The bound: no token is trained that was sampled by weights more than `staleness` pushes older than those
    that the step starts from.

    - in order: each step has the next groups in the order of the tasks, and waits for them. What is in a step
      does not depend on any clock, and the bound holds by itself.
    - not in order: each step has the first groups that are complete. One that is slow comes into a later
      step; of its tokens those that are beyond the bound are not trained, and are counted. Faster, where few
      episodes are much longer than most.

    Refill: a group for which `teaches` is false is replaced by another, up to `refill` of them a step; it
    comes with the step all the same, to be counted. A step that is still not full then is smaller. Without
    refill such groups take the places of others.

    An episode that fails or hangs is played again or left out, as in `collect`; so nothing holds a step
    longer than (retries + 1) x timeout_s. `on_end` is called in a thread of this stream, with one episode
    at a time.
    """

    def __init__(
        self,
        episode: Episode,
        tasks: "TaskStream",
        *,
        groups: int,
        group_size: int,
        steps: int,
        seed: int,
        executor: Executor,
        staleness: int = 0,
        in_order: bool = True,
        refill: int = 0,
        teaches: Callable[[Group], bool] | None = None,
        retries: int = 2,
        timeout_s: float | None = None,
        on_end: OnEnd | None = None,
        again: Iterable[int] = (),
        grace_s: float = 2.0,
    ):
        """
        Args:
          groups: of a step. group_size: episodes of each. steps: the last step; nothing is begun for later
            ones.
          again: places in the order of tasks, before the position of `tasks`, that are to be played first:
            what was `open` when the run was saved.
          grace_s: how long `close` waits for running episodes.
        """
        if staleness < 0 or refill < 0:
            raise InputError(f"staleness {staleness} and refill {refill} must not be negative")
        self.staleness, self.in_order = staleness, in_order
        self._play = functools.partial(_play, episode, retries, timeout_s)
        self._tasks, self._size, self._seed, self._executor = tasks, group_size, seed, executor
        self._groups, self._steps, self._refill, self._retries = groups, steps, refill, retries
        self._teaches, self._on_end, self._grace_s = teaches, on_end, grace_s
        self._again = sorted(again)
        self._open: dict[int, _Played] = {}
        self._taken: list[int] = []  # of the open ones: handed out, being trained
        self._top = tasks.cursor  # above all that was ever trained
        self._step = 0
        self._versions: list[int] = []  # pushed, rising; the last one serves now
        self._allowed = 0  # steps whose groups may be open
        self._stopped = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def take(self, step: int, version: int) -> Rollouts:
        """The groups of a step, when they are there; what was taken before is trained by now. `version` names
        the weights that serve, and that the step starts from.

        Raises TrainingError if no episode in them is usable, and what an episode or `on_end` raised, as soon
        as it did.
        """
        with self._changed:
            for place in self._taken:
                del self._open[place]
            self._top, self._taken = max([self._top, *(p + 1 for p in self._taken)]), []
            self._step, self._allowed = step, min(self.staleness + 1, self._steps - step + 1)
            if not self._versions or self._versions[-1] != version:
                self._versions.append(version)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="metagym-rollouts", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            while True:
                if self._error is not None:
                    raise self._error
                if (chosen := self._choose()) is not None:
                    break
                self._changed.wait()
            self._taken = chosen
            played = [self._open[place] for place in chosen]
            waiting = len(self._open) - len(chosen)
        return self._fresh(played, waiting)

    def state(self) -> dict[str, Any]:
        """What a checkpoint of the step that was taken last needs: `tasks`, their state, at a position behind
        the last group that was trained; `open`, the places before it of groups that were not; and `since`,
        the step in which the first of the groups that are not trained yet was begun.

        What was taken counts as trained. Open groups are to be played again, and so is what was begun behind
        the position.
        """
        with self._changed:
            top = max([self._top, *(p + 1 for p in self._taken)])
            left = {p: g.step for p, g in self._open.items() if p not in self._taken}
            places = sorted(p for p in {*left, *self._again} if p < top)
            since = min([self._step, *left.values()])
            return {"tasks": self._tasks.state() | {"cursor": top}, "open": places, "since": since}

    def close(self) -> None:
        """Begins no further episode and waits for the running ones, `grace_s` seconds at most; what they
        return is dropped. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(self._grace_s)

    def _choose(self) -> list[int] | None:
        """The groups of a step, if they are there. The lock is held."""
        chosen: list[int] = []
        useful = 0
        for place in sorted(self._open):
            played = self._open[place]
            if len(played.members) < self._size:
                if self.in_order:
                    return None
                continue
            chosen.append(place)
            useful += not played.useless
            if useful == self._groups or len(chosen) == self._groups + self._refill:
                return chosen
        return None

    def _may_begin(self) -> bool:
        useful = sum(not p.useless for p in self._open.values())
        most = self._allowed * self._groups
        return useful < most and len(self._open) < most + self._allowed * self._refill

    def _requests(self) -> Iterator[Request]:
        """All that is to be played, in order; waits where no more may be begun."""
        while True:
            with self._changed:
                while not self._stopped and not self._may_begin():
                    self._changed.wait()
                if self._stopped:
                    return
                place = self._again.pop(0) if self._again else self._tasks.cursor
                task = self._tasks.take(1)[0] if place == self._tasks.cursor else self._tasks.at(place)
                self._open[place] = _Played(self._step)
            for member in range(self._size):
                if self._stopped:
                    return
                numbers = self._seed, TRAINING, place
                seeds = seed_of(*numbers), seed_of(*numbers, member)
                yield Request(task, *seeds, self._versions[-1], self._open[place].step, place, member)

    def _work(self) -> None:
        try:
            for attempts in self._executor.map(self._play, self._requests()):
                with self._changed:
                    if self._stopped:
                        continue
                try:
                    self._end(attempts)
                except BaseException as error:  # before the executor waits for those who wait for work
                    self._fail(error)
                    raise
        except BaseException as error:  # raised again in the trainer's thread
            self._fail(error)

    def _end(self, attempts: Attempts) -> None:
        if self._on_end is not None:
            for request, trajectory in attempts:
                self._on_end(request, trajectory)
        with self._changed:
            played = self._open[attempts[-1][0].group]
            played.add(attempts)
            if len(played.members) == self._size:
                group = played.group
                played.useless = not group.trajectories or (
                    self._teaches is not None and not self._teaches(group)
                )
                self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._stopped = True
            self._changed.notify_all()

    def _fresh(self, played: Sequence[_Played], waiting: int) -> Rollouts:
        """The episodes with tokens beyond the bound out of training, and how old they are."""
        rollouts = _rollouts(played, self._size, f"step {self._step}", self._retries)
        versions = np.array(self._versions)
        oldest = versions[-1 - self.staleness] if len(versions) > self.staleness else versions[0]
        ages: list[np.ndarray] = []
        stale = 0

        def trace(t: TokenTrace) -> TokenTrace:
            nonlocal stale
            own = t.version[t.trainable]
            # Pushes since the one that brought a token's weights. In a resumed run there may be none earlier.
            age = len(versions) - np.maximum(np.searchsorted(versions, own, side="right"), 1)
            ages.append(age[own >= oldest])
            if np.all(own >= oldest):
                return t
            stale += int(np.sum(own < oldest))
            return replace(t, trainable=t.trainable & (t.version >= oldest))

        def trajectory(t: Trajectory) -> Trajectory:
            return replace(t, traces=tuple(trace(x) for x in t.traces))

        groups = tuple(Group(tuple(trajectory(t) for t in g.trajectories)) for g in rollouts.groups)
        age = np.concatenate([np.zeros(0), *ages])
        useless = sum(p.useless for p in played)
        wasted = len([t for p in played for t in p.failures])
        wasted += sum(len(p.group.trajectories) for p in played if p.useless) if self._refill else 0
        return replace(
            rollouts,
            groups=groups,
            metrics={
                **rollouts.metrics,
                "groups/played": float(len(played)),
                "groups/useless": float(useless),
                "groups/refilled": float(max(0, len(played) - self._groups)),
                "episodes/wasted": wasted / max(1.0, rollouts.metrics["episodes/played"]),
                "staleness/mean": float(age.mean()) if age.size else 0.0,
                "staleness/max": float(age.max()) if age.size else 0.0,
                "staleness/untrained_tokens": float(stale),
                "time/open_groups": float(waiting),
            },
        )


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
        taken = [self.at(i) for i in range(self.cursor, self.cursor + count)]
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

    def at(self, position: int) -> Task:
        """The task at a position, counted from 0 over all epochs."""
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

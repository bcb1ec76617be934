"""The training loop: take episodes, filter, pack, update, push weights, write down, save.

Episodes are played in the background. With a staleness of 0 that is while the loop waits for them; with more,
they go on while it trains, and new weights reach them on the way.

A run directory holds metrics.jsonl, episodes/, checkpoints/. Killed at any moment, a run resumes from its
newest complete checkpoint: what was written after it is cut back, and the steps are made again. Episodes that
were not trained by then are played again, so none is lost and none is trained twice. With a staleness of 0,
what a step does is a function of the checkpoint (state, position in the tasks) and the run's seed, so with a
deterministic engine and world the resumed run is the unbroken one, bit for bit.
"""

import contextlib
import dataclasses
import fcntl
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from metagym.errors import InputError, TrainingError
from metagym.protocols import Backend, Executor, Tracker
from metagym.rl import checkpoint
from metagym.rl.advantages import of_group
from metagym.rl.batching import Packed, pack
from metagym.rl.health import WINDOW, Rule, Watch, training_flops
from metagym.rl.metrics import EpisodeWriter, MetricsWriter, cut_back, is_evaluation, read_jsonl
from metagym.rl.rollouts import Episode, Request, Rollouts, RolloutStream, TaskStream, ThreadExecutor
from metagym.rl.shaping import teaches, with_kl
from metagym.rl.train_step import Policy, init_state, make_train_step, state_shardings
from metagym.rl.types import Algorithm, Batch, TrainState
from metagym.types import Group, Trajectory

log = logging.getLogger("metagym.train")
MAX_SKIPPED = 3  # steps in a row whose update was not finite
DISTANT = "The engine serves other weights, or computes otherwise than the trainer."


class Interrupted(KeyboardInterrupt):
    """Training was stopped by a signal, and saved. A program exits with 128 + `signum`."""

    def __init__(self, signum: int, step: int):
        super().__init__(f"stopped by {signal.Signals(signum).name} after step {step}, which is saved")
        self.signum, self.step = signum, step


class GivenUp(KeyboardInterrupt):
    """An update was given up, for a signal, before it had changed anything."""


class StopSignals:
    """While entered, SIGINT and SIGTERM are asked for instead of suffered: inside `interruptible()` they
    raise KeyboardInterrupt at once, elsewhere as soon as it is entered next. A second one is not held back.

    Outside the main thread, where Python allows no handlers, it does nothing.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._open = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def check(self) -> None:
        """Raises GivenUp if a signal came: for places where work can be given up without harm."""
        if self.signum is not None:
            raise GivenUp

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        again, self.signum = self.signum is not None, signum
        if again:
            self._restore()
        if again or self._open:
            self._open = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Where a signal may raise KeyboardInterrupt."""
        self._open = True
        try:
            if self.signum is not None:
                raise KeyboardInterrupt
            yield
        finally:
            self._open = False


@dataclasses.dataclass
class _Progress:
    """The host's side of a checkpoint."""

    step: int = 0  # training steps finished
    skipped: int = 0  # of them the last so many had no finite update
    tasks: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # behind the last one trained
    open: Sequence[int] = ()  # places of groups before it that were not trained
    since: int = 0  # in no earlier step was a group begun that is not trained


def train(
    *,
    policy: Policy,
    state: TrainState,
    algorithm: Algorithm,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    backend: Backend,
    episode: Episode,
    tasks: TaskStream | Callable[[], TaskStream],
    steps: int,
    groups_per_step: int,
    group_size: int,
    rows: int,
    length: int,
    workdir: Path,
    seed: int = 0,
    minibatches: int = 1,
    align: int = 1,
    merge_equal: bool = True,
    share_prompts: bool = False,
    reference: Any = None,
    tracker: Tracker | None = None,
    checkpoint_every: int = 0,
    keep: int = 2,
    max_workers: int = 8,
    executor: Executor | None = None,
    retries: int = 2,
    timeout_s: float | None = None,
    staleness: int = 0,
    in_order: bool = True,
    refill: int = 0,
    evaluate: Callable[[int], Mapping[str, float]] | None = None,
    evaluate_every: int = 0,
    max_distance: float = math.inf,
    rules: Sequence[Rule] = (),
    peak_flops: float = 0.0,
    record_traces: bool = False,
    first: int = 0,
    last: int | None = None,
    resume: bool = False,
) -> TrainState:
    """Trains for `steps` steps in all, of `groups_per_step` tasks times `group_size` episodes; returns the
    last state.

    state: as `init_state` made it; consumed (donated, or given up for a checkpoint's).
    tasks: or what makes the stream, once the run directory is cut back to where training goes on.
    rows, length: shape of a micro-batch. minibatches: updates a step. align: of segment starts in a row.
    reference: parameters that a KL term is measured against, in arrays of their own.
    executor: runs the episodes; `max_workers` threads if None. retries: of a failed episode. timeout_s:
        longest that one may take before it counts as failed, if given.
    staleness, in_order: how far episodes may be ahead of the updates, and whether steps take them in the
        order of their tasks or as they end; see `RolloutStream`.
    refill: groups of a step that may be replaced because their outcomes are equal, if the algorithm drops
        such groups.
    checkpoint_every: steps between checkpoints (0: at the end alone), of which the newest `keep` stay.
    evaluate: given the step, returns metrics, which are written down as "eval/<name>"; called before the
    first step,
        every `evaluate_every` steps, and after the last. 0: never.
    max_distance: the run stops when a trainer's log-prob is further than this many nats from the sampler's,
        for the same weights. rules: further ones.
    peak_flops: operations per second that the devices reach, for the share of them that training uses.
    first, last: a phase of the run, the steps after `first` up to `last`, the default all. It begins at the
        checkpoint of step `first` with a fresh optimizer, behind the tasks that were taken by then, and ends
        with a checkpoint; what belongs to the end of the run is left to the phase that ends at `steps`.
    resume: goes on from the newest complete checkpoint in `workdir`, or starts there if there is none.

    A step whose groups teach nothing (equal outcomes) makes no update and counts as a step.

    SIGINT and SIGTERM end it with a checkpoint of the last finished step: an unfinished rollout is given up,
    and so is an update that has changed no weights yet. Raises Interrupted then; InputError for arguments
    that do not fit, or a workdir that holds a run already; TrainingError if training cannot go on: no usable
    episode, three steps in a row without a finite update, a rule that is broken; CheckpointError if a
    checkpoint cannot be written or none is complete.
    """
    _check(
        steps=steps,
        groups_per_step=groups_per_step,
        group_size=group_size,
        rows=rows,
        length=length,
        keep=keep,
    )
    if algorithm.kl is not None and reference is None:
        raise InputError(f"algorithm {algorithm.name} has a KL term and needs reference parameters")
    last = steps if last is None else min(last, steps)
    checkpoints = workdir / "checkpoints"
    executor = ThreadExecutor(max_workers) if executor is None else executor
    with contextlib.ExitStack() as stack:
        stack.enter_context(_locked(workdir))
        stop = stack.enter_context(StopSignals())
        checkpoint.prepare(checkpoints)
        state, progress, tasks = _begin(workdir, state, tasks, resume, first)
        if first and progress.step == first:
            fresh = init_state(state.params, optimizer, jax.random.key(0), mesh)
            state = dataclasses.replace(state, opt_state=fresh.opt_state)
        saved = progress.step or -1
        intact = True  # the state is that of `progress`
        writer = stack.enter_context(contextlib.closing(MetricsWriter(workdir / "metrics.jsonl")))
        episodes = EpisodeWriter(workdir / "episodes", traces=record_traces)
        stack.enter_context(contextlib.closing(episodes))
        train_step = make_train_step(policy, algorithm, optimizer, mesh, state_shardings(state))
        version = int(jax.device_get(state.version))
        backend.load(state.params, version)
        bound = Rule("sampler/max", high=max_distance, hint=DISTANT)
        watch = Watch((bound, *rules), _recent(workdir) if progress.step else ())
        flops = training_flops(state.params, 1)
        if tracker is not None and progress.step > first:
            _replay(workdir, progress.step, tracker)

        def write(step: int, metrics: Mapping[str, float]) -> None:
            writer.log(step, metrics)
            if tracker is not None:
                tracker.log(step, metrics)

        def score(batch: Batch) -> np.ndarray:
            return train_step.score(reference, batch)

        def on_end(request: Request, trajectory: Trajectory) -> None:
            place = {"step": request.step, "group": request.group, "member": request.member}
            episodes.write(f"{request.step:06d}", request.id, trajectory, **place, version=request.version)

        stream = RolloutStream(
            episode,
            tasks,
            groups=groups_per_step,
            group_size=group_size,
            steps=last,
            seed=seed,
            executor=executor,
            staleness=staleness,
            in_order=in_order,
            refill=refill if algorithm.drop_equal else 0,
            teaches=teaches,
            retries=retries,
            timeout_s=timeout_s,
            on_end=on_end,
            again=progress.open,
        )
        stack.callback(stream.close)

        def save() -> None:
            nonlocal saved
            if saved != progress.step:
                checkpoint.save(checkpoints, progress.step, state, dataclasses.asdict(progress), keep=keep)
                saved = progress.step

        ended = time.monotonic()
        try:
            while True:
                with stop.interruptible():
                    if last <= progress.step < steps:
                        break
                    due = evaluate_every and (progress.step % evaluate_every == 0 or progress.step == steps)
                    if evaluate is not None and due:
                        found = evaluate(progress.step)
                        write(progress.step, {f"eval/{name}": value for name, value in found.items()})
                    if progress.step >= steps:
                        break
                    step = progress.step + 1
                    began = time.monotonic()
                    rollouts = stream.take(step, version)
                collected = time.monotonic()
                packed, metrics = _pack(
                    rollouts, algorithm, score, rows, length, minibatches, align, merge_equal, share_prompts
                )
                intact = False
                try:
                    state, updates = train_step(
                        state, packed.minibatches, reference=reference, check=stop.check
                    )
                except GivenUp:
                    intact = True
                    raise
                updated = time.monotonic()
                if updates["update/applied"]:
                    version = int(jax.device_get(state.version))
                    backend.load(state.params, version)
                loaded = time.monotonic()
                skipped = (
                    progress.skipped + 1 if updates["update/skipped"] and not updates["update/applied"] else 0
                )
                progress = _Progress(step, skipped, **stream.state())
                whole = max(loaded - ended, 1e-9)
                ended = loaded
                metrics |= dict(rollouts.metrics) | updates
                metrics |= {
                    "version": float(version),
                    "health/skipped_in_a_row": float(skipped),
                    "time/step_s": whole,
                    "time/collect_s": collected - began,
                    "time/update_s": updated - collected,
                    "time/load_s": loaded - updated,
                    "time/sampled_tokens_per_s": rollouts.metrics["tokens/sampled"] / whole,
                    "time/computed_tokens_per_s": metrics["tokens/computed"] / max(updated - collected, 1e-9),
                }
                if peak_flops:
                    rate = flops * metrics["time/computed_tokens_per_s"]
                    metrics["time/share_of_peak"] = rate / peak_flops
                write(step, metrics)
                _stop_if_skipped(step, metrics, skipped)
                if not skipped:
                    watch.check(step, metrics)
                intact = True
                if step == last or (checkpoint_every and step % checkpoint_every == 0):
                    save()
        except KeyboardInterrupt:
            if (
                stop.signum is None or not intact
            ):  # nobody's signal, or a second one in the middle of an update
                raise
            save()
            raise Interrupted(stop.signum, progress.step) from None
        except Exception:
            if intact and progress.step:  # the rollout failed, not the update: keep what was learned
                save()
            raise
    return state


def _check(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise InputError(f"{name} must be at least 1; got {value}")


@contextlib.contextmanager
def _locked(workdir: Path) -> Iterator[None]:
    """Keeps a second process out of the run directory. The lock goes with the process that holds it."""
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"another process is training in {workdir}; wait for it, or use another workdir"
            ) from None
        yield


def _begin(
    workdir: Path,
    state: TrainState,
    tasks: TaskStream | Callable[[], TaskStream],
    resume: bool,
    first: int,
) -> tuple[TrainState, _Progress, TaskStream]:
    """The state, progress and tasks to start from, with the run directory cut back to it."""

    def stream() -> TaskStream:
        return tasks if isinstance(tasks, TaskStream) else tasks()

    found = None
    if not resume:
        if read_jsonl(workdir / "metrics.jsonl") or checkpoint.steps(workdir / "checkpoints"):
            raise InputError(f"{workdir} holds a run already: resume it, or use another workdir")
    elif checkpoint.steps(workdir / "checkpoints"):
        like = checkpoint.abstract(state)
        for x in jax.tree.leaves(state):
            x.delete()  # or two states would be in memory at once
        found = checkpoint.load(workdir / "checkpoints", like)
    else:
        log.info("no checkpoint in %s: starting from the beginning", workdir)
    at = found[0] if found else 0
    if at < first:
        raise InputError(f"the phase after step {first} cannot begin at step {at}")
    if found is None:
        cut_back(workdir, 0)
        begun = stream()
        return state, _Progress(tasks=begun.state()), begun
    _, restored, host = found
    progress = _Progress(**host)
    cursor, left = int(progress.tasks["cursor"]), set(progress.open)
    new = bool(first) and progress.step == first
    if isinstance(tasks, TaskStream) and not new:
        tasks.restore(progress.tasks)  # other tasks are refused before anything is cut back
    cut_back(workdir, progress.step, lambda g: g < cursor and g not in left, progress.since)
    begun = stream()
    if new:  # these may be other tasks: the position alone goes on
        begun.cursor = cursor
        progress = dataclasses.replace(progress, tasks=begun.state(), open=())
    else:
        begun.restore(progress.tasks)
        log.info("resuming after step %d", progress.step)
    return restored, progress, begun


def _recent(workdir: Path) -> list[dict[str, Any]]:
    """The records of the last training steps."""
    return [r for r in read_jsonl(workdir / "metrics.jsonl") if not is_evaluation(r)][-WINDOW:]


def _replay(workdir: Path, step: int, tracker: Tracker) -> None:
    """Gives the tracker of a resumed run the record of its last finished step, to go on from there."""
    for record in _recent(workdir)[-1:]:
        tracker.log(step, {k: v for k, v in record.items() if k not in ("step", "nonfinite")})


@np.errstate(all="ignore")  # an advantage may be infinite; the update is skipped then
def _pack(
    rollouts: Rollouts,
    algorithm: Algorithm,
    score: Callable[[Batch], np.ndarray],
    rows: int,
    length: int,
    minibatches: int,
    align: int,
    merge_equal: bool,
    share_prompts: bool,
) -> tuple[Packed, dict[str, float]]:
    """Filters, gives advantages, packs. Groups are dropped by their raw outcomes, never by shaped rewards.
    `score` gives the reference's log-probs."""
    groups: Sequence[Group] = rollouts.groups
    metrics: dict[str, float] = {}
    if algorithm.kl is not None and algorithm.kl_in == "reward":
        groups, metrics = with_kl(groups, score, algorithm, rows=rows, length=length, align=align)
    equal = [not teaches(g) for g in groups]
    kept = [g for g, e in zip(groups, equal, strict=True) if not (e and algorithm.drop_equal)]
    advantages = [of_group(algorithm, g) for g in kept]
    flat = np.concatenate([np.zeros(0), *(np.ravel(a) for group in advantages for a in group)])
    flat = flat if flat.size else np.zeros(1)
    packed = pack(
        kept,
        advantages,
        algorithm,
        rows=rows,
        length=length,
        minibatches=minibatches,
        align=align,
        merge_equal=merge_equal,
        share_prompts=share_prompts,
    )
    return packed, dict(packed.metrics) | metrics | {
        "groups/equal": float(sum(equal)),
        "groups/kept": float(len(kept) if any(packed.minibatches) else 0),
        "advantages/mean_abs": float(np.abs(flat).mean()),
        "advantages/std": float(flat.std()),
        "advantages/min": float(flat.min()),
        "advantages/max": float(flat.max()),
        "advantages/positive": float((flat > 0).mean()),
    }


def _stop_if_skipped(step: int, metrics: Mapping[str, float], skipped: int) -> None:
    if skipped >= MAX_SKIPPED:
        raise TrainingError(
            f"step {step}: no finite update in {skipped} steps in a row (loss {metrics['loss']}, gradient "
            f"norm {metrics['update/grad_norm']}). Nothing was applied; the newest checkpoint is good. Lower "
            f"the learning rate, or look at the rewards and log-probs of these steps in episodes/"
        )

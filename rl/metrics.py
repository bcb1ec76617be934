"""What is written down: metrics.jsonl (the record of truth), episodes, TensorBoard; and the numbers
themselves."""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from metagym.errors import InputError
from metagym.rl.types import Array, Batch
from metagym.types import TokenTrace, Trajectory


def wilson(successes: float, n: float, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % interval (Wilson's) of a share of `successes` in `n` trials; (0, 1) for no trials."""
    if n == 0:
        return 0.0, 1.0
    share, zz = successes / n, z * z
    middle = (share + zz / (2 * n)) / (1 + zz / n)
    half = z * math.sqrt(share * (1 - share) / n + zz / (4 * n * n)) / (1 + zz / n)
    return max(0.0, middle - half), min(1.0, middle + half)


@np.errstate(all="ignore")
def distance(trainer: np.ndarray, sampler: np.ndarray) -> dict[str, float]:
    """How far the trainer's log-probs [N] are from the sampler's of the same tokens and weights.

    max, p99 and mean of |difference| in nats, Pearson correlation, and the effective sample size of the
    weights exp(trainer - sampler) as a share of N. Correlation alone is a weak measure.
    """
    trainer, sampler = np.asarray(trainer, np.float64), np.asarray(sampler, np.float64)
    difference = trainer - sampler
    weights = np.exp(np.clip(difference, -20, 20))
    spread = float(trainer.std() * sampler.std())
    covariance = float(np.mean((trainer - trainer.mean()) * (sampler - sampler.mean())))
    return {
        "max": float(np.abs(difference).max()),
        "p99": float(np.quantile(np.abs(difference), 0.99)),
        "mean": float(np.abs(difference).mean()),
        "pearson": covariance / spread if spread > 0 else float(np.array_equal(trainer, sampler)),
        "ess": float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum())),
    }


@np.errstate(all="ignore")
def token_metrics(
    seen: Iterable[tuple[Batch, Array, Array, Array]], version: int | None = None
) -> dict[str, float]:
    """Metrics over the trained tokens of micro-batches; each is (batch, logprobs, entropy, clipped [B, L]).

    A token that stands for n equal ones counts n times. Empty if nothing was trained. `version` names the
    weights that the old log-probs are of: `sampler/` is about the tokens of replies that these alone sampled
    (weights that change in the middle of a reply leave its beginning in the engine's cache), all tokens if it
    is None, also by the model call that they belong to if there are several, calls from 2 on in powers of
    two. `stale/` is about the others, where the distance holds what was learned since, too.
    """
    columns: list[np.ndarray] = []
    for batch, logprobs, entropy, clipped in seen:
        on = np.asarray(batch.mask) > 0
        fields = (logprobs, batch.old_logprobs, batch.behavior_logprobs, batch.ref_logprobs, entropy, clipped)
        fields = (*fields, batch.advantages, batch.turn, _oldest(batch))
        values = np.stack([np.asarray(x, np.float64)[on] for x in fields])
        columns.append(np.repeat(values, np.asarray(batch.mask)[on].astype(np.int64), axis=1))
    if not sum(c.shape[1] for c in columns):
        return {}
    l, o, q, ref, entropy, clipped, advantages, turn, versions = np.concatenate(columns, axis=1)
    ratio = np.exp(l - o)
    metrics = {
        "policy/entropy": float(entropy.mean()),
        "policy/clip_fraction": float(clipped.mean()),
        "policy/clip_fraction_up": float((clipped * (advantages > 0)).mean()),
        "policy/clip_fraction_down": float((clipped * (advantages < 0)).mean()),
        "policy/ratio_min": float(ratio.min()),
        "policy/ratio_mean": float(ratio.mean()),
        "policy/ratio_max": float(ratio.max()),
        "policy/kl_old": float(np.mean(ratio - 1 - (l - o))),
    }
    if not np.isnan(ref).all():
        metrics["policy/kl_ref"] = float(np.mean(np.exp(ref - l) - 1 - (ref - l)))
    fresh = np.ones(len(l), bool) if version is None else versions == version

    def among(name: str, of: np.ndarray) -> dict[str, float]:
        return {f"{name}/{key}": value for key, value in distance(o[of], q[of]).items()} if of.any() else {}

    # The first call, the second, then 2-3, 4-7, ...
    bucket = np.where(turn < 2, turn, 2.0 ** np.floor(np.log2(np.maximum(turn, 2))))
    firsts = np.unique(bucket[fresh]).astype(int)
    for first in firsts if len(firsts) > 1 else ():
        last = max(first, 2 * first - 1)
        name = f"sampler/call_{first}" + (f"-{last}" if last > first else "")
        metrics |= among(name, fresh & (bucket == first))
    return metrics | among("sampler", fresh) | among("stale", ~fresh)


def _oldest(batch: Batch) -> np.ndarray:
    """The version of the oldest weights that took part in the reply of each position. i32[B, L]."""
    version = np.asarray(batch.version)
    rows = np.broadcast_to(np.arange(len(version))[:, None], version.shape)
    replies = np.stack([rows, np.asarray(batch.segments), np.asarray(batch.turn)]).reshape(3, -1)
    _, reply = np.unique(replies, axis=1, return_inverse=True)
    reply = reply.reshape(version.shape)
    oldest = np.full(reply.max() + 1, np.iinfo(np.int32).max)
    np.minimum.at(oldest, reply[version >= 0], version[version >= 0])
    return oldest[reply]


class MetricsWriter:
    """Appends to metrics.jsonl, one line a record, flushed as it is written: `{"step": n, name: value, ...}`.

    NaN and infinities are kept (as Python's json writes them), and named in the record's `nonfinite`. Names
    that begin with `time/` are what a clock said; everything else of a deterministic run is the same each
    time.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        bad = sorted(name for name, value in values.items() if not math.isfinite(value))
        _write_line(self._file, {"step": step} | values | ({"nonfinite": bad} if bad else {}))

    def close(self) -> None:
        self._file.close()


class EpisodeWriter:
    """Writes episodes to files of a directory, one line each, flushed as it is written."""

    def __init__(self, directory: Path, *, traces: bool = False):
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._traces = directory, traces
        self._name: str | None = None
        self._file: IO[str] | None = None

    def write(self, name: str, id: str, trajectory: Trajectory, **more: Any) -> None:
        """Appends to `<name>.jsonl`. The loop names its files by the step: "000012", and evaluations
        "eval-000012"."""
        if name != self._name:
            self.close()
            self._name, self._file = name, (self._directory / f"{name}.jsonl").open("a", encoding="utf-8")
        assert self._file is not None
        _write_line(self._file, {"id": id} | more | episode_record(trajectory, traces=self._traces))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._name = self._file = None


class TensorBoardTracker:
    """A `Tracker` that writes TensorBoard events, on disk after every step. A run that logged a value that is
    not finite is flagged: `health/nonfinite` counts them, and a text says which came first.

    After a resume, the first step that is logged replaces what an earlier process wrote from that step on.

    tensorboardX's writer of events is used without the queue and the thread that its SummaryWriter puts
    before it: what is in those when a process dies is lost, `flush()` or not.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._writer: Any = None
        self.flagged = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.summary import scalar, text

        now = time.time()
        if self._writer is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(self._directory / "events"))
            start = SessionLog(status=SessionLog.START)
            self._writer.write_event(Event(wall_time=now, step=step, session_log=start))
        bad = sorted(name for name, value in metrics.items() if not math.isfinite(value))
        summaries = [scalar(name, value) for name, value in metrics.items()]
        summaries.append(scalar("health/nonfinite", len(bad)))
        if bad and not self.flagged:
            self.flagged = True
            summaries.append(text("flagged", f"step {step}: not finite: {', '.join(bad)}"))
        for summary in summaries:
            self._writer.write_event(Event(wall_time=now, step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def episode_record(trajectory: Trajectory, *, traces: bool = False) -> dict[str, Any]:
    """A trajectory as a JSON value; with `traces` its tokens too, log-probs of sampled ones only."""
    task = trajectory.task
    record: dict[str, Any] = {
        "task": task.id,
        "type": task.type,
        "split": task.split,
        "seed": trajectory.seed,
        "reward": trajectory.reward,
        "outcome": trajectory.outcome,
        "stop": str(trajectory.stop),
        "error": trajectory.error,
        "metrics": dict(trajectory.metrics),
        "system": trajectory.system,
        "turns": [
            {"observation": t.observation, "reply": t.reply, "action": t.action, "reward": t.reward}
            for t in trajectory.turns
        ],
        "final": trajectory.final,
    }
    if trajectory.log is not None:
        record["log"] = trajectory.log
    if trajectory.branches:
        record["branches"] = [
            {"at": b.at, "calls": list(b.calls)} | episode_record(b.trajectory) for b in trajectory.branches
        ]
    return record | ({"traces": [_trace_record(t) for t in trajectory.traces]} if traces else {})


def _trace_record(trace: TokenTrace) -> dict[str, Any]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], trace.sampled, [False]]).astype(np.int8)))
    return {
        "kind": trace.kind,
        "tokens": trace.tokens.tolist(),
        "sampled": edges.reshape(-1, 2).tolist(),  # [start, end) of each sampled span
        "trainable": int(trace.trainable.sum()),
        "logprobs": [float(f"{x:.9g}") for x in trace.logprobs[trace.sampled]],  # nine digits hold every f32
        "versions": sorted({int(v) for v in trace.version[trace.sampled]}),
    }


def _write_line(file: IO[str], record: Mapping[str, Any]) -> None:
    file.write(_line(record))
    file.flush()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, default=_plain) + "\n"


def _plain(value: Any) -> Any:
    """What json does not know: numpy scalars and arrays as numbers and lists, anything else as its text."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of a file that a killed process may have left with half a line at its end; [] if it is
    absent. Raises InputError, naming the line, if another line is no JSON."""
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        try:
            records.append(json.loads(line))  # a whole line ends with a newline
        except ValueError as error:
            raise InputError(f"{path}, line {number} is damaged ({error}): mend it or remove it.") from None
    return records


def cut_back(
    workdir: Path, step: int, trained: Callable[[int], bool] = lambda group: True, first_open: int = 0
) -> None:
    """Takes metrics.jsonl and episodes/ back to what had been written when step `step` had ended, and its
    evaluation had not begun: the records of an evaluation at `step` go too, as it is made again. And so do
    episodes of groups that were not `trained` by then; none of them was begun before step `first_open`."""
    path = workdir / "metrics.jsonl"
    kept = [r for r in read_jsonl(path) if r["step"] < step or (r["step"] == step and not is_evaluation(r))]
    if path.exists():
        write_whole(path, "".join(_line(r) for r in kept))
    for file in (workdir / "episodes").glob("*.jsonl"):
        kind, _, number = file.stem.rpartition("-")
        if number.isdigit() and int(number) > step - (kind == "eval"):
            file.unlink()
        elif number.isdigit() and not kind and int(number) >= first_open:
            records = read_jsonl(file)
            left = [r for r in records if trained(r["group"])]
            if len(left) < len(records) or not file.read_bytes().endswith(b"\n"):
                write_whole(file, "".join(_line(r) for r in left))


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that whoever reads it, and whoever comes after a crash, finds the old text or the new
    one, and never a part."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def is_evaluation(record: Mapping[str, Any]) -> bool:
    """Whether a record of metrics.jsonl is of an evaluation and not of a training step."""
    return any(name.startswith("eval/") for name in record)


def equal_records(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> bool:
    """Whether two metrics.jsonl say the same, clocks aside."""

    def content(records: Sequence[Mapping[str, Any]]) -> list[str]:
        return [json.dumps({k: v for k, v in r.items() if not k.startswith("time/")}) for r in records]

    return content(a) == content(b)

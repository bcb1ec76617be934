"""What a run shows: intervals, the table at the end, the learning curve, results.json."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from metagym.rl.metrics import wilson, write_whole
from metagym.types import Trajectory, Why


@dataclass(frozen=True)
class Score:
    """How often an evaluation succeeded, at temperature 1: Pass@1, and Pass@k for several attempts."""

    successes: int
    episodes: int  # that count
    failed: int  # that do not: something outside the agent broke, or could not be judged
    turns: float  # of an episode, on average
    low: float  # 95 % interval of the rate
    high: float
    pass_at: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)  # k -> rate, low, high
    tokens: Mapping[str, int] = field(default_factory=dict)  # of all episodes, by where they came from

    @classmethod
    def of(
        cls,
        outcomes: Sequence[Sequence[float]],
        turns: Sequence[int],
        failed: int = 0,
        tokens: Mapping[str, int] | None = None,
    ) -> "Score":
        """From raw outcomes by task: an episode succeeded if its outcome is above 0.5.

        Pass@k for k = 2, 4, ... and the most attempts that a task has; tasks with fewer than k are left out.
        """
        tries = [(len(each), sum(o > 0.5 for o in each)) for each in outcomes if each]
        most = max((n for n, _ in tries), default=0)
        ks = sorted({most, *(2**i for i in range(1, most.bit_length()))} - {0, 1})
        passes = {str(k): interval([pass_at_k(n, c, k) for n, c in tries if n >= k]) for k in ks}
        good, count = sum(c for _, c in tries), sum(n for n, _ in tries)
        _, low, high = interval([c / n for n, c in tries], [n for n, _ in tries])
        mean_turns = float(np.mean(turns)) if turns else math.nan
        return cls(good, count, failed, mean_turns, low, high, passes, dict(tokens or {}))

    @property
    def rate(self) -> float:
        return self.successes / self.episodes if self.episodes else math.nan

    def metrics(self, name: str) -> dict[str, float]:
        """The rates and their intervals, by name."""
        rates = {name: (self.rate, self.low, self.high)}
        rates |= {f"{name}/pass@{k}": told for k, told in self.pass_at.items()}
        return {
            f"{of}{what}": value
            for of, told in rates.items()
            for what, value in zip(("", "/low", "/high"), told, strict=True)
        }

    def __str__(self) -> str:
        return _text(self.rate, self.low, self.high)


def _text(rate: float, low: float, high: float) -> str:
    return f"{100 * rate:5.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that one of k attempts succeeds, where c of n did: the unbiased estimate of 2107.03374."""
    if not 0 < k <= n:
        raise ValueError(f"Pass@{k} needs at least {k} attempts, there are {n}.")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def interval(values: Sequence[float], weights: Sequence[int] | None = None) -> tuple[float, float, float]:
    """The mean of tasks' rates, weighted by their attempts if given, and its 95 % interval.

    Wilson's, for as many trials as would vary as much as the mean does: attempts at the same task are no
    independent trials. With one attempt each it is Wilson's itself; where all rates are 0 or all are 1, each
    task counts as one trial.
    """
    if not values:
        return math.nan, 0.0, 1.0
    x = np.asarray(values, np.float64)
    w = np.ones(len(x)) if weights is None else np.asarray(weights, np.float64)
    mean = math.fsum(w * x) / math.fsum(w)
    w = w / w.sum()
    variance = float(np.square(w) @ np.square(x - mean))  # of the mean
    trials = mean * (1 - mean) / variance if variance > 1e-12 else float(len(x))
    low, high = wilson(mean * trials, trials)
    return mean, low, high


Curve = Mapping[int, Mapping[str, Score]]
"""Training step -> evaluation -> score; the first step is before training."""


def table(curve: Curve) -> str:
    """Each evaluation before and after, as text."""
    if not curve:
        return "nothing was evaluated"
    first, last = min(curve), max(curve)
    head: tuple[str, ...] = (
        "success at temperature 1",
        "episodes",
        f"before (step {first})",
        f"after (step {last})",
        "apart",
    )
    rows: list[tuple[str, ...]] = [head if first != last else (*head[:2], f"step {first}")]
    for name, after in curve[last].items():
        before = curve[first].get(name, after)
        row: tuple[str, ...] = (name, str(after.episodes), str(before))
        rows.append(row if first == last else (*row, str(after), "yes" if after.low > before.high else "no"))
        for k, told in after.pass_at.items():
            old = before.pass_at.get(k, told)
            row = (f"{name}, Pass@{k}", str(after.episodes), _text(*old))
            rows.append(row if first == last else (*row, _text(*told), "yes" if told[1] > old[2] else "no"))
    failed = sum(s.failed for scores in curve.values() for s in scores.values())
    note = [f"{failed} episodes do not count: something outside the agent failed."] if failed else []
    return "\n".join([_aligned(rows), *note])


def sources(trajectories: Iterable[Trajectory]) -> dict[str, int]:
    """How many tokens of the traces came from where: those that train as "trained, <kind of branch>", the
    others by why they do not (`metagym.types.Why`)."""
    found: Counter[str] = Counter()
    for trace in (trace for t in trajectories for trace in t.traces):
        for why in Why:
            name = f"trained, {trace.kind}" if why == Why.SAMPLED else why.name.lower()
            found[name] += int((trace.why == why).sum())
    return {name: n for name, n in sorted(found.items(), reverse=True) if n}


def token_table(scores: Mapping[str, Score]) -> str:
    """Evaluations side by side: calls of the model in an episode, and the tokens of an episode by where they
    came from."""
    names = list(dict.fromkeys(name for s in scores.values() for name in s.tokens))
    rows = [("tokens of an episode", "calls", *names)]
    for name, s in scores.items():
        counts = (f"{s.tokens.get(n, 0) / max(1, s.episodes):.1f}" for n in names)
        rows.append((name, f"{s.turns:.1f}", *counts))
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def write(curve: Curve, path: Path, **more: object) -> None:
    """results.json: every score, and what else is given."""
    scores = {
        step: {name: {"rate": s.rate, **asdict(s)} for name, s in by_name.items()}
        for step, by_name in sorted(curve.items())
    }
    write_whole(path, json.dumps({"scores": scores, **more}, indent=2) + "\n")


def read(path: Path) -> dict[int, dict[str, Score]]:
    """The scores of a results.json; none if there is none."""
    if not path.is_file():
        return {}
    fields = Score.__dataclass_fields__  # earlier versions had fewer

    def score(row: Mapping[str, Any]) -> Score:
        known = {name: row[name] for name in fields if name in row}
        return Score(**{**known, "pass_at": {k: tuple(v) for k, v in row.get("pass_at", {}).items()}})

    return {
        int(step): {name: score(s) for name, s in by_name.items()}
        for step, by_name in json.loads(path.read_text())["scores"].items()
    }


def plot(curve: Curve, training: Mapping[int, float], path: Path, title: str) -> None:
    """The learning curve as PNG: success in training by step, and the evaluations with their intervals."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    if training:
        steps = sorted(training)
        axes.plot(steps, [100 * training[s] for s in steps], color="0.6", lw=1, label="training episodes")
    for name in dict.fromkeys(n for scores in curve.values() for n in scores):
        points = [(step, scores[name]) for step, scores in sorted(curve.items()) if name in scores]
        rate = np.array([s.rate for _, s in points])
        error = [rate - [s.low for _, s in points], [s.high for _, s in points] - rate]
        error = np.maximum(error, 0)  # the interval of a rate of 1 ends there, but for rounding
        axes.errorbar([x for x, _ in points], 100 * rate, 100 * error, fmt="o-", capsize=3, label=name)
    axes.set(xlabel="training step", ylabel="success at temperature 1 (%)", ylim=(-3, 103), title=title)
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)

"""What a run shows: intervals, the table at the end, the learning curve, results.json."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from metagym.rl.metrics import wilson, write_whole


@dataclass(frozen=True)
class Score:
    """How often an evaluation succeeded, at temperature 1."""

    successes: int
    episodes: int  # that count
    failed: int  # that do not: something outside the agent broke, or could not be judged
    turns: float  # of an episode, on average
    low: float  # 95 % interval of the rate
    high: float

    @classmethod
    def of(cls, outcomes: Sequence[float], turns: Sequence[int], failed: int = 0) -> "Score":
        """From raw outcomes: an episode succeeded if its outcome is above 0.5."""
        good = sum(o > 0.5 for o in outcomes)
        mean_turns = float(np.mean(turns)) if turns else math.nan
        return cls(good, len(outcomes), failed, mean_turns, *wilson(good, len(outcomes)))

    @property
    def rate(self) -> float:
        return self.successes / self.episodes if self.episodes else math.nan

    def metrics(self, name: str) -> dict[str, float]:
        """The rate and its interval, by name."""
        return {name: self.rate, f"{name}/low": self.low, f"{name}/high": self.high}

    def __str__(self) -> str:
        return f"{100 * self.rate:5.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"


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
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    failed = sum(s.failed for scores in curve.values() for s in scores.values())
    note = [f"{failed} episodes do not count: something outside the agent failed."] if failed else []
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], *note])


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
    fields = Score.__dataclass_fields__
    return {
        int(step): {name: Score(**{k: s[k] for k in fields}) for name, s in by_name.items()}
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

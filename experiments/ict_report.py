"""What a study of In-Context Training shows: one table, results.json, and the curves."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# 97.5 % quantiles of Student's t by degrees of freedom; from 30 on, the next smaller entry is used.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_T_MORE = ((120, 1.980), (60, 2.000), (40, 2.021), (30, 2.042))


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high): the 95 % interval of the mean by Student's t; the values are one per run. Infinite
    bounds for a single run. Raises ValueError for none."""
    if not len(values):
        raise ValueError("an interval needs at least one value")
    x = np.asarray(values, np.float64)
    if len(x) == 1:
        return float(x[0]), -math.inf, math.inf
    freedom = len(x) - 1
    t = _T[freedom - 1] if freedom <= 30 else next(t for least, t in _T_MORE if freedom >= least)
    half = t * float(x.std(ddof=1)) / math.sqrt(len(x))
    return float(x.mean()), float(x.mean()) - half, float(x.mean()) + half


Curves = Mapping[tuple[str, int, str], Mapping[str, list[tuple[float, float, float]]]]
"""(row, k, reflector) -> "last" or "selected" -> the interval at each meta-turn."""


def curves(records: Sequence[Mapping[str, Any]]) -> Curves:
    """Mean returns by meta-turn over runs. "last": of the batch that is played under the run's latest prompt;
    "selected": of fresh tasks under the prompt that was best on the validation tasks up to then."""
    groups: dict[tuple[str, int, str], list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["row"], record["k"], record["reflector"]), []).append(record)
    found = {}
    for key, runs in groups.items():
        whole = [r for r in runs if r["error"] is None]
        length = min((len(r["turns"]) for r in whole), default=0)
        found[key] = {
            name: [interval([r["turns"][m][field] for r in whole]) for m in range(length)]
            for name, field in (("last", "outcome"), ("selected", "selected_score"))
            if whole and all(field in t for r in whole for t in r["turns"][:length])
        }
    return found


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """One table, as Markdown: a line for each row, k, reflector and way of choosing the prompt."""
    found = curves(records)
    if not found:
        return "nothing was evaluated"
    most = max(len(points) for ways in found.values() for points in ways.values())
    head = ["tasks", "k", "reflector", "prompt", "runs", *(f"meta-turn {m}" for m in range(most))]
    lines = [head, ["---"] * len(head)]
    for (row, k, reflector), ways in found.items():
        runs = sum((r["row"], r["k"], r["reflector"]) == (row, k, reflector) for r in records)
        for way, points in ways.items():
            cells = [f"{100 * m:.1f} [{100 * low:.1f}, {100 * high:.1f}]" for m, low, high in points]
            cells += [""] * (most - len(cells))
            lines.append([row, str(k), reflector, way, str(runs), *cells])
    note = "Mean return in percent, 95 % intervals over runs. Meta-turn 0 is the initial prompt."
    failed = sum(t["failed"] for r in records for t in r["turns"])
    broken = sum(r["error"] is not None for r in records)
    note += f" {failed} inner episodes did not count." if failed else ""
    note += f" {broken} runs ended by an error of the reflector and are left out." if broken else ""
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{note}"


def write_report(records: Sequence[Mapping[str, Any]], directory: Path) -> str:
    """Writes table.md, results.json and curves.png; returns the table."""
    text = table(records)
    (directory / "table.md").write_text(text + "\n", encoding="utf-8")
    found = curves(records)
    values = [
        {"row": row, "k": k, "reflector": reflector, "prompt": way, "by_meta_turn": [list(p) for p in points]}
        for (row, k, reflector), ways in found.items()
        for way, points in ways.items()
    ]
    (directory / "results.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    plot(found, directory / "curves.png")
    return text


def plot(found: Curves, path: Path) -> None:
    """A panel for each row and k: mean return by meta-turn, with the intervals over runs as bands; the
    prompts chosen on validation tasks are dashed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((row, k) for row, k, _ in found))
    if not panels:
        return
    wide = min(3, len(panels))
    tall = -(-len(panels) // wide)
    figure, axes = plt.subplots(
        tall, wide, figsize=(4 * wide, 3 * tall), sharey=True, squeeze=False, layout="constrained"
    )
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(name for *_, name in found))}
    for axis, (row, k) in zip(axes.flat, panels, strict=False):
        for (r, n, name), ways in found.items():
            if (r, n) != (row, k):
                continue
            for way, points in ways.items():
                mean, low, high = np.array(points).T
                turns = np.arange(len(points))
                style = "o-" if way == "last" else "x--"
                axis.plot(
                    turns, mean, style, ms=3, lw=1, color=colours[name], label=name if way == "last" else None
                )
                if way == "last":
                    axis.fill_between(turns, low, high, color=colours[name], alpha=0.2, lw=0)
        axis.set(title=f"{row}, k={k}", xlabel="meta-turn", ylim=(-0.03, 1.03))
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    axes[0, 0].set_ylabel("mean return")
    axes[0, 0].legend(fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)

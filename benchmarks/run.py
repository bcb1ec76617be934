"""Speed of metagym beside PyTorch, TRL and Tunix on this machine: `make bench`, `make bench ARGS=grpo`.

Each peer lives in an environment of its own, .venv-bench-<peer>, made when it is first needed from
benchmarks/requirements/<peer>.txt; BENCH_<PEER>=/path/to/python names one that exists. Every measurement is a
fresh process. Ours and the peer take turns, each first in every other pair, so that what else the machine
does hits both; a ratio is taken within each pair. Printed, and written to benchmarks/results.md: the median
seconds of both, and the least, the median and the greatest ratio (above 1: metagym is faster), of seconds on
the clock and of CPU seconds, which other work on the machine disturbs less.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
PROMPT = "Write a short story about a dragon who is afraid of the dark."


@dataclass(frozen=True)
class Case:
    """One comparison. `ours` and `theirs` are arguments of ours.py and of a peer's script; without a peer,
    `script` is ours instead of ours.py."""

    name: str
    title: str
    ours: tuple[str, ...]
    peer: str | None = None
    script: str = ""
    theirs: tuple[str, ...] = ()


def _torch(task: str, batch: int, length: int, title: str) -> Iterator[Case]:
    shape = (str(batch), str(length))
    for dtype in ("float32", "bfloat16"):
        yield Case(
            task,
            f"{title}, {dtype}, torch",
            (task, dtype, "{repeats}", *shape),
            "torch",
            "torch_model.py",
            (task, dtype, "{repeats}", *shape),
        )


CASES = (
    *(
        Case(
            "grpo",
            f"GRPO step, 8 completions of 64 tokens, {dtype}, {label}",
            ("grpo", dtype, "{repeats}", "8", "64"),
            peer,
            f"{peer}_grpo.py",
            ("{repeats}", PROMPT, "{scratch}", dtype),
        )
        for dtype in ("float32", "bfloat16")
        for peer, label in (("trl", "TRL"), ("tunix", "Tunix"))
    ),
    *_torch("train", 8, 512, "train step 8 x 512"),
    *_torch("decode", 8, 512, "decode 64 tokens, batch 8, context 512"),
    *_torch("decode", 32, 512, "decode 64 tokens, batch 32, context 512"),
    *_torch("prefill", 1, 512, "prefill 512"),
    Case("rollouts", "MiniHack episodes at the same time", ("rollouts", "float32", "{repeats}")),
    Case("render", "MiniHack step with and without text", ("render", "float32", "{repeats}")),
    Case("isolation", "MiniHack in a worker process", ("isolation", "float32", "{repeats}")),
    Case("async", "rollouts beside training", ("{repeats}",), script="async_rollouts.py"),
    Case("meta", "meta-environments", ("{repeats}",), script="meta.py"),
    Case("proxy", "proxy", (), script="proxy.py"),
)


def python_of(peer: str) -> str:
    """The peer's interpreter; makes its environment if there is none."""
    if given := os.environ.get(f"BENCH_{peer.upper()}"):
        return given
    home = ROOT / f".venv-bench-{peer}"
    python, done = home / "bin" / "python", home / ".done"
    files = [HERE / "requirements" / f"{peer}.txt", HERE / "requirements" / f"{peer}-alone.txt"]
    wanted = "".join(f.read_text() for f in files if f.exists())
    if not done.exists() or done.read_text() != wanted:
        print(f"installing {peer} into {home.name}", flush=True)
        uv = Path(sys.executable).parent / "uv"
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, home], check=True)
        install = [uv, "pip", "install", "--quiet", "--python", python, "-r"]
        subprocess.run([*install, files[0]], check=True)
        if files[1].exists():  # whose own dependencies are not needed
            subprocess.run([*install, files[1], "--no-deps"], check=True)
        done.write_text(wanted)
    return str(python)


def measure(command: list[str], values: dict[str, str]) -> dict[str, Any]:
    """Runs a script in a process of its own; what it printed last."""
    command = [values.get(c, c) for c in command]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def compare(case: Case, directory: str, pairs: int, repeats: int) -> str:
    """A row of the table."""
    assert case.peer is not None
    sides = (
        [sys.executable, str(HERE / "ours.py"), directory, *case.ours],
        [python_of(case.peer), str(HERE / "peers" / case.script), directory, *case.theirs],
    )
    found: tuple[list[Any], list[Any]] = ([], [])
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            with tempfile.TemporaryDirectory() as scratch:
                values = {"{repeats}": str(repeats), "{scratch}": scratch}
                found[side].append(measure(sides[side], values))

    def best(side: int, what: str) -> list[float]:
        return [min(f[what]) for f in found[side]]

    def spread(what: str) -> str:
        ratios = sorted(b / a for a, b in zip(best(0, what), best(1, what), strict=True))
        return f"{ratios[0]:.2f} / {statistics.median(ratios):.2f} / {ratios[-1]:.2f}"

    medians = " | ".join(f"{statistics.median(best(side, 'seconds')):.2f}" for side in (0, 1))
    cpu = " / ".join(f"{statistics.median(best(side, 'cpu')):.2f}" for side in (0, 1))
    peaks = " / ".join(f"{max(f['peak_gb'] for f in found[side]):.1f}" for side in (0, 1))
    return f"| {case.title} | {medians} | {spread('seconds')} | {cpu} | {spread('cpu')} | {peaks} |"


def alone(case: Case, directory: str, repeats: int) -> list[str]:
    values = {"{repeats}": str(repeats)}
    ours = [str(HERE / case.script)] if case.script else [str(HERE / "ours.py"), directory]
    found = measure([sys.executable, *ours, *case.ours], values)
    rows = []
    for name, v in found["rates"].items():
        spread = f"{min(v):.3g} / {statistics.median(v):.3g} / {max(v):.3g}"
        rows.append(f"| {case.title}: {name} | {spread} | {found['unit']} |")
    return rows


def machine() -> str:
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        model = text.split("model name\t: ", 1)[-1].splitlines()[0]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return f"{os.cpu_count()} cores, {model}; load average at the start {load:.1f}"


def versions(chosen: list[Case]) -> str:
    """What is compared: the packages that count, from this environment and from the peers' requirements."""
    found = [f"{name} {metadata.version(name)}" for name in ("jax", "flax", "optax")]
    for peer in dict.fromkeys(c.peer for c in chosen if c.peer):
        lines = (HERE / "requirements" / f"{peer}.txt").read_text().split()
        found.append(f"{peer}: " + ", ".join(line.replace("==", " ") for line in lines[:3]))
    return "; ".join(found)


def main() -> None:
    names = list(dict.fromkeys(c.name for c in CASES))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; none: all")
    parser.add_argument("--pairs", type=int, default=3, help="processes of each side")
    parser.add_argument("--repeats", type=int, default=3, help="measured repeats in a process")
    parser.add_argument("--only", default="", help="a word that the title has to contain")
    given = parser.parse_args()
    if unknown := sorted(set(given.names) - set(names)):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(names)}")
    chosen = [c for c in CASES if (not given.names or c.name in given.names) and given.only in c.title]
    from metagym.models import load

    _, directory = load("smollm2-135m")
    how = f"{given.pairs} pairs, the best of {given.repeats} repeats in each"
    lines = [f"Machine: {machine()}. {how}. {versions(chosen)}.", ""]
    print(lines[0], flush=True)
    compared, single = [c for c in chosen if c.peer], [c for c in chosen if not c.peer]

    def tell(rows: list[str]) -> None:
        lines.extend(rows)
        print("\n".join(rows), flush=True)
        (HERE / "results.md").write_text("\n".join(lines) + "\n")

    if compared:
        tell(
            [
                "| | metagym s | peer s | ratio: least, median, greatest | CPU s | ratio of CPU | peak GB |",
                "|---|---|---|---|---|---|---|",
            ]
        )
        for case in compared:
            tell([compare(case, str(directory), given.pairs, given.repeats)])
    if single:
        tell(["", "| | least / median / greatest | unit |", "|---|---|---|"])
        for case in single:
            tell(alone(case, str(directory), given.repeats))


if __name__ == "__main__":
    main()

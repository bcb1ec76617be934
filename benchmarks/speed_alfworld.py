"""Speed and size of the native ALFWorld interpreter, as a ratio to TextWorld's, in one run.

usage: python benchmarks/speed_alfworld.py [--games 3]

Plays generated games in both engines, in this process, and counts CPU time: a reset is from a file to the
first observation with its admissible commands, a step to the next. Needs the extra `alfworld`.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from metagym.envs.alfworld import game as games
from metagym.envs.alfworld import generate
from metagym.envs.alfworld.native import Play
from metagym.envs.alfworld.real import RealGame


class Native:
    """The native engine with the calls of `RealGame`."""

    def reset(self, path: str) -> Any:
        self.play = Play(games.parse(Path(path).read_bytes()))
        return self.play.reset(), self.play.admissible(), self.play.won()

    def step(self, command: str) -> Any:
        return self.play.step(command), self.play.admissible(), self.play.won()


def timed(call: Callable[[], Any], seconds: list[float]) -> Any:
    start = time.process_time()
    result = call()
    seconds.append(time.process_time() - start)
    return result


def measure(engine: Any, paths: list[Path], repeats: int, steps: int) -> tuple[list[float], list[float]]:
    """CPU seconds of each reset and each step."""
    resets: list[float] = []
    each: list[float] = []
    for path in paths * repeats:
        rng = random.Random(0)
        admissible = timed(lambda path=path: engine.reset(str(path)), resets)[1]
        for _ in range(steps):
            command = rng.choice(admissible)
            admissible = timed(lambda command=command: engine.step(command), each)[1]
    return resets, each


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--games", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="random admissible commands in each")
    args = parser.parse_args()
    domain, grammar = generate.package_texts()
    with tempfile.TemporaryDirectory() as folder:
        kinds = [games.TYPES[number % len(games.TYPES)] for number in range(args.games)]
        paths = [
            generate.write(Path(folder), "train", kind, number, domain, grammar)
            for number, kind in enumerate(kinds)
        ]
        native = measure(Native(), paths, 20, args.steps)
        lines = {"native": native, "textworld": measure(RealGame(), paths, 1, args.steps)}
        for name, (resets, steps) in lines.items():
            reset, step = (statistics.mean(seconds) * 1e3 for seconds in (resets, steps))
            print(f"{name}: reset {reset:.3f} ms, step {step:.4f} ms")
        ratios = [
            statistics.mean(a) / statistics.mean(b) for a, b in zip(lines["textworld"], native, strict=True)
        ]
        print(f"ratio: reset {ratios[0]:.0f}, step {ratios[1]:.0f}", flush=True)
        texts = [json.loads(path.read_text()) for path in paths]
        tracemalloc.start()
        kept = [Play(games.build(text)) for text in texts * 10]
        print(f"memory: {tracemalloc.get_traced_memory()[0] / len(kept) / 1e3:.0f} kB for each live game")


if __name__ == "__main__":
    main()

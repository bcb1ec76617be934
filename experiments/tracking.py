"""Where metrics go besides metrics.jsonl and TensorBoard: the terminal."""

import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from metagym.protocols import Tracker


class Console:
    """Progress on a stream: one line that is written over on a terminal, one line a step elsewhere.

    `shown` maps the names of the metrics that are worth a look to short labels. A metric that is not finite
    is always shown; a record with nothing to show is not.
    """

    def __init__(self, steps: int, shown: Mapping[str, str], stream: TextIO | None = None):
        self._steps, self._shown = steps, shown
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._start: tuple[float, int] | None = None
        self._open = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.monotonic()
        if self._start is None:
            self._start = (now, step)
        parts = [f"step {step}/{self._steps}"]
        parts += [
            f"{label} {_number(metrics[name])}" for name, label in self._shown.items() if name in metrics
        ]
        parts += [f"{n} {v}" for n, v in metrics.items() if n not in self._shown and not math.isfinite(v)]
        if len(parts) == 1:
            return
        done = step - self._start[1]
        if done > 0:
            left = (now - self._start[0]) / done * (self._steps - step)
            parts.append(f"{_duration(left)} left")
        self.write("  ".join(parts), keep=not self._live)

    def write(self, text: str, *, keep: bool = True) -> None:
        """A line. `keep`: it stays; otherwise the next one is written over it, if this is a terminal."""
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            text = f"\r\x1b[K{text if keep else text[:width]}"
        self._stream.write(text + ("\n" if keep or not self._live else ""))
        self._stream.flush()
        self._open = self._live and not keep

    def close(self) -> None:
        if self._open:
            self._stream.write("\n")
            self._open = False


class Together:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]):
        self._trackers = tuple(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else str(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"

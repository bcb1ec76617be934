"""Whether a run is well: rules that stop it, and how much of the machine it uses."""

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from metagym.errors import InputError, TrainingError

WINDOW = 50  # steps that are remembered


@dataclass(frozen=True)
class Rule:
    """A run stops when `metric` was outside of [low, high], or not finite, in `steps` steps in a row.

    Steps that do not have the metric do not count. Raises InputError for bounds that nothing is between.
    """

    metric: str
    low: float = -math.inf
    high: float = math.inf
    steps: int = 1
    hint: str = ""  # what may be the matter, for the message

    def __post_init__(self):
        if not self.low <= self.high or self.steps < 1:
            raise InputError(
                f"a rule needs low <= high and at least 1 step; {self.metric} has low {self.low}, "
                f"high {self.high}, steps {self.steps}"
            )

    def holds(self, value: float) -> bool:
        return math.isfinite(value) and self.low <= value <= self.high


class Watch:
    """Looks at every step's metrics. `records` are those of earlier steps, for a run that is resumed."""

    def __init__(self, rules: Iterable[Rule], records: Iterable[Mapping[str, float]] = ()):
        self._rules = tuple(rules)
        self._seen: deque[Mapping[str, float]] = deque(records, maxlen=WINDOW)

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises TrainingError if a rule is broken: it says what left its bounds, how it came there, and what
        else moved."""
        self._seen.append({"step": step, **metrics})
        for rule in self._rules:
            values = [(int(m["step"]), m[rule.metric]) for m in self._seen if rule.metric in m]
            last = values[-rule.steps :]
            if rule.metric not in metrics or len(last) < rule.steps or any(rule.holds(v) for _, v in last):
                continue
            shown = ", ".join(f"{v:.4g} at step {s}" for s, v in [*values[:1], *values[1:][-5:]])
            others = "; ".join(self._moved(rule.metric))
            raise TrainingError(
                f"step {step}: {rule.metric} is {values[-1][1]:.4g}, outside of [{rule.low:g}, {rule.high:g}]"
                + (f", for {rule.steps} steps in a row" if rule.steps > 1 else "")
                + f". It was {shown}."
                + (f" What else moved most: {others}." if others else "")
                + (f" {rule.hint}" if rule.hint else "")
            )

    def _moved(self, besides: str, most: int = 4) -> list[str]:
        """The metrics whose last value is furthest from what they were, in units of how they vary."""
        *before, now = self._seen
        found = []
        for name, value in now.items():
            earlier = [float(m[name]) for m in before if name in m]
            if name in (besides, "step") or name.startswith(("time/", "eval/")) or len(earlier) < 2:
                continue
            middle = float(np.median(earlier))
            spread = float(np.median(np.abs(np.array(earlier) - middle))) + 1e-3 * abs(middle) + 1e-12
            distance = abs(value - middle) / spread if math.isfinite(value) else math.inf
            if distance > 5:
                found.append((distance, f"{name} {middle:.4g} -> {value:.4g}"))
        return [text for _, text in sorted(found, key=lambda f: -f[0])[:most]]


def matmul_rate(dtype: Any = jnp.float32, *, devices: Iterable[Any] | None = None) -> float:
    """Floating-point operations per second of square matrix products, all devices together: what this
    machine reaches, rather than what is printed on it. Takes about half a second on a CPU."""
    devices = jax.devices() if devices is None else list(devices)
    size = 1024 if devices[0].platform == "cpu" else 8192
    x = jax.device_put(np.ones((size, size), np.float32), devices[0]).astype(dtype)
    multiply = jax.jit(lambda a: jnp.matmul(a, a, preferred_element_type=jnp.float32).astype(dtype))
    jax.block_until_ready(multiply(x))
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(multiply(x))
        best = min(best, time.perf_counter() - start)
    # Virtual devices of a CPU are one machine.
    return 2.0 * size**3 / best * (1 if devices[0].platform == "cpu" else len(devices))


def training_flops(params: Any, tokens: float) -> float:
    """Floating-point operations of forward and backward pass over `tokens` positions: 6 for each parameter,
    attention and what is computed again left out (2001.08361)."""
    return 6.0 * tokens * sum(int(x.size) for x in jax.tree.leaves(params))

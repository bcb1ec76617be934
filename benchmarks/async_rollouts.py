"""How much faster steps are when episodes are played while the trainer works, on a simulated engine.

Usage: async_rollouts.py [REPEATS]. Prints a table, and a line of JSON that run.py reads.

Nothing is computed: replies, tools and the trainer's update take their time asleep, so the numbers are about
the order of the work alone, and hold for any machine that is quick enough to wake up in time. Episodes have
the latencies of agents in sandboxes: turns, reply lengths and tool times are lognormal with long tails. The
engine has as many slots as a step has episodes, in all cases; its time a token does not depend on how many
are in use. A second of that world takes 5 ms here.

Ours against ours: the same stream with staleness 0 is the synchronous loop. Each repeat measures all cases,
so that what else the machine does hits all of them; ratios are taken within a repeat.
"""

import json
import statistics
import sys
import time
from typing import Any

import numpy as np

from metagym.rl.rollouts import Request, RolloutStream, TaskStream, ThreadExecutor
from metagym.testing import SimulatedBackend, long_tail
from metagym.types import Sampling, StopReason, Task, TokenTrace, Trajectory

SECOND = 0.005
GROUPS, SIZE = 8, 8
TURNS = (12, 0.9, 100)  # median, sigma, most
REPLY = (120, 0.8, 2000)  # tokens
TOKEN_S = 0.02
TOOL_S = (1.0, 1.2, 60)
UPDATE_S = 90  # of a step's training
WARM, MEASURED = 3, 10  # steps
CASES = (
    ("staleness 0, synchronous", {"staleness": 0}),
    ("staleness 1, in order", {"staleness": 1}),
    ("staleness 1, as complete", {"staleness": 1, "in_order": False}),
    ("staleness 2, as complete", {"staleness": 2, "in_order": False}),
)


def agent(backend: SimulatedBackend, request: Request) -> Trajectory:
    """An episode: replies, and a tool after each of them."""
    rng = np.random.default_rng(request.sampling_seed)
    said = []
    for _ in range(max(1, round(long_tail(rng, *TURNS)))):
        sampling = Sampling(max_tokens=REPLY[2], seed=int(rng.integers(2**31)))
        said.append(backend.submit([1], sampling).result())
        time.sleep(SECOND * long_tail(rng, *TOOL_S))
    tokens, versions = (np.concatenate([getattr(g, n) for g in said]) for n in ("tokens", "version"))
    every = np.ones(len(tokens), bool)
    logprobs = np.concatenate([g.logprobs for g in said])
    trace = TokenTrace(tokens, every, every, logprobs, versions, np.zeros(len(tokens), np.int32))
    outcome = float(rng.integers(2))
    return Trajectory(request.task, request.seed, (), (trace,), outcome, outcome, StopReason.TERMINATED)


def measure(seed: int, staleness: int, in_order: bool = True) -> dict[str, float]:
    """Seconds of the simulated world a step, and what was trained in it."""
    backend = SimulatedBackend(median=REPLY[0], sigma=REPLY[1], token_s=TOKEN_S * SECOND, slots=GROUPS * SIZE)
    stream = RolloutStream(
        lambda request: agent(backend, request),
        TaskStream([Task(str(i), "simulated", "train") for i in range(100)]),
        groups=GROUPS,
        group_size=SIZE,
        steps=10**6,
        seed=seed,
        executor=ThreadExecutor(GROUPS * SIZE * (staleness + 1)),
        staleness=staleness,
        in_order=in_order,
        grace_s=0,
    )
    seen: list[dict[str, Any]] = []
    try:
        start = time.monotonic()
        for step in range(1, WARM + MEASURED + 1):
            rollouts = stream.take(step, step - 1)
            time.sleep(SECOND * UPDATE_S)
            backend.load(None, step)
            if step == WARM:
                start = time.monotonic()
            elif step > WARM:
                seen.append(dict(rollouts.metrics))
        seconds = (time.monotonic() - start) / SECOND / MEASURED
    finally:
        stream.close()
        backend.close()
    sampled = sum(m["tokens/sampled"] for m in seen)
    too_old = sum(m["staleness/untrained_tokens"] for m in seen)
    return {
        "seconds": seconds,
        "age": float(np.mean([m["staleness/mean"] for m in seen])),
        "too old": too_old / sampled,
        "trained": (sampled - too_old) / seconds / MEASURED,
    }


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    found: dict[str, list[dict[str, float]]] = {name: [] for name, _ in CASES}
    for repeat in range(repeats):
        for name, settings in CASES:
            found[name].append(measure(repeat, **settings))
    print("| | seconds a step | steps: times as fast | trained tokens: times as fast | their age | too old |")
    print("|---|---|---|---|---|---|")
    rates = {}
    for name, values in found.items():
        pairs = list(zip(found[CASES[0][0]], values, strict=True))
        steps = sorted(a["seconds"] / b["seconds"] for a, b in pairs)
        tokens = sorted(b["trained"] / a["trained"] for a, b in pairs)
        mean = {key: statistics.mean(v[key] for v in values) for key in values[0]}
        print(
            f"| {name} | {mean['seconds']:.0f} | {spread(steps)} | {spread(tokens)} "
            f"| {mean['age']:.2f} | {100 * mean['too old']:.1f} % |"
        )
        if name != CASES[0][0]:
            rates |= {f"steps, {name}": steps, f"trained tokens, {name}": tokens}
    print(json.dumps({"rates": rates, "unit": "times as fast as synchronous"}))


def spread(ratios: list[float]) -> str:
    """Least, median, greatest."""
    return f"{ratios[0]:.2f} / {statistics.median(ratios):.2f} / {ratios[-1]:.2f}"


if __name__ == "__main__":
    main()

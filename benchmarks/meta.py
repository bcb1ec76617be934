"""What the meta layer costs: `python benchmarks/meta.py [REPEATS]` prints one JSON line.

- overhead: milliseconds of CPU that an inner episode takes in `metagym/ICT-v0` beyond what `episode.run`
  alone takes for the same episodes with the same actor, all threads together.
- parallel: how many times as fast k episodes of a batch are played at the same time as one after the other,
  divided by k, with an actor whose replies take 20 ms each however many are asked for at once: an engine that
  batches.
"""

import json
import statistics
import sys
import time

import gymnasium as gym

import metagym  # noqa: F401 (registers)
from metagym.agents.follower import follow, rule_follower
from metagym.episode import run
from metagym.meta import Actor

RUNS, K, META_TURNS = 20, 5, 4


def ict(actor, k, **kwargs):
    types = ("doors-red", "food-plum", "keys-iron-oak")
    return gym.make(
        "metagym/ICT-v0",
        world="metagym/Rules-v0",
        types=types,
        actor=actor,
        k=k,
        meta_turns=META_TURNS,
        **kwargs,
    )


def overhead() -> float:
    """Milliseconds of CPU an inner episode."""
    actor = rule_follower()
    env, played = ict(actor, K), []
    env.reset(seed=0)
    start = time.process_time()
    for seed in range(RUNS):
        _, info = env.reset(seed=seed)
        played += info["batch"]
        for _ in range(META_TURNS):
            *_, info = env.step("Open the red door.")
            played += info["batch"]
    inside = time.process_time() - start
    env.close()
    env = gym.make("metagym/Rules-v0", disable_env_checker=True)
    start = time.process_time()
    for task, seed in played:
        run(env, actor.new_chat(seed), task, seed=seed, agent=actor.agent, system="Open the red door.")
    alone = time.process_time() - start
    return 1e3 * (inside - alone) / len(played)


def slow(messages):
    time.sleep(0.02)
    return follow(messages)


def parallel(k: int) -> float:
    """Speed-up of k episodes at the same time, as a share of k."""
    seconds = {}
    for workers in (1, k):
        env = ict(Actor(lambda seed: slow, agent=rule_follower().agent), k, workers=workers)
        env.reset(seed=0)
        start = time.perf_counter()
        for _ in range(META_TURNS):
            env.step("Open the red door.")
        seconds[workers] = time.perf_counter() - start
        env.close()
    return seconds[1] / seconds[k] / k


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    rates = {"overhead, CPU ms an inner episode": [overhead() for _ in range(repeats)]}
    for k in (3, 5):
        rates[f"{k} episodes at once, speed-up / {k}"] = [parallel(k) for _ in range(repeats)]
    for name, values in rates.items():
        print(
            f"{name}: {min(values):.2f} / {statistics.median(values):.2f} / {max(values):.2f}",
            file=sys.stderr,
        )
    print(json.dumps({"rates": rates, "unit": "", "peak_gb": 0.0}))


if __name__ == "__main__":
    main()

"""metagym's side of the benchmarks: each task prints a line of JSON with the seconds of each
repeat, on the clock and of CPU.

Usage: ours.py MODEL_DIR {grpo,train,decode,prefill} {float32,bfloat16} REPEATS BATCH LENGTH
       ours.py MODEL_DIR {rollouts,render,isolation} float32 REPEATS
"""

import dataclasses
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from metagym.models import load, make_mesh, make_policy
from metagym.proxy.backends.embedded import EmbeddedBackend
from metagym.proxy.render import Renderer
from metagym.proxy.session import Session
from metagym.rl import batching, train_step
from metagym.rl.algorithms import grpo
from metagym.rl.rollouts import ThreadExecutor, collect
from metagym.types import Group, Message, Sampling, StopReason, Task, Trajectory

PROMPT = "Write a short story about a dragon who is afraid of the dark."
NEW = 64  # tokens of a completion
MICRO = 2  # rows of a micro-batch; with it and KEPT, AdamW's moments included, a step fits into 4 GB
KEPT = 400_000_000  # bytes kept of a forward pass
Repeat = Callable[[], None]


def trainer(directory: str, dtype: str) -> tuple[Any, Any, train_step.TrainStep]:
    """A model, its fresh state and its training step with AdamW."""
    mesh = make_mesh((1, 1, 1), devices=jax.devices()[:1])
    model, _ = load(directory, mesh=mesh)
    graphdef, params = nnx.split(model)
    optimizer = train_step.make_optimizer(1e-6)
    state = train_step.init_state(params, optimizer, jax.random.key(0), mesh)
    policy = make_policy(graphdef, compute_dtype=jnp.dtype(dtype), chunk=512, memory=KEPT, mesh=mesh)
    shardings = train_step.state_shardings(state)
    return model, state, train_step.make_train_step(policy, grpo(), optimizer, mesh, shardings)


def train(directory: str, dtype: str, batch: int, length: int) -> Repeat:
    """One update with `batch` rows of `length` tokens that all count."""
    state, step = trainer(directory, dtype)[1:]  # and the model's weights are gone
    rng = np.random.default_rng(0)

    def micro(rows: int) -> Any:
        shape = (rows, length)
        tokens = rng.integers(0, 49152, (rows, length + 1)).astype(np.int32)
        return dataclasses.replace(
            batching.empty_batch(*shape),
            tokens=tokens[:, :-1].copy(),
            targets=tokens[:, 1:].copy(),
            mask=np.ones(shape, np.float32),
            weight=np.full(shape, 1 / (batch * length), np.float32),
            advantages=rng.normal(size=shape).astype(np.float32),
            behavior_logprobs=np.full(shape, -10.0, np.float32),
            positions=np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
            segments=np.ones(shape, np.int32),
            rollout=np.zeros(shape, np.int32),
        )

    minibatch = [micro(MICRO) for _ in range(batch // MICRO)]

    def once() -> None:
        nonlocal state
        state, _ = step(state, [minibatch])

    return once


def grpo_step(directory: str, dtype: str, batch: int, _: int) -> Repeat:
    """Sessions that sample, advantages, packing, an update, and the new weights in the engine."""
    model, state, step = trainer(directory, dtype)
    renderer = Renderer.from_dir(directory, chat_template="plain")
    renderer.stop_token_ids = (49151,)  # an id that is never sampled: 64 tokens each, as the peers do it
    backend = EmbeddedBackend(model, slots=batch, context=128, dtype=jnp.dtype(dtype))
    task, executor, algorithm = Task("bench", "bench", "train"), ThreadExecutor(batch), grpo()
    length = batch // MICRO * (len(renderer.encode_text(PROMPT)) + NEW - 1)
    rounds = iter(range(1, 10**6))

    def play(seed: int) -> Trajectory:
        session = Session(backend, renderer, sampling=Sampling(max_tokens=NEW), context=128, seed=seed)
        reply = session.chat([Message("user", PROMPT)]).content
        session.close()
        reward = float(len(reply) % 7)
        return Trajectory(task, 0, (), session.traces, reward, reward, StopReason.TERMINATED)

    def once() -> None:
        nonlocal state
        version = next(rounds)
        group = Group(tuple(executor.map(play, [version * batch + i for i in range(batch)])))
        rewards = np.asarray([t.reward for t in group.trajectories])
        advantages = algorithm.advantages(rewards, rewards)
        packed = batching.pack([group], [advantages], algorithm, rows=MICRO, length=length)
        assert packed.metrics["tokens/trained"] == batch * NEW, packed.metrics
        state, _ = step(state, packed.minibatches)
        backend.load(state.params, version)

    return once


def engine(directory: str, dtype: str, batch: int, length: int) -> tuple[EmbeddedBackend, Callable[..., Any]]:
    model, _ = load(directory)
    backend = EmbeddedBackend(model, slots=batch, context=length + NEW + 16, dtype=jnp.dtype(dtype))

    def generate(prompts: np.ndarray, tokens: int) -> None:
        how = [Sampling(max_tokens=tokens, seed=i) for i in range(len(prompts))]
        futures = [backend.submit(p.tolist(), s) for p, s in zip(prompts, how, strict=True)]
        assert all(len(f.result().tokens) == tokens for f in futures)

    return backend, generate


def decode(directory: str, dtype: str, batch: int, length: int) -> Repeat:
    """64 tokens for each of `batch` different prompts of `length` tokens, which are in the cache already."""
    _, generate = engine(directory, dtype, batch, length)
    prompts = np.random.default_rng(0).integers(0, 49152, (batch, length))
    generate(prompts, 1)
    return lambda: generate(prompts, NEW + 1)  # the first needs no forward pass: 64 passes, as the peer


def prefill(directory: str, dtype: str, batch: int, length: int) -> Repeat:
    """`batch` new prompts and their first token."""
    _, generate = engine(directory, dtype, batch, length)
    rng = np.random.default_rng(0)
    return lambda: generate(rng.integers(0, 49152, (batch, length)), 1)


def rollouts(repeats: int) -> dict[str, Any]:
    """Episodes of the main job's small room, untrained: seconds a turn with 1, 8 and 64 at the same time."""
    from metagym.experiments import config as config_lib
    from metagym.experiments import train as job

    config = config_lib.load("minihack_room")
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch, job.parts(config, Path(scratch)) as p:
        for repeat in range(-1, repeats):  # the first compiles
            for workers in (64, 8, 1):
                p.backend.load(p.state.params, p.backend.version + 1)  # so that nothing is cached
                tasks = p.pool.tasks[: max(8, workers)]
                start = time.perf_counter()
                played = collect(
                    p.episode, tasks, 1, seed=repeat + 1, step=0, version=p.backend.version,
                    executor=ThreadExecutor(workers),
                )  # fmt: skip
                seconds = time.perf_counter() - start
                turns = sum(len(t.turns) for g in played.groups for t in g.trajectories)
                if repeat >= 0:
                    found.setdefault(f"{workers} at a time", []).append(turns / seconds)
    return {"rates": found, "unit": "turns/s"}


def render(repeats: int) -> dict[str, Any]:
    """CPU milliseconds a step of MiniHack's own env, and of the game with its text."""
    from metagym.envs.minihack.env import PARTS
    from metagym.envs.minihack.game import Game

    kind, moves = "MiniHack-Room-15x15-v0", ("north", "east", "south", "west")
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for parts in (("compact",), PARTS):
            game = Game(Path(scratch), parts, "sparse", None)
            for repeat in range(repeats):
                for name in ("NLE", "+".join(parts) if len(parts) == 1 else "full"):
                    game.reset(kind, repeat, "go", True)
                    env: Any = game._env
                    start = time.process_time()
                    for i in range(400):
                        _ = env.step(i % 4) if name == "NLE" else game.step(moves[i % 4])
                    found.setdefault(name, []).append((time.process_time() - start) / 400 * 1e3)
            game.close()
    return {"rates": found, "unit": "ms CPU a step"}


def isolation(repeats: int) -> dict[str, Any]:
    """Wall milliseconds a step and a reset, in this process and in a worker."""
    from metagym.envs.minihack import MiniHackEnv

    found: dict[str, list[float]] = {}
    for isolate in (False, True) * repeats:
        env = MiniHackEnv(types="MiniHack-Room-15x15-v0", isolate=isolate, observation="compact")
        where = "worker" if isolate else "in process"
        env.reset(seed=0)
        start = time.perf_counter()
        for i in range(20):
            env.reset(seed=i)
        found.setdefault(f"reset, {where}", []).append((time.perf_counter() - start) / 20 * 1e3)
        start = time.perf_counter()
        for i in range(90):
            env.step(("north", "east", "south", "west")[i % 4])
        found.setdefault(f"step, {where}", []).append((time.perf_counter() - start) / 90 * 1e3)
        env.close()
    return {"rates": found, "unit": "ms"}


def main() -> None:
    directory, task, dtype, repeats = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    whole = {"rollouts": rollouts, "render": render, "isolation": isolation}
    if task in whole:
        print(json.dumps(whole[task](repeats)))
        return
    made = {"grpo": grpo_step, "train": train, "decode": decode, "prefill": prefill}[task]
    once = made(directory, dtype, *map(int, sys.argv[5:7]))
    seconds, cpu = [], []
    for _ in range(repeats + 1):  # the first compiles
        start, start_cpu = time.perf_counter(), time.process_time()
        once()
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(json.dumps({"seconds": seconds[1:], "cpu": cpu[1:], "peak_gb": peak}), flush=True)


if __name__ == "__main__":
    main()

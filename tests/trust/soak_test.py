"""A long run in which everything that can be retried fails now and then, and the process is killed with -9
now and then. It ends with the parameters of the run in which nothing failed, with flat memory, and leaves
nothing behind.

Short here; `make soak` makes 500 steps (SOAK_STEPS). Each life is a process of its own.
"""

import contextlib
import dataclasses
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

STEPS = int(os.environ.get("SOAK_STEPS", "60"))
GROUPS, SIZE, RETRIES, LETTERS = 3, 3, 3, 13
FAULTS = ("error", "nan", "missing", "short", "abort", "hang", "crash", "hung world", "hung harness")
RATE = 0.06  # of attempts that fail
HANG_S = 0.3  # after which a hung call is let go; the deadline of a session's call is a third of it
MB = 1 << 20


# ---------------------------------------------------------------- one life, in a process of its own


def world():
    import gymnasium as gym

    import metagym  # noqa: F401  (registers the worlds)

    return gym.make("metagym/Toy-v0", types=["doors-red"])


class Renderer:
    """A message is one token, the number of its characters; a token is a door's name, or nonsense."""

    end_of_turn = None
    stop_token_ids = ()

    def render(self, messages, *, generation_prompt, prefix="", tools=()):
        return [len(m.content) % LETTERS for m in messages]

    def extend(self, messages, known, *, prefix="", tools=(), history="branch"):
        return None

    def decode(self, ids):
        return f"open the {'red' if ids[0] % 2 else 'blue'} door"


class TableBackend:
    """Samples from a table of logits, whatever the prompt says."""

    def load(self, params, version):
        table = np.asarray(params["table"], np.float64)
        self._weights = table - np.log(np.exp(table).sum()), version  # both at once: episodes ask meanwhile

    def submit(self, prompt_ids, sampling):
        logp, version = self._weights
        token = np.random.default_rng(sampling.seed).choice(LETTERS, p=np.exp(logp))
        done = Future()
        one = (np.array([token], np.int32), np.array([logp[token]], np.float32))
        from metagym.types import Generation

        done.set_result(Generation(*one, np.array([version], np.int32), "length"))
        return done

    def abort(self, future):
        future.cancel()

    def close(self):
        pass


def policy(params, batch):
    import jax
    import jax.numpy as jnp

    logp = jax.nn.log_softmax(params["table"])
    return logp[batch.targets], jnp.broadcast_to(-(jnp.exp(logp) * logp).sum(), batch.targets.shape)


def fault_of(request):
    """What goes wrong in this attempt; the last one goes well. A function of the request: the same in every
    life."""
    rng = random.Random(f"{request.id}/{request.attempt}")
    broken = rng.random() < RATE and request.attempt < RETRIES
    return (rng.choice(FAULTS), rng.randrange(2)) if broken else (None, 0)


def player(backend, faulty):
    """An episode in the Toy world; with `faulty`, what `fault_of` says happens to it."""
    from metagym.episode import Agent, run
    from metagym.errors import HarnessError
    from metagym.proxy.session import Session
    from metagym.testing import FaultyBackend, FaultyEnv

    def play(request):
        fault, at = fault_of(request) if faulty else (None, 0)
        engine, env = backend, world()
        if fault in ("error", "nan", "missing", "short", "abort", "hang"):
            engine = FaultyBackend(backend, fault, at=at)
        if fault == "crash":
            env = FaultyEnv(env, "crash", at=at)
        if fault == "hung world":  # longer than the loop waits; it ends when the world is closed
            env = FaultyEnv(env, "hang", at=at)
            threading.Timer(HANG_S, env.release).start()
        if fault == "hung harness":
            time.sleep(HANG_S)
            raise HarnessError("the harness did not answer")
        session = Session(engine, Renderer(), context=64, seed=request.sampling_seed, timeout_s=HANG_S / 3)
        try:
            played = run(env, session, request.task, seed=request.seed, agent=Agent(history=False))
        finally:
            session.close()
            env.close()
        value = float(sum(int(t.tokens[t.sampled].sum()) for t in session.traces) % 5)
        if played.stop.in_loss:
            played = dataclasses.replace(played, reward=value, outcome=value)
        return dataclasses.replace(played, traces=session.traces)

    return play


class Vitals:
    """A `Tracker` that writes down, after each step, what the process holds."""

    def __init__(self, path):
        self._path = path

    def log(self, step, metrics):
        with open("/proc/self/statm") as file:
            rss = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
        held = {"step": step, "rss": rss, "threads": threading.active_count()}
        held["fds"] = len(os.listdir("/proc/self/fd"))
        with open(self._path, "a") as file:
            file.write(json.dumps(held) + "\n")

    def close(self):
        pass


def children():
    found = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as file:
            found += file.read().split()
    return found


def on_a_slow_disk(write, rng):
    def slow(*args, **kwargs):
        if rng.random() < 0.02:
            time.sleep(rng.expovariate(50))
        return write(*args, **kwargs)

    return slow


def life(workdir, plan):
    """Goes on with the run; is killed as the plan says."""
    import jax
    import jax.numpy as jnp

    from metagym.rl import checkpoint, metrics
    from metagym.rl.algorithms import grpo
    from metagym.rl.loop import train
    from metagym.rl.rollouts import TaskStream
    from metagym.rl.train_step import init_state, make_optimizer

    plan, workdir = json.loads(plan), Path(workdir)
    rng = random.Random(os.urandom(8))
    if plan["faulty"]:
        for owner, name in ((metrics, "_write_line"), (checkpoint, "_sha256"), (checkpoint, "_write_arrays")):
            setattr(owner, name, on_a_slow_disk(getattr(owner, name), rng))
    axes = ("data", "fsdp"), (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), axes[0], axis_types=axes[1])
    backend, optimizer = TableBackend(), make_optimizer(0.02)
    play = player(backend, plan["faulty"])

    def episode(request):
        if request.step == plan["kill_at"]:  # somewhere in this step, or soon after it
            threading.Timer(rng.uniform(0.001, 0.15), os.kill, (os.getpid(), signal.SIGKILL)).start()
        return play(request)

    tasks = world()
    before = threading.active_count()
    train(
        policy=policy,
        state=init_state({"table": jnp.zeros(LETTERS)}, optimizer, jax.random.key(0), mesh),
        algorithm=grpo(entropy_coef=0.05),
        optimizer=optimizer,
        mesh=mesh,
        backend=backend,
        episode=episode,
        tasks=TaskStream(tasks.unwrapped.tasks, seed=0),
        steps=plan["steps"],
        groups_per_step=GROUPS,
        group_size=SIZE,
        rows=4,
        length=16,
        workdir=workdir,
        max_workers=GROUPS * SIZE,
        checkpoint_every=5,
        retries=RETRIES,
        timeout_s=0.75 * HANG_S,
        staleness=plan["staleness"],
        max_distance=1e-4,
        tracker=Vitals(workdir / "vitals.jsonl"),
        resume=True,
    )
    tasks.close()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [t.name for t in threading.enumerate()][before:]
    gc.collect()
    (workdir / "end.json").write_text(json.dumps({"threads": left, "children": children()}))


# ---------------------------------------------------------------- the test


def start(workdir, plan, cache):
    code = "import runpy, sys; runpy.run_path(sys.argv[1])['life'](*sys.argv[2:])"
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    environment["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    command = [sys.executable, "-W", "ignore", "-c", code, __file__, str(workdir), json.dumps(plan)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def soak(workdir, cache, *, faulty, staleness=0, kills=()):
    """All lives of a run; the last one ends by itself."""
    workdir.mkdir()
    plan = {"steps": STEPS, "faulty": faulty, "staleness": staleness}
    for kill_at in kills:
        done = start(workdir, plan | {"kill_at": kill_at}, cache)
        assert done.returncode == -signal.SIGKILL, done.stderr
    (workdir / "vitals.jsonl").unlink(missing_ok=True)
    done = start(workdir, plan | {"kill_at": -1}, cache)
    assert done.returncode == 0, done.stderr
    return workdir


def kills(number):
    """Steps in the first half."""
    return sorted(random.Random(5).sample(range(3, STEPS // 2), number))


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def arrays(workdir):
    """Every leaf of the last checkpoint, read by orbax alone."""
    import warnings

    import orbax.checkpoint as ocp

    path = workdir / "checkpoints" / f"{STEPS:08d}"
    with ocp.PyTreeCheckpointer() as reader, warnings.catch_warnings(action="ignore"):  # of no shardings
        leaves = reader.restore((path / "arrays").absolute())
    return {name: np.asarray(leaf).tobytes() for name, leaf in leaves.items()}


def assert_all_was_trained_once(workdir):
    found = [r for f in (workdir / "episodes").glob("*.jsonl") for r in records(f)]
    good = sorted((r["group"], r["member"]) for r in found if r["stop"] not in ("infra", "invalid_reward"))
    assert good == [(group, member) for group in range(STEPS * GROUPS) for member in range(SIZE)]
    return found


def assert_nothing_grows_or_is_left(workdir):
    end = json.loads((workdir / "end.json").read_text())
    assert end == {"threads": [], "children": []}
    vitals = records(workdir / "vitals.jsonl")
    quarter = len(vitals) // 4
    early, late = vitals[quarter : 2 * quarter], vitals[-quarter:]
    median = {name: [np.median([v[name] for v in part]) for part in (early, late)] for name in early[0]}
    print(f"steps {early[0]['step']} to {late[-1]['step']}: {median}")
    assert median["rss"][1] - median["rss"][0] < 8 * MB
    assert median["fds"][1] <= median["fds"][0]
    # Threads: the stream, its workers and their deadlines, and those that hang for HANG_S.
    assert max(v["threads"] for v in vitals) <= 2 * GROUPS * SIZE + 20


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def calm(cache, tmp_path_factory):
    """The run in which nothing fails."""
    return soak(tmp_path_factory.mktemp("soak") / "calm", cache, faulty=False)


@pytest.mark.timeout(3000)
def test_faults_and_kills_leave_the_parameters_of_the_calm_run(calm, cache, tmp_path):
    workdir = soak(tmp_path / "wild", cache, faulty=True, kills=kills(2 if STEPS < 500 else 8))
    assert arrays(workdir) == arrays(calm)
    found = assert_all_was_trained_once(workdir)
    failed = [r for r in found if r["stop"] in ("infra", "invalid_reward")]
    asked = STEPS * GROUPS * SIZE
    assert RATE / 2 < len(failed) / asked < 2 * RATE
    print(f"{len(failed)} of {len(found)} episodes failed")
    assert_nothing_grows_or_is_left(workdir)
    names = ("outcome/mean", "policy/entropy", "loss", "tokens/trained")
    both = [records(w / "metrics.jsonl") for w in (workdir, calm)]
    assert [[r.get(n) for n in names] for r in both[0]] == [[r.get(n) for n in names] for r in both[1]]


@pytest.mark.timeout(3000)
def test_with_a_staleness_of_1_none_is_lost_or_trained_twice(cache, tmp_path):
    workdir = soak(tmp_path / "wild", cache, faulty=True, staleness=1, kills=kills(1 if STEPS < 500 else 8))
    assert_all_was_trained_once(workdir)
    assert_nothing_grows_or_is_left(workdir)
    steps = records(workdir / "metrics.jsonl")
    assert [r["step"] for r in steps] == list(range(1, STEPS + 1))
    assert max(r["staleness/max"] for r in steps) == 1
    assert "staleness/untrained_tokens" in steps[0]

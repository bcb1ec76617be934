"""What breaks under way, through the whole loop: told apart, counted, refilled; nothing is left behind."""

import contextlib
import dataclasses
import gc
import os
import signal
import threading
import time

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import metagym  # noqa: F401  (registers the worlds)
from metagym.envs.worker import Worker
from metagym.episode import Agent, run
from metagym.errors import EngineError, GraderError, ResourceLimitError, TrainingError
from metagym.proxy.session import Session
from metagym.rl.algorithms import grpo
from metagym.rl.loop import train
from metagym.rl.metrics import read_jsonl
from metagym.rl.rollouts import TaskStream
from metagym.rl.train_step import init_state, make_optimizer
from metagym.testing import FaultyBackend, FaultyEnv, ScriptedBackend
from metagym.types import StopReason

LETTERS = "abcdefghijklm"


class Letters:
    """A renderer of 13 letters: a message is one token, the number of its characters."""

    end_of_turn = None
    stop_token_ids = ()

    def render(self, messages, *, generation_prompt, prefix="", tools=()):
        return [len(m.content) % 13 for m in messages]

    def extend(self, messages, known, *, prefix="", tools=(), history="branch"):
        return None

    def decode(self, ids):
        return "open the red door" if sum(ids) % 2 else "open the " + LETTERS[ids[0]] + " door"


def policy(params, batch):
    """A table: the log-prob of a token does not depend on what came before."""
    logp = jax.nn.log_softmax(params["table"])
    return logp[batch.targets], jnp.broadcast_to(-(jnp.exp(logp) * logp).sum(), batch.targets.shape)


def mesh():
    return jax.sharding.Mesh(
        np.asarray(jax.devices()[:1]).reshape(1, 1),
        ("data", "fsdp"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
    )


def token(prompt):
    return [int(np.random.default_rng(sum(prompt) + len(prompt)).integers(13)), 1]


def loop(
    workdir, *, backend=None, env=lambda env: env, session=None, steps=2, algorithm=None, change=None, **more
):
    """Two steps of two doors, three episodes each, played on a scripted backend. Returns (records, episodes,
    requests)."""
    backend = backend or ScriptedBackend(token)
    made, lock, asked = [], threading.Lock(), []

    def episode(request):
        with lock:
            asked.append(request)
        world = env(gym.make("metagym/Toy-v0", types=["doors-red"]))
        with lock:
            made.append(world)
        chat = Session(backend, Letters(), context=64, seed=request.sampling_seed, **(session or {}))
        played = run(world, chat, request.task, seed=request.seed, agent=Agent(history=False))
        chat.close()
        if played.stop.in_loss:
            value = float(request.member)
            played = dataclasses.replace(played, reward=value, outcome=value)
        return dataclasses.replace(played, traces=chat.traces)

    optimizer, on = make_optimizer(0.1), mesh()
    state = init_state({"table": jnp.zeros(13)}, optimizer, jax.random.key(0), on)
    tasks = gym.make("metagym/Toy-v0", types=["doors-red"])
    try:
        train(
            policy=policy,
            state=state,
            algorithm=algorithm or grpo(),
            optimizer=optimizer,
            mesh=on,
            backend=backend,
            episode=(lambda r: change(r, episode)) if change else episode,
            tasks=TaskStream(tasks.unwrapped.tasks, seed=0),
            steps=steps,
            groups_per_step=2,
            group_size=3,
            rows=4,
            length=16,
            workdir=workdir,
            max_workers=3,
            **more,
        )
    finally:
        for world in (*made, tasks):
            world.close()
        backend.close()
    records = [r for r in read_jsonl(workdir / "metrics.jsonl") if "reward/mean" in r]
    episodes = [r for f in sorted((workdir / "episodes").glob("*.jsonl")) for r in read_jsonl(f)]
    return records, episodes, asked


def survivors():
    """Threads, open files and child processes of this process."""
    gc.collect()
    children = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as file:
            children |= set(file.read().split())
    files = sorted(os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd"))
    return threading.active_count(), [f for f in files if "/fd/" not in f and f[-3:] != "/fd"], children


@pytest.fixture(autouse=True)
def nothing_left_behind(warm):
    before = survivors()
    yield
    deadline = time.monotonic() + 10
    while (now := survivors()) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert now == before


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A run without a fault. What the libraries open once and keep (thread pools) is open then."""
    directory = tmp_path_factory.mktemp("clean")
    records, episodes, _ = loop(directory)
    with contextlib.suppress(TrainingError):
        loop(tmp_path_factory.mktemp("worker"), env=lambda env: InAProcess(env, None))
    return records, episodes


def assert_refilled(warm, records, episodes, failed, stop="infra"):
    """Everything is as in the run without the fault, and the failed episodes are counted beside it."""
    clean, clean_episodes = warm
    assert sum(r["episodes/failed"] for r in records) == failed
    assert sum(r[f"stop/{stop}"] for r in records) == failed
    assert all(r["episodes/missing"] == 0 for r in records)
    counts = (
        "episodes/failed",
        "episodes/failed_share",
        "episodes/wasted",
        "episodes/played",
        f"stop/{stop}",
    )
    for a, b in zip(records, clean, strict=True):
        for name in b:
            if name not in counts and not name.startswith("time/"):
                assert a[name] == b[name], name
    good = {e["id"].partition(".")[0]: e for e in episodes if e["stop"] not in ("infra", "invalid_reward")}
    assert len(good) == len(clean_episodes) == 12
    assert sum(e["stop"] == stop for e in episodes) == failed
    assert all(e["error"] for e in episodes if e["stop"] == stop)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("error", "EngineError: the engine failed, as asked"),
        ("nan", "EngineError: the engine's answer is unusable: ValueError: Generation: log-prob nan"),
        ("missing", "EngineError: the engine's answer is unusable: ValueError: Generation: lengths differ"),
        ("short", "EngineError: the engine's answer is unusable: ValueError: Generation: lengths differ"),
        ("abort", "EngineError: the engine aborted the generation"),
        ("hang", "EngineError: the engine did not answer within 0.3 s"),
    ],
)
def test_an_engine_that_fails_in_the_middle(tmp_path, warm, fault, says):
    backend = FaultyBackend(ScriptedBackend(token), fault, at=[0, 5, 20])
    records, episodes, _ = loop(tmp_path, backend=backend, session={"timeout_s": 0.3})
    assert_refilled(warm, records, episodes, failed=3)
    assert sum(says in (e["error"] or "") for e in episodes) == 3


def test_an_engine_that_is_dead_ends_the_run_with_its_reason(tmp_path):
    with pytest.raises(TrainingError, match=r"none of 6 episodes was usable, each tried 3 times.*as asked"):
        loop(tmp_path, backend=FaultyBackend(ScriptedBackend(token), "error"))


def test_one_that_dies_later_loses_no_finished_step(tmp_path):
    backend = FaultyBackend(ScriptedBackend(token), "error", at=range(40, 10**6))
    with pytest.raises(TrainingError):
        loop(tmp_path, backend=backend, steps=50)
    done = [r["step"] for r in read_jsonl(tmp_path / "metrics.jsonl")]
    assert done
    assert (tmp_path / "checkpoints" / f"{done[-1]:08d}" / "manifest.json").exists()


class Failing:
    """Fails the first attempts of every group's second member."""

    def __init__(self, wrap):
        self.wrap, self.now = wrap, threading.local()

    def change(self, request, episode):
        self.now.hit = request.member == 1 and request.attempt == 0
        return episode(request)

    def env(self, env):
        return self.wrap(env) if self.now.hit else env


@pytest.mark.parametrize("at", [None, 0, 1])
def test_a_world_that_crashes(tmp_path, warm, at):
    failing = Failing(lambda env: FaultyEnv(env, "crash", at=at))
    records, episodes, _ = loop(tmp_path, env=failing.env, change=failing.change)
    assert_refilled(warm, records, episodes, failed=4)
    assert all("the world failed, as asked" in e["error"] for e in episodes if e["stop"] == "infra")


def test_a_world_that_hangs_without_a_deadline_of_its_own(tmp_path, warm):
    hanging = []

    def wrap(env):
        hanging.append(FaultyEnv(env, "hang", at=1))
        return hanging[-1]

    failing = Failing(wrap)
    records, episodes, _ = loop(tmp_path, env=failing.env, change=failing.change, timeout_s=0.5)
    assert_refilled(warm, records, episodes, failed=4)
    assert len(hanging) == 4  # what hung was let go by closing its world; its thread ended then
    assert sum("hangs: it did not end within 0.5 s" in (e["error"] or "") for e in episodes) == 4


class InAProcess(gym.Wrapper):
    """A world with a process of its own behind it, which a signal hits in the second step."""

    def __init__(self, env, signum):
        super().__init__(env)
        self._worker = Worker("types:SimpleNamespace", {}, label="metagym-test", timeout_s=0.5)
        self._signum, self._steps = signum, 0

    def reset(self, **kwargs):
        self._steps = 0
        self._worker._timeout_s = 60
        self._worker.call("__repr__")
        self._worker._timeout_s = 0.5
        return super().reset(**kwargs)

    def step(self, action):
        self._steps += 1
        if self._steps == 2 and self._signum:
            os.kill(self._worker.pid, self._signum)
        self._worker.call("__repr__")
        return super().step(action)

    def close(self):
        self._worker.close()
        super().close()


@pytest.mark.parametrize(
    ("signum", "says"),
    [
        (signal.SIGSEGV, "the world's process died"),
        (signal.SIGSTOP, "did not answer __repr__() within 0.5 s"),
    ],
)
def test_a_world_in_a_process_that_dies_or_hangs(tmp_path, warm, signum, says):
    failing = Failing(lambda env: InAProcess(env, signum))
    records, episodes, _ = loop(tmp_path, env=failing.env, change=failing.change)
    assert_refilled(warm, records, episodes, failed=4)
    assert sum(says in (e["error"] or "") for e in episodes) == 4


def test_a_grader_that_cannot_judge(tmp_path, warm):
    failing = Failing(lambda env: FaultyEnv(env, "crash", error=GraderError("no verdict")))
    records, episodes, _ = loop(tmp_path, env=failing.env, change=failing.change)
    assert_refilled(warm, records, episodes, failed=4, stop="invalid_reward")


def test_the_agents_own_end_stays_in_the_loss(tmp_path):
    failing = Failing(lambda env: FaultyEnv(env, "crash", error=ResourceLimitError("out of memory")))
    records, _, asked = loop(tmp_path, env=failing.env, change=failing.change)
    assert sum(r["stop/resource_limit"] for r in records) == 4
    assert all(r["episodes/failed"] == 0 for r in records)
    assert all(request.attempt == 0 for request in asked)


def test_what_fails_for_ever_leaves_a_smaller_group(tmp_path):
    def change(request, episode):
        if request.member == 1:
            raise EngineError("gone")
        return episode(request)

    records, episodes, _ = loop(tmp_path, change=change, retries=1)
    for r in records:
        assert (r["episodes/missing"], r["episodes/failed"], r["episodes/played"]) == (2, 4, 8)
        assert r["reward/mean"] == 1.0  # of members 0 and 2: the missing one counts nowhere
        assert r["tokens/trained"] == r["tokens/sampled"]
    assert sum(e["stop"] == StopReason.INFRA for e in episodes) == 8


def test_little_is_wasted_when_episodes_fail_at_random(tmp_path):
    """5 % of episodes fail: each is refilled on its own, so about 5 % is played for nothing, not whole
    groups."""

    def change(request, episode):
        if (
            np.random.default_rng([request.step, request.group, request.member, request.attempt]).random()
            < 0.05
        ):
            raise EngineError("gone")
        return episode(request)

    records, _, asked = loop(tmp_path, change=change, steps=20)
    failed = sum(r["episodes/failed"] for r in records)
    assert failed > 2
    assert failed / len(asked) < 0.10
    assert all(r["episodes/missing"] == 0 for r in records)


def test_an_infinite_advantage_is_skipped_and_the_run_goes_on(tmp_path):
    calls = []

    def advantages(rewards, outcomes):
        calls.append(rewards)
        return np.full_like(rewards, np.inf) if len(calls) in (1, 2) else rewards - rewards.mean()

    algorithm = dataclasses.replace(grpo(), advantages=advantages)
    records, _, _ = loop(tmp_path, steps=3, algorithm=algorithm, checkpoint_every=1)
    assert [r["update/skipped"] for r in records] == [1, 0, 0]
    assert [r["update/applied"] for r in records] == [0, 1, 1]
    assert [r["version"] for r in records] == [0, 1, 2]
    assert "loss" in records[0]["nonfinite"]
    assert all(np.isfinite(r["loss"]) for r in records[1:])


def test_three_in_a_row_halt_it_and_the_good_checkpoint_stays(tmp_path):
    calls = []

    def advantages(rewards, outcomes):
        calls.append(rewards)
        return np.full_like(rewards, np.inf) if len(calls) > 4 else rewards - rewards.mean()

    algorithm = dataclasses.replace(grpo(), advantages=advantages)
    with pytest.raises(TrainingError, match="no finite update in 3 steps in a row"):
        loop(tmp_path, steps=9, algorithm=algorithm, checkpoint_every=1, keep=9)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["00000001", "00000002", "00000003", "00000004"]

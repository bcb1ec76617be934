"""GRPO with every token from SGLang: through a kill of the server in the middle of it, and over phases."""

import json
import os
import signal
import threading
import time

import gymnasium
import pytest

from metagym.experiments import config as config_lib
from metagym.experiments import train as train_lib
from metagym.proxy.backends.sglang import SGLangBackend
from metagym.proxy.backends.sglang_server import SGLangProcess
from metagym.rl.metrics import read_jsonl
from metagym.text_env import NumberedTasks, TextEnv

STEPS = 6


class HighBytes(TextEnv):
    """Three turns; each is worth a third if the reply's first letter is in the upper half of the alphabet."""

    def __init__(self, *, split="train", types=None, tasks=None, max_turns=3, render_mode=None):
        world = NumberedTasks(["high"], {"train": range(1000), "test": range(1000, 1100)})
        super().__init__(
            world, split=split, types=types, tasks=tasks, max_turns=max_turns, render_mode=render_mode
        )

    def _begin(self, task, seed, rng, options):
        self.turn = self.won = 0
        return f"Letter {rng.integers(100)}?", {"action": None}

    def _act(self, action):
        self.turn += 1
        self.won += bool(action) and ord(action[0]) > 90
        done = self.turn == 3
        reward = (self.won / 3) if done else 0.0
        return f"Letter {self.turn}?", reward, done, False, {"action": action, "success": self.won == 3}


@pytest.fixture(scope="module", autouse=True)
def world():
    gymnasium.register("test/HighBytes-v0", entry_point=HighBytes)
    yield
    del gymnasium.registry["test/HighBytes-v0"]


def config_of(folder, python, flags):
    c = config_lib.base()
    c.steps = STEPS
    c.model.name, c.model.chat_template = str(folder), "plain"
    c.model.chunk = 64
    c.world.id = "test/HighBytes-v0"
    c.sampling.max_tokens, c.sampling.context = 6, 128
    c.groups_per_step, c.group_size, c.max_workers = 4, 8, 32
    c.mesh.fsdp = 1
    c.optimizer.learning_rate = 1e-3
    c.batch.rows, c.batch.length = 8, 256
    c.record_traces = True
    c.checkpoint_every = 1
    c.engine.kind = "sglang"
    c.sglang.python, c.sglang.args, c.sglang.start_s = python, flags, 600.0
    c.max_distance = 1e-4
    config_lib.check(c)
    return c


def test_grpo_through_a_kill(qwen2, python, flags, server_of, tmp_path, monkeypatch):
    """kill -9 of the server while step 3 is played: those episodes are infra faults and played again, the
    server comes back with the weights of step 2, and training goes on to the end."""
    killed = threading.Event()
    submit, made = SGLangBackend.submit, []

    def watched(self, ids, sampling):
        made.append(self)
        future = submit(self, ids, sampling)
        if self.version >= 2 and not killed.is_set():
            killed.set()

            def kill():
                time.sleep(0.3)  # in the middle of generations
                os.kill(server_of(self._remotes[0].process.pid), signal.SIGKILL)

            threading.Thread(target=kill).start()
        return future

    monkeypatch.setattr(SGLangBackend, "submit", watched)
    workdir = tmp_path / "run"
    start = time.monotonic()
    train_lib.train(config_of(qwen2[1], python, flags), workdir)
    took = time.monotonic() - start
    assert killed.is_set()

    steps = read_jsonl(workdir / "metrics.jsonl")
    steps = [s for s in steps if "update/applied" in s]
    assert [s["step"] for s in steps] == list(range(1, STEPS + 1))
    assert all(s["update/applied"] for s in steps)  # weights changed in each
    assert [s["version"] for s in steps] == list(range(1, STEPS + 1))
    faults = {s["step"]: s["stop/infra"] for s in steps if s["stop/infra"]}
    assert set(faults) == {3}, faults
    assert all(s["episodes/missing"] == 0 for s in steps)  # they were played again
    assert any(s["groups/kept"] for s in steps)
    # What SGLang says and what the trainer computes, tokens of the step's own weights.
    worst, pearson = max(s["sampler/max"] for s in steps), min(s["sampler/pearson"] for s in steps)
    told = f"{took:.0f} s; infra faults {faults}; sampler distance at most {worst:.1e}, Pearson {pearson:.8f}"
    print(told)
    assert worst < 1e-4
    assert pearson > 0.9999

    versions, outcomes, sampled = {}, {}, 0
    for path in sorted((workdir / "episodes").glob("0*.jsonl")):
        for line in path.read_text().splitlines():
            episode = json.loads(line)
            if episode["stop"] == "infra":
                assert "lost" in episode["error"], episode["error"]
                continue
            outcomes.setdefault(episode["group"], set()).add(round(episode["outcome"], 6))
            for trace in episode["traces"]:
                versions.setdefault(int(path.stem), set()).update(trace["versions"])
                sampled += sum(end - start for start, end in trace["sampled"])
    assert any(len(found) > 1 for found in outcomes.values())
    assert versions == {
        step: {step - 1} for step in range(1, STEPS + 1)
    }  # on policy, the kill notwithstanding
    (backend,) = set(made)
    stats = backend.stats()
    assert stats["restarts"] == 1
    assert stats["sampled_tokens"] >= sampled > 0  # all of them are SGLang's
    assert stats["loads"] == STEPS + 1


def check_phases(workdir, capsys):
    """Three steps of two phases: each is on policy, and says what its own weights said."""
    assert "phase second" in capsys.readouterr().out
    steps = [s for s in read_jsonl(workdir / "metrics.jsonl") if "update/applied" in s]
    assert [s["step"] for s in steps] == [1, 2, 3]
    assert all(s["update/applied"] for s in steps)
    assert all(s["sampler/max"] < 1e-4 and s["sampler/pearson"] > 0.9999 for s in steps)
    told = {f"step {s['step']}": f"{s['sampler/max']:.1e}" for s in steps}
    print(f"sampler distance {told}, load_s {[round(s['time/load_s'], 2) for s in steps]}")
    for step in (1, 2, 3):
        lines = (workdir / "episodes" / f"{step:06d}.jsonl").read_text().splitlines()
        episodes = [json.loads(line) for line in lines]
        assert not [e for e in episodes if e["stop"] == "infra"]
        assert {tuple(t["versions"]) for e in episodes for t in e["traces"]} == {(step - 1,)}
        assert {len(e["turns"]) for e in episodes} == {3 if step == 1 else 2}  # of the phase


def phased(folder, python, flags):
    c = config_of(folder, python, flags)
    c.steps, c.max_workers = 3, 8
    c.groups_per_step, c.group_size = 2, 4
    c.phases.second = config_lib.phase(after=1, agent__max_turns=2)
    config_lib.check(c)
    return c


def test_phases_start_servers_anew(qwen2, python, flags, tmp_path, monkeypatch, capsys):
    groups, start = [], SGLangProcess.start

    def started(self, *args):
        start(self, *args)
        groups.append(self.pid)

    monkeypatch.setattr(SGLangProcess, "start", started)
    train_lib.train(phased(qwen2[1], python, flags), tmp_path / "run")
    assert len(groups) == 2
    for group in groups:  # nothing of them is left
        with pytest.raises(ProcessLookupError):
            os.killpg(group, 0)
    check_phases(tmp_path / "run", capsys)


@pytest.mark.parametrize("push", ["disk", "tensor"])
def test_phases_on_a_running_server(qwen2, serve, push, tmp_path, capsys):
    """By its address; its weights come in a folder that both can read, or over HTTP."""
    c = phased(qwen2[1], "", ())
    c.sglang.push, c.sglang.weights_dir = push, str(tmp_path / "weights") if push == "disk" else ""
    process = serve(qwen2[1])
    try:
        c.sglang.urls = (process.url,)
        train_lib.train(c, tmp_path / "run")
    finally:
        process.stop()
    check_phases(tmp_path / "run", capsys)
    assert push == "tensor" or not list((tmp_path / "weights").iterdir())

"""A run that is killed with -9 twenty times, at random points of rollouts, updates and saves, stopped with
SIGTERM three times, and resumed, ends as the run that nobody stopped: the real engine and model, in processes
of their own.

Run as `serve`, this file is a process that has imported everything and forks one life of the run for each
plan that it reads, so that a life costs no imports.
"""

import dataclasses
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

STEPS = 22
SEED = 3


def config(model):
    from metagym.experiments import config as config_lib

    c = config_lib.load("debug")
    c.model.name = model
    c.world.kwargs.rounds = 2
    c.engine.deterministic, c.engine.page_size = True, 4
    c.sampling.context = c.batch.length = 128
    c.batch.minibatches = 2
    c.optimizer.learning_rate = 1e-2
    c.record_traces = True
    return c


# ---------------------------------------------------------------- one life, in a process of its own


def kill(plan):
    """Now, or after `delay` seconds in which the work goes on."""
    Path(plan["workdir"], "killed_at").write_text(str(time.monotonic()))
    number = signal.Signals(plan["signal"])
    if plan["delay"]:
        threading.Timer(plan["delay"], os.kill, (os.getpid(), number)).start()
    else:
        os.kill(os.getpid(), number)
        time.sleep(5 if number == signal.SIGKILL else 0)


def arm(plan):
    """Makes the `nth` call of the plan's function, in its `step`-th step of this life, the last one."""
    import shutil

    from metagym.proxy.backends.embedded import EmbeddedBackend
    from metagym.rl import checkpoint, loop, metrics

    seen = {"step": 0, "calls": 0}

    def due():
        if seen["step"] != plan["step"]:
            return False
        seen["calls"] += 1
        return seen["calls"] == plan["nth"]

    def around(function, before=None):
        def call(*args, **kwargs):
            hit = due()
            if hit and plan["when"] == "before":
                (before or (lambda *_: None))(*args)
                kill(plan)
            result = function(*args, **kwargs)
            if hit and plan["when"] == "after":
                kill(plan)
            return result

        return call

    def patch(owner, name, before=None):
        setattr(owner, name, around(getattr(owner, name), before))

    take, make = loop.RolloutStream.take, loop.make_train_step

    def counted(*args, **kwargs):
        seen["step"] += 1
        return take(*args, **kwargs)

    def wrapped(*args, **kwargs):
        made = make(*args, **kwargs)
        if plan["what"] in ("gradient", "apply"):
            made = dataclasses.replace(made, **{plan["what"]: around(getattr(made, plan["what"]))})
        return made

    def half(file, record):
        file.write(json.dumps(record, default=str)[: plan["nth"] + 5])
        file.flush()

    loop.RolloutStream.take, loop.make_train_step = counted, wrapped
    match plan["what"]:
        case "dispatch":
            patch(EmbeddedBackend, "_dispatch")
        case "load":
            patch(EmbeddedBackend, "load")
        case "line":
            patch(metrics, "_write_line", half)
        case "arrays":
            patch(checkpoint, "_write_arrays")
        case "sha256":
            patch(checkpoint, "_sha256")
        case "sync":  # the new checkpoint is in place, the old ones are still there
            patch(checkpoint, "_sync_directory")
        case "rename":
            patch(Path, "rename")
        case "rmtree":
            patch(shutil, "rmtree", lambda path, *_: next((p.unlink() for p in path.rglob("d/*")), None))
        case "nothing":
            pass


def live(workdir, plan):
    """One life of the run. Exits with 0 at its end, 128 + the number of a signal that was obeyed."""
    import jax

    from metagym.experiments import train as train_lib
    from metagym.rl import loop
    from metagym.rl.rollouts import TaskStream

    jax.config.update("jax_compilation_cache_dir", plan["cache"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    arm(plan)
    c = config(plan["model"])
    with train_lib.parts(c, Path(workdir)) as p:

        def episode(request):
            reward = float(request.sampling_seed % 3)
            return dataclasses.replace(p.episode(request), reward=reward, outcome=reward)

        try:
            loop.train(
                policy=p.policy,
                state=p.state,
                algorithm=p.algorithm,
                optimizer=p.optimizer,
                mesh=p.mesh,
                backend=p.backend,
                episode=episode,
                tasks=TaskStream(p.pool.tasks, seed=0),
                steps=STEPS,
                groups_per_step=2,
                group_size=2,
                rows=2,
                length=128,
                minibatches=2,
                max_workers=4,
                workdir=Path(workdir),
                checkpoint_every=2,
                record_traces=True,
                resume=True,
            )
        except loop.Interrupted as stopped:
            return 128 + stopped.signum
    return 0


def serve():
    """Reads plans from stdin, one a line, and answers each with [wait status, CPU seconds]."""
    for name in ("envs.toy", "experiments.train", "proxy.backends.embedded", "rl.loop"):
        importlib.import_module(f"metagym.{name}")
    for line in sys.stdin:
        plan = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                code = live(plan["workdir"], plan)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status, usage = os.wait4(pid, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime]), flush=True)


# ---------------------------------------------------------------- the test


def plans():
    """Eight points in rollouts, six in updates, six in saves: (what, when, step of the life, which call)."""
    rng = random.Random(SEED)
    when = ("before", "after")
    points = [("dispatch", when[i % 2], rng.choice((1, 2, 3)), rng.randint(1, 40)) for i in range(6)]
    points += [("line", "before", rng.choice((1, 2, 3)), n) for n in (2, 4)]  # in the middle of an episode's
    points += [("gradient", rng.choice(when), rng.choice((1, 2, 3)), n) for n in (1, 3)]
    points += [("apply", "before", 2, 2), ("apply", "after", 3, 1), ("load", "after", 2, 1)]
    points += [("line", "before", 3, 5)]  # in the middle of the metrics'
    points += [
        ("arrays", "before", 2, 1),
        ("arrays", "after", 2, 1),
        ("sha256", "after", 2, rng.randint(1, 6)),
    ]
    points += [("rename", "before", 2, 1), ("sync", "before", 2, 1)]
    rng.shuffle(points)
    points += [("rmtree", "before", 2, 2)]  # an old checkpoint is half gone; by now there are old ones
    made = []
    for what, moment, step, nth in points:
        late = what in ("arrays", "gradient") and moment == "before"  # in the middle of the call
        delay = rng.uniform(0.001, 0.02) if late else 0.0
        made.append({"what": what, "when": moment, "step": step, "nth": nth, "delay": delay, "signal": 9})
    # SIGTERM between two updates, in a save, and last, as it leaves an odd step behind, in a rollout.
    for at, what, step, nth in ((7, "apply", 2, 1), (15, "arrays", 2, 1), (22, "dispatch", 2, 3)):
        made.insert(at, {"what": what, "when": "after", "step": step, "nth": nth, "delay": 0.0, "signal": 15})
    return made


NOTHING = {"what": "nothing", "when": "before", "step": 0, "nth": 0, "delay": 0.0, "signal": 9}


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    """lives(workdir, plan) -> (exit code, CPU seconds) of one life."""
    code = "import runpy, sys; runpy.run_path(sys.argv[1])['serve']()"
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, __file__],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    from metagym.experiments.build import random_model

    cache, model = (
        tmp_path_factory.mktemp("programs"),
        random_model(tmp_path_factory.mktemp("model") / "m", 0),
    )
    assert server.stdin is not None
    assert server.stdout is not None

    def one(workdir, plan):
        more = {"workdir": str(workdir), "cache": str(cache), "model": str(model)}
        server.stdin.write(json.dumps(plan | more) + "\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())

    yield one
    server.stdin.close()
    server.stdout.close()
    assert server.wait(60) == 0


@pytest.fixture(scope="module")
def unbroken(lives, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("unbroken")
    assert lives(workdir, NOTHING)[0] == 0
    return workdir


def arrays(workdir):
    """Every leaf of the last checkpoint, read by orbax alone, and the host's side."""
    import orbax.checkpoint as ocp

    path = workdir / "checkpoints" / f"{STEPS:08d}"
    manifest = json.loads((path / "manifest.json").read_text())
    with ocp.PyTreeCheckpointer() as reader, warnings.catch_warnings(action="ignore"):  # of no shardings
        leaves = reader.restore((path / "arrays").absolute())
    found = {d["path"]: np.asarray(leaves[f"{i:05d}"]) for i, d in enumerate(manifest["leaves"])}
    return found, json.loads((path / "host.json").read_text())


def episodes(workdir):
    """Every episode by its id, whatever order they ended in, without what a clock said."""
    from metagym.rl.metrics import read_jsonl

    found = {}
    for file in sorted((workdir / "episodes").glob("*.jsonl")):
        for record in read_jsonl(file):
            assert record["id"] not in found
            metrics = {k: v for k, v in record["metrics"].items() if not k.endswith("seconds")}
            found[record["id"]] = record | {"metrics": metrics}
    return found


def assert_same(workdir, unbroken):
    from metagym.rl.metrics import equal_records, read_jsonl

    (a, host), (b, expected) = arrays(workdir), arrays(unbroken)
    assert host == expected
    assert a.keys() == b.keys()
    assert len([name for name in a if "opt_state" in name]) > 10
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), name
    records = read_jsonl(unbroken / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert equal_records(read_jsonl(workdir / "metrics.jsonl"), records)
    assert episodes(workdir) == episodes(unbroken)
    assert len(episodes(unbroken)) == STEPS * 4


@pytest.mark.timeout(1200)
def test_killed_twenty_times_it_is_the_run_that_nobody_stopped(lives, unbroken, tmp_path):
    asked = plans()
    assert [p["signal"] for p in asked].count(signal.SIGKILL) == 20
    for plan in asked:
        code, seconds = lives(tmp_path, plan)
        print(f"{plan}: {seconds:.1f} CPU seconds, step {newest(tmp_path)} saved")
        if plan["signal"] == signal.SIGKILL:
            assert code == -signal.SIGKILL, (plan, code)
            continue
        # The other signal: what was finished is saved, at once.
        assert code == 128 + signal.SIGTERM, (plan, code)
        assert time.monotonic() - float((tmp_path / "killed_at").read_text()) < 30
        assert newest(tmp_path) == finished(tmp_path) > 0
    assert lives(tmp_path, NOTHING)[0] == 0
    assert_same(tmp_path, unbroken)


def newest(workdir):
    whole = [p for p in (workdir / "checkpoints").glob("????????") if (p / "manifest.json").exists()]
    return max((int(p.name) for p in whole), default=0)


def finished(workdir):
    from metagym.rl.metrics import read_jsonl

    return read_jsonl(workdir / "metrics.jsonl")[-1]["step"]

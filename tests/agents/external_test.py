"""A foreign program in a sandbox: it reaches its session, is stopped, leaves nothing, and is not trusted."""

import gymnasium as gym
import pytest

from metagym.agents import external
from metagym.agents.external import Harness, Start, install, mounts, play, run, words
from metagym.agents.harnesses import HARNESSES, harness
from metagym.envs.swe.bubblewrap import BubblewrapFactory
from metagym.errors import HarnessError, InputError, UnknownNameError
from metagym.experiments.build import random_model
from metagym.proxy.render import Renderer
from metagym.proxy.server import Proxy
from metagym.testing import FaultyBackend, ScriptedBackend
from metagym.types import StopReason

PROGRAM = """import json, os, subprocess, sys, time, urllib.error, urllib.request
def ask(text):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    request = urllib.request.Request(os.environ["URL"] + "/v1/chat/completions", body)
    request.add_header("authorization", "Bearer " + os.environ["KEY"])
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
if sys.argv[1] == "silent":
    sys.exit(3)
print(ask("one"))
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 11)
subprocess.Popen(["sleep", "1000"], start_new_session=True)
open(os.path.expanduser("~/record.txt"), "w").write("my record")
if sys.argv[1] == "loop":
    while True:
        try:
            ask("more")
        except urllib.error.HTTPError as error:
            print(error.code, flush=True)
            time.sleep(0.05)
if sys.argv[1] == "hang":
    time.sleep(1000)
sys.exit(7)
"""


def fake(how):
    return Harness(
        f"fake-{how}",
        ("fake==1",),
        "npm",
        lambda start: words("python3", f"{start.home}/program.py", how),
        lambda start: {"URL": start.url, "KEY": start.key},
        lambda start: {"program.py": PROGRAM},
        log="record.txt",
    )


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return Renderer.from_dir(random_model(tmp_path_factory.mktemp("model"), 0))


@pytest.fixture(scope="module")
def factory():
    made = BubblewrapFactory()
    yield made
    made.close()


@pytest.fixture
def proxy(renderer, tmp_path):
    backend = ScriptedBackend(lambda prompt: [*renderer.encode_text("yes"), renderer.end_of_turn])
    tmp_path.chmod(0o755)
    made = Proxy(backend, renderer, context=10_000, socket=tmp_path / "proxy.sock").start()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("METAGYM_HARNESSES", str(tmp_path / "harnesses"))
    for how in ("once", "hang", "loop", "silent", "killed", "broken"):
        fake(how).folder.mkdir(parents=True)
        (fake(how).folder / ".installed").touch()


def left(sandbox):
    return sandbox.exec("ps -eo args= | grep -c '[s]leep 1000'", 10).output.strip()


def test_a_program_works_and_nothing_is_left(factory, proxy):
    chosen, opened = fake("once"), proxy.open()
    sandbox = factory.start("host", mounts(chosen, opened.socket))
    outcome = run(chosen, sandbox, opened, "do it", cwd="/tmp", timeout_s=30)
    assert (outcome.exit_code, outcome.stopped) == (7, ""), "told, not judged"
    assert outcome.output == "yes\n"
    assert outcome.record == "my record"
    assert left(sandbox) == "0"
    assert len(opened.session.traces) == 1
    sandbox.close()


def test_time_ends_it(factory, proxy):
    chosen, opened = fake("hang"), proxy.open()
    sandbox = factory.start("host", mounts(chosen, opened.socket))
    outcome = run(chosen, sandbox, opened, "do it", cwd="/tmp", timeout_s=1.5)
    assert (outcome.exit_code, outcome.stopped) == (None, "time")
    assert outcome.seconds < 20
    assert left(sandbox) == "0"
    sandbox.close()


def test_a_budget_ends_it(factory, proxy):
    chosen, opened = fake("loop"), proxy.open(max_turns=3)
    sandbox = factory.start("host", mounts(chosen, opened.socket))
    outcome = run(chosen, sandbox, opened, "do it", cwd="/tmp", timeout_s=60, grace_s=0.3)
    assert (outcome.exit_code, outcome.stopped) == (None, "budget")
    assert "403" in outcome.output
    assert opened.session.metrics["calls"] == 3
    assert left(sandbox) == "0"
    sandbox.close()


def test_an_episode_of_a_world_with_a_sandbox(factory, proxy):
    for how, stop in (("once", StopReason.SUBMITTED), ("loop", StopReason.TURN_LIMIT)):
        chosen, opened = fake(how), proxy.open(max_turns=2)
        env = gym.make("metagym:metagym/SWE-v0", sandbox=factory, mounts=mounts(chosen, opened.socket))
        task = env.unwrapped.tasks[0]  # type: ignore[attr-defined]
        played = play(chosen, env, opened, task, seed=1, timeout_s=60, grace_s=0.3)
        assert (played.stop, played.outcome, played.error) == (stop, 0.0, None)
        assert len(played.traces) == len(opened.session.traces) > 0
        assert played.turns[0].reply == "yes"
        assert len(played.turns) == played.metrics["calls"]
        assert played.metrics["grading_seconds"] > 0
        assert "yes" in (played.log or "")
        assert (played.log or "").endswith("my record")
        env.close()


def test_a_sandbox_that_is_gone_is_infra(factory, proxy, monkeypatch):
    def start(*args, **kwargs):
        sandbox = BubblewrapFactory.start(factory, *args, **kwargs)
        sandbox.write = lambda *a: sandbox.close()  # type: ignore[method-assign]
        return sandbox

    monkeypatch.setattr(factory, "start", start)
    chosen, opened = fake("once"), proxy.open()
    env = gym.make("metagym:metagym/SWE-v0", sandbox=factory, mounts=mounts(chosen, opened.socket))
    task = env.unwrapped.tasks[0]  # type: ignore[attr-defined]
    played = play(chosen, env, opened, task, seed=1, timeout_s=60)
    assert played.stop == StopReason.INFRA
    assert played.error
    env.close()


@pytest.mark.parametrize("how", ["silent", "killed", "broken"])
def test_a_crash_is_infra(how, factory, proxy, renderer, tmp_path):
    """A harness that ends without a call or by a signal, an engine that fails: not the agent's doing."""
    chosen = fake(how)
    if how == "broken":
        proxy = Proxy(FaultyBackend(ScriptedBackend([]), "error", at=0), renderer, context=10_000,
                      socket=tmp_path / "other.sock").start()  # fmt: skip
    opened = proxy.open()
    env = gym.make("metagym:metagym/SWE-v0", sandbox=factory, mounts=mounts(chosen, opened.socket))
    task = env.unwrapped.tasks[0]  # type: ignore[attr-defined]
    played = play(chosen, env, opened, task, seed=1, timeout_s=60)
    told = {"silent": "exit code 3 and no answered call", "killed": "signal 11", "broken": "EngineError"}
    assert played.stop == StopReason.INFRA
    assert told[how] in (played.error or "")
    env.close()
    if how == "broken":
        proxy.close()


def test_what_is_missing_is_told(proxy, monkeypatch, renderer):
    with pytest.raises(InputError, match="--install-harness codex"):
        mounts(HARNESSES["codex"], proxy.socket)
    with pytest.raises(UnknownNameError, match="mini-swe-agent"):
        harness("mini-swe-agnet")
    bare = Proxy(ScriptedBackend([]), renderer)
    with pytest.raises(InputError, match="unix socket"):
        mounts(fake("once"), bare.socket)
    monkeypatch.setattr(external.shutil, "which", lambda name: None)
    with pytest.raises(HarnessError, match="needs npm"):
        install(HARNESSES["codex"])
    with pytest.raises(HarnessError, match=r"Python 3\.12 or newer"):
        install(HARNESSES["openhands"])


def test_commands_of_all_harnesses_can_be_made():
    start = Start('it\'s a "task"; $(rm)\n', "http://127.0.0.1:8123/s/x", "key")
    for name, chosen in HARNESSES.items():
        assert chosen.name == name
        assert all("==" in p or "@" in p[1:] for p in chosen.packages), "pinned"
        assert "$(rm)" not in chosen.command(start).replace("'it'\"'\"'s a \"task\"; $(rm)\n'", "")
        told = str(chosen.env(start)) + str(chosen.files(start))
        assert start.url in told
        assert start.key in told

"""Nothing is left behind, and nothing of others is touched."""

import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from metagym.envs.swe.bubblewrap import BubblewrapFactory, ControlGroup
from metagym.envs.swe.docker import LABEL, DockerFactory
from metagym.envs.swe.ledger import Ledger, machine
from metagym.envs.swe.pool import WarmPool
from metagym.envs.worker import process_start
from metagym.errors import InputError, SandboxError
from metagym.testing import ScriptedSandbox, ScriptedSandboxFactory
from metagym.types import Limits, Mount

TRAINER = """
import sys, time
from pathlib import Path
from metagym.types import Mount
ledger, kind, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if kind == "docker":
    from metagym.envs.swe.docker import DockerFactory
    factory = DockerFactory(host=sys.argv[4], ledger=ledger)
    sandboxes = [factory.start(sys.argv[5], [Mount("/usr", "/usr")]) for _ in range(count)]
    factory.snapshot(sandboxes[0])
else:
    from metagym.envs.swe.bubblewrap import BubblewrapFactory
    factory = BubblewrapFactory(ledger=ledger)
    sandboxes = [factory.start("host") for _ in range(count)]
for sandbox in sandboxes:
    sandbox.exec("sleep 4321 & trap '' TERM; echo x >/data/x 2>/dev/null", 30)
print("started", flush=True)
time.sleep(600)
"""


def killed_trainer(*arguments) -> None:
    """Starts a process that starts sandboxes, and kills it while they live."""
    process = subprocess.Popen([sys.executable, "-c", TRAINER, *map(str, arguments)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_docker_after_a_kill(tmp_path, docker_host, docker_image):
    """kill -9 with 16 live sandboxes, restart: none is left, volumes included; others' containers stay."""
    import docker

    client = docker.DockerClient(base_url=docker_host)
    foreign = client.api.create_container(
        docker_image, command=["true"], labels={"metagym.of": "somebody else"}, volumes=["/data"]
    )
    others = {c["Id"] for c in client.api.containers(all=True)}
    volumes = {v["Name"] for v in client.api.volumes()["Volumes"] or []}
    images = {i["Id"] for i in client.api.images()}
    try:
        killed_trainer(tmp_path, "docker", 16, docker_host, docker_image)
        left = {c["Id"] for c in client.api.containers(all=True)} - others
        assert len(left) == 16
        assert len({v["Name"] for v in client.api.volumes()["Volumes"]} - volumes) == 16
        # The ledger alone must do for most, the labels for one that is in no ledger.
        entries = sorted(tmp_path.glob("*.json"))
        assert len(entries) == 16
        entries[0].unlink()
        factory = DockerFactory(host=docker_host, ledger=tmp_path)
        assert len(factory.swept) == 16
        assert {c["Id"] for c in client.api.containers(all=True)} == others
        assert {v["Name"] for v in client.api.volumes()["Volumes"] or []} == volumes
        assert {i["Id"] for i in client.api.images()} == images
        assert not list(tmp_path.glob("*.json"))
        factory.close()
    finally:
        client.api.remove_container(foreign["Id"], v=True, force=True)
        client.close()


def test_bubblewrap_after_a_kill(tmp_path):
    killed_trainer(tmp_path, "bubblewrap", 5)
    time.sleep(0.3)
    # They die with their owner; what is left is the ledger and the control groups.
    entries = [json.loads(p.read_text()) for p in tmp_path.glob("*.json")]
    assert len(entries) == 5
    factory = BubblewrapFactory(ledger=tmp_path)
    assert len(factory.swept) == 5
    for entry in entries:
        for pid, started in entry["handle"]["pids"].items():
            assert process_start(int(pid)) != started or state(int(pid)) in "ZX"
        assert not any(os.path.exists(folder) for folder in entry["handle"]["groups"])
    assert not list(tmp_path.glob("*.json"))
    factory.close()


def state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(") ")[2][0]


def test_live_and_foreign_entries_stay(tmp_path):
    ledger = Ledger("bubblewrap", tmp_path)
    mine = ledger.add({"a": 1})
    for name, change in {
        "other-kind": {"kind": "docker", "owner": 1 << 22},
        "other-machine": {"machine": "elsewhere-1", "owner": 1 << 22},
        "dead": {"owner": 1 << 22},
        "other-start": {"started": 1},
        "old": {"ttl_s": -1.0},
    }.items():
        content = json.loads((tmp_path / f"{mine.id}.json").read_text()) | change | {"id": f"metagym-{name}"}
        (tmp_path / f"metagym-{name}.json").write_text(json.dumps(content))
    (tmp_path / "metagym-broken.json").write_text("{")
    (tmp_path / "metagym-strange.json").write_text('{"id": 1}')
    ended = []
    assert ledger.sweep(lambda entry: ended.append(entry.id)) == ended
    assert sorted(ended) == ["metagym-dead", "metagym-old", "metagym-other-start"]
    left = {p.stem for p in tmp_path.glob("*.json")}
    assert left == {mine.id} | {f"metagym-{n}" for n in ("other-kind", "other-machine", "broken", "strange")}


def test_one_that_resists_does_not_keep_the_others(tmp_path):
    ledger = Ledger("x", tmp_path, ttl_s=-1.0)
    entries = [ledger.add({}) for _ in range(3)]

    def end(entry):
        if entry == entries[1]:
            raise OSError("busy")

    assert len(ledger.sweep(end)) == 2
    assert [e.id for e in ledger.entries()] == [entries[1].id]


def test_closing_removes_the_entry(bubblewrap, tmp_path):
    sandbox = bubblewrap.start("host")
    assert len(list((tmp_path / "ledger").glob("*.json"))) == 1
    sandbox.close()
    assert not list((tmp_path / "ledger").glob("*.json"))
    with pytest.raises(InputError, match="no folder"):
        bubblewrap.start("host", [Mount("/nowhere", "/x")])
    assert not list((tmp_path / "ledger").glob("*.json"))


class _Daemon:
    """A Docker client whose engine misbehaves."""

    def __init__(self, fail: int = 0, delay_s: float = 0.0):
        self.fail, self.delay_s = fail, delay_s
        self.api = self
        self.running = self.most = self.calls = 0
        self.lock = threading.Lock()

    def ping(self):
        with self.lock:
            self.calls += 1
            self.running += 1
            self.most = max(self.most, self.running)
            failing = self.calls <= self.fail
        time.sleep(self.delay_s)
        with self.lock:
            self.running -= 1
        if failing:
            raise ConnectionError("connection refused")
        return True

    def containers(self, **_):
        return []

    images = containers


def test_an_engine_that_comes_back_is_waited_for(tmp_path):
    client = _Daemon(fail=2)
    DockerFactory(client=client, ledger=tmp_path, retries=3)
    assert client.calls == 3


def test_an_engine_that_stays_away_is_infra(tmp_path):
    with pytest.raises(SandboxError, match="the Docker engine failed in ping: connection refused"):
        DockerFactory(client=_Daemon(fail=99), ledger=tmp_path, retries=1)


def test_calls_to_the_engine_are_capped(tmp_path):
    """CASES 53: however many ask, so many run."""
    client = _Daemon(delay_s=0.01)
    factory = DockerFactory(client=client, ledger=tmp_path, max_calls=3)
    threads = [threading.Thread(target=factory.call, args=("ping", client.ping)) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.most == 3


def test_a_kill_that_hangs(tmp_path, docker, docker_image):
    """CASES 52: it is not waited for; the sandbox is infra, and what resists waits in the ledger."""
    docker._end_s = 0.5
    sandbox = docker.start(docker_image, [Mount("/usr", "/usr")])
    api, hanging = docker.client.api, threading.Event()
    real = api.kill, api.remove_container
    api.kill = api.remove_container = lambda *args, **kwargs: hanging.wait(60)
    before = time.monotonic()
    with pytest.raises(SandboxError, match=r"failed in kill: no answer within 0\.5 s"):
        sandbox.exec("sleep 50", 0.2)
    sandbox.close()
    assert time.monotonic() - before < 20
    assert [p.stem for p in (tmp_path / "ledger").glob("*.json")] == [sandbox.id]
    hanging.set()
    api.kill, api.remove_container = real
    entry = docker._ledger.entries()[0]
    docker._ledger._write(dataclasses.replace(entry, ttl_s=-1.0))  # as the next process sees it
    assert docker.sweep() == [sandbox.id]
    assert not api.containers(all=True, filters={"name": sandbox.id})


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # docker-py's, of calls that failed
def test_an_engine_that_is_killed(own_engine, tmp_path, put_image):
    """Episodes that run are infra, within moments, and what is left of them stays in the ledger."""
    process, host = own_engine
    put_image(host)
    factory = DockerFactory(host=host, ledger=tmp_path / "ledger", retries=0)
    sandboxes = [factory.start("metagym-test:skeleton", [Mount("/usr", "/usr")]) for _ in range(2)]
    assert sandboxes[0].exec("echo ok", 10).output == "ok\n"
    process.kill()
    process.wait()
    before = time.monotonic()
    for sandbox in sandboxes:
        with pytest.raises(SandboxError):
            sandbox.exec("sleep 60", 60)
    with pytest.raises(SandboxError, match="the Docker engine failed in"):
        factory.start("metagym-test:skeleton", [Mount("/usr", "/usr")])
    factory.close()
    assert time.monotonic() - before < 30
    assert {s.id for s in sandboxes} <= {e.id for e in factory._ledger.entries()}  # for the next sweep
    gc.collect()


@pytest.mark.parametrize("kind", ["bubblewrap", "docker", "local"])
def test_a_host_disk_that_is_nearly_full(kind, request, tmp_path, monkeypatch):
    """No new sandbox, and a command that fails is infra, not the agent's; with room again all is well."""
    factory = request.getfixturevalue(kind)
    image, mounts = ("metagym-test:skeleton", [Mount("/usr", "/usr")]) if kind == "docker" else ("host", [])
    sandbox = factory.start(image, mounts)
    room = os.statvfs(tmp_path)
    full = os.statvfs_result([*room[:3], 0, 0, *room[5:]])
    with monkeypatch.context() as patch:
        patch.setattr("metagym.envs.swe.ledger.os.statvfs", lambda path: full)
        with pytest.raises(SandboxError, match="is nearly full: 0 MiB are left"):
            factory.start(image, mounts)
        if kind != "bubblewrap":  # it writes to memory, never to a disk
            with pytest.raises(SandboxError, match="is nearly full"):
                sandbox.exec("cat /nowhere", 10)
    assert sandbox.exec("cat /nowhere", 10).exit_code == 1
    factory.start(image, mounts).close()
    sandbox.close()


def test_labels_name_the_owner(docker, docker_image, docker_host):
    sandbox = docker.start(docker_image, [Mount("/usr", "/usr")], labels={"run": "7"})
    labels = docker.client.api.inspect_container(sandbox.id)["Config"]["Labels"]
    assert labels[LABEL] == sandbox.id
    assert labels[f"{LABEL}.machine"] == machine()
    assert (labels[f"{LABEL}.owner"], labels[f"{LABEL}.user.run"]) == (str(os.getpid()), "7")


def test_control_group_version_2(tmp_path):
    """The files of version 2, in a folder that looks like one."""
    (tmp_path / "metagym").mkdir()
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids")
    for folder in (tmp_path, tmp_path / "metagym"):
        (folder / "cgroup.subtree_control").write_text("")
    group = ControlGroup.make("one", Limits(memory=1 << 20, pids=7, cpus=0.5), root=tmp_path)
    assert group is not None
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    one = tmp_path / "metagym" / "one"
    assert [(one / f).read_text() for f in ("memory.max", "pids.max", "cpu.max")] == [
        "1048576",
        "7",
        "50000 100000",
    ]
    assert group.hit() is None
    (one / "memory.events").write_text("low 0\noom 1\noom_kill 1\n")
    assert group.hit() == "memory"
    assert group.hit() is None
    (one / "pids.events").write_text("max 4\n")
    assert group.hit() == "pids"
    assert str(one / "cgroup.procs") in group.enter()
    assert ControlGroup.make("two", Limits(), root=tmp_path / "nowhere") is None


def test_warm_pool():
    factory = ScriptedSandboxFactory(lambda command: "ok")
    pool = WarmPool(factory, size=2, kinds=1, workers=2)
    first = pool.start("a")
    assert first.exec("x", 1.0).output == "ok"
    while len(factory.started) < 3:  # one was taken, two are kept ready
        time.sleep(0.01)
    factory.started[1].close()  # it dies while it waits
    taken = pool.start("a")
    assert taken is not factory.started[1]
    pool.start("b")  # another kind: the first makes room
    pool.close()
    assert all(s.closed for s in factory.started if s not in (first, taken))
    with pytest.raises(SandboxError, match="closed"):
        pool.start("a")
    with pytest.raises(InputError):
        WarmPool(factory, size=0)
    assert isinstance(taken, ScriptedSandbox)

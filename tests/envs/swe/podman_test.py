"""Podman, by the API of Docker: the same class, another engine."""

import os
import shutil
import subprocess
import time

import pytest

from metagym.envs.swe.docker import DockerFactory
from metagym.types import Limits, Mount

CONF = """\
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
compat_api_enforce_docker_hub = false
"""
NAME = "metagym-test:latest"  # Podman 4.3 forgets the tag of what is imported
USR = [Mount("/usr", "/usr")]


@pytest.fixture(scope="module")
def podman(tmp_path_factory, put_image):
    if shutil.which("podman") is None or shutil.which("runc") is None or os.getuid() != 0:
        pytest.skip("no podman with runc that could be started")
    folder = tmp_path_factory.mktemp("podman")
    (folder / "containers.conf").write_text(CONF)
    host = f"unix://{folder}/podman.sock"
    command = ["podman", f"--root={folder}/root", f"--runroot={folder}/run", "--storage-driver=overlay"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "system", "service", "--time=0", host],
            stdout=log,
            stderr=log,
            env={**os.environ, "CONTAINERS_CONF": str(folder / "containers.conf")},
        )
    try:
        for _ in range(300):
            if (folder / "podman.sock").exists() or process.poll() is not None:
                break
            time.sleep(0.1)
        assert process.poll() is None, (folder / "log").read_text()[-2000:]
        put_image(host, NAME)
        yield host
    finally:
        process.terminate()
        process.wait(20)
        subprocess.run([*command, "system", "reset", "--force"], capture_output=True, check=False)


def test_podman(podman, tmp_path):
    factory = DockerFactory(host=podman, ledger=tmp_path, user="1000:1000")
    sandbox = factory.start(NAME, USR, Limits(pids=64))
    assert sandbox.exec("export X=1; cd /tmp; echo hi", 10).output == "hi\n"
    assert sandbox.exec("echo $X $PWD; id -u; exit 3", 10).output.startswith("1 /tmp\n1000\n")
    assert sandbox.exec("echo x >/dev/tcp/1.1.1.1/80", 10).exit_code != 0
    assert "CapEff:\t0000000000000000\n" in sandbox.exec("cat /proc/self/status", 10).output
    result = sandbox.exec("echo a; trap '' TERM; sleep 99 & wait", 0.5)
    assert (result.timed_out, result.output[:2]) == (True, "a\n")
    left = sandbox.exec("cat /proc/[0-9]*/cmdline", 10).output
    assert "sleep" not in left
    sandbox.write("/tmp/a b", bytes(range(256)))
    assert sandbox.read("/tmp/a b") == bytes(range(256))
    sandbox.exec("b() { b | b & }; b", 0.5)
    assert sandbox.exec("sleep 1; ls; ls", 2).limit == "pids"
    image = factory.snapshot(sandbox)
    assert len(factory.start(image, USR).read("/tmp/a b")) == 256
    mine = {s.id for s in factory._live.values()}
    assert len(mine) == 2
    factory.close()
    other = DockerFactory(host=podman, ledger=tmp_path / "other")
    assert other.client.api.containers(all=True) == []
    other.close()

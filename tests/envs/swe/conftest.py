"""A Docker engine and an image for it, made without a registry."""

import contextlib
import importlib.util
import io
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path

import pytest

from metagym.envs.swe.bubblewrap import BubblewrapFactory, own
from metagym.envs.swe.docker import DockerFactory
from metagym.envs.swe.local import LocalFactory
from metagym.types import Mount

IMAGE = "metagym-test:skeleton"
USR = Mount("/usr", "/usr")


def _skeleton() -> bytes:
    """A root file system without content: /usr comes by a mount."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("usr", "proc", "sys", "dev", "etc", "tmp", "data", "testbed"):
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o777
            tar.addfile(info)
        for name in ("bin", "sbin", "lib", "lib64"):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(info)
        passwd = b"root:x:0:0::/:/bin/bash\nagent:x:1000:1000::/tmp:/bin/bash\n"
        info = tarfile.TarInfo("etc/passwd")
        info.size = len(passwd)
        tar.addfile(info, io.BytesIO(passwd))
    return buffer.getvalue()


@pytest.fixture(scope="session")
def small():
    """The module small.py beside this file: a small task."""
    spec = importlib.util.spec_from_file_location("swe_small_task", Path(__file__).with_name("small.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start_engine(folder: Path) -> tuple[subprocess.Popen, str]:
    """A Docker engine that keeps everything in a folder, and its address."""
    options = ["--iptables=false", "--ip6tables=false", "--bridge=none"]
    for name in ("data", "exec"):
        options.append(f"--{name}-root={folder / name}")
    for name in ("docker.sock", "docker.pid"):
        (folder / name).unlink(missing_ok=True)
    host = f"unix://{folder}/docker.sock"
    with (folder / "log").open("wb") as log:
        command = ["dockerd", "-H", host, f"--pidfile={folder}/docker.pid", *options]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    for _ in range(600):
        if process.poll() is not None or _answers(folder / "docker.sock"):
            break
        time.sleep(0.1)
    if process.poll() is not None:
        pytest.fail(f"dockerd did not start:\n{(folder / 'log').read_text()[-2000:]}")
    return process, host


def _answers(path: Path) -> bool:
    """Whether an engine is behind a socket, which is there before the engine is."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        client.connect(str(path))
        client.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
        return b" 200 " in client.recv(100)
    return False


def end_engine(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def need_dockerd() -> None:
    if shutil.which("dockerd") is None or os.getuid() != 0:
        without = pytest.fail if os.environ.get("CI") else pytest.skip  # .ci/run installs docker.io
        without("no dockerd that could be started: install docker.io, or set DOCKER_HOST")


@pytest.fixture
def own_engine():
    """(process, address) of an engine that the test may kill."""
    need_dockerd()
    folder = Path(tempfile.mkdtemp(prefix="engine-"))  # the paths of its sockets must be short
    process, host = start_engine(folder)
    yield process, host
    if process.poll() is None:
        end_engine(process)
    for pid in _of_folder(folder):  # what an engine that was killed has left behind of itself
        os.kill(pid, signal.SIGKILL)
    for line in reversed(Path("/proc/mounts").read_text().splitlines()):
        if (place := line.split()[1]).startswith(f"{folder}/"):
            subprocess.run(["umount", "-l", place], check=False)
    shutil.rmtree(folder, ignore_errors=True)


def _of_folder(folder: Path) -> list[int]:
    """Processes whose command line names a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.fixture(scope="session")
def docker_host(tmp_path_factory):
    """The address of an engine: `$DOCKER_HOST`, or one of its own that is started and ended here."""
    if os.environ.get("DOCKER_HOST"):
        yield os.environ["DOCKER_HOST"]
        return
    need_dockerd()
    process, host = start_engine(tmp_path_factory.mktemp("dockerd"))
    try:
        yield host
    finally:
        end_engine(process)


def import_image(host: str, name: str = IMAGE) -> None:
    """Puts an image with a volume and nothing in it but links into /usr into an engine."""
    import docker

    client = docker.DockerClient(base_url=host)
    repository, tag = name.split(":")
    client.api.import_image_from_data(_skeleton(), repository=repository, tag=tag, changes=["VOLUME /data"])
    client.close()


@pytest.fixture(scope="session")
def put_image():
    """Puts the image of these tests into an engine."""
    return import_image


@pytest.fixture(scope="session")
def docker_image(docker_host):
    """The name of an image with a volume and nothing in it but links into /usr."""
    import_image(docker_host)
    return IMAGE


@pytest.fixture
def bubblewrap(tmp_path):
    factory = BubblewrapFactory(ledger=tmp_path / "ledger")
    yield factory
    factory.close()


@pytest.fixture
def docker(tmp_path, docker_host, docker_image):
    factory = DockerFactory(host=docker_host, ledger=tmp_path / "ledger", user="1000:1000")
    yield factory
    factory.close()


@pytest.fixture
def local():
    with pytest.warns(UserWarning, match="isolates nothing"):
        factory = LocalFactory()
    yield factory
    factory.close()


@pytest.fixture
def repo(tmp_path) -> Path:
    """A folder to mount copy-on-write at /testbed."""
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "a.txt").write_text("hi\n")
    own(folder)
    return folder


def _starter(request, repo):
    factory = request.getfixturevalue(request.param)

    def start(**kwargs):
        mounts = [Mount(str(repo), "/testbed", write=True)]
        if request.param == "docker":
            return factory.start(IMAGE, [USR, *mounts], **kwargs)
        return factory.start("host", mounts, **kwargs)

    start.kind, start.factory = request.param, factory
    return start


@pytest.fixture(params=["bubblewrap", "docker", "local"])
def start(request, repo):
    """Starts a sandbox of a kind with `repo` in it; its attributes say which kind and factory."""
    return _starter(request, repo)


@pytest.fixture(params=["bubblewrap", "docker"])
def start_isolated(request, repo):
    """Like `start`, without the kind that isolates nothing."""
    return _starter(request, repo)

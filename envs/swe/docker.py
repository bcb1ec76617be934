"""Sandboxes of Docker, by its API: any engine, remote ones (`DOCKER_HOST`) and Podman included.

A container has no network, no capability, no new privileges, and limits of memory, processes, CPU and size
of files. Its process 1 is the supervisor, on whose attached socket the persistent shell runs. A read-only
mount is a bind mount of a folder on the engine's machine; a copy-on-write folder is copied into the container
when it starts.

Nothing is left behind: each container has labels that name its owner, and a line in the ledger. The next
factory on this machine removes the containers, with their volumes, whose owner is dead; nobody else's are
touched. Calls to the engine are `max_calls` at a time, each with a deadline; one that is to end something has
a short one, and what then still is there waits in the ledger.
"""

import contextlib
import functools
import io
import logging
import os
import signal
import socket
import struct
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from metagym.envs.swe.ledger import DISK_FLOOR, TTL_S, Entry, Ledger, check_room, machine
from metagym.envs.swe.shell import OUTPUT_CAP, SUPERVISOR, Limit, Shell, ShellSandbox
from metagym.envs.worker import alive
from metagym.errors import InputError, MissingExtraError, SandboxError
from metagym.live import Live
from metagym.protocols import Sandbox
from metagym.types import Limits, Mount

T = TypeVar("T")
LABEL = "metagym"
_LOOK = (  # in the container; prints how often each limit was hit, and the free blocks of the disk
    "for f in /sys/fs/cgroup/memory/memory.oom_control /sys/fs/cgroup/memory.events "
    "/sys/fs/cgroup/pids/pids.events /sys/fs/cgroup/pids.events; do "
    'while read -r k v; do case $k in oom_kill|max) echo "${f##*/} $k $v";; esac; done <$f; done 2>/dev/null'
)
_log = logging.getLogger("metagym.swe")


class AttachedSocket:
    """A channel over the attached stream of a container without a terminal: frames of 8 bytes and a body."""

    def __init__(self, raw: Any):
        self._raw = raw  # kept: its owner closes the connection when it is collected
        inner = getattr(raw, "_sock", raw)
        self._socket: socket.socket = inner
        self._socket.setblocking(False)
        self._pending = bytearray()
        self._left = 0  # of the current frame's body

    def fileno(self) -> tuple[int, int]:
        return self._socket.fileno(), self._socket.fileno()

    def receive(self) -> bytes | None:
        try:
            data = self._socket.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return None
        if not data:
            return b""
        self._pending += data
        body = bytearray()
        while self._pending:
            if not self._left:
                if len(self._pending) < 8:
                    break
                (self._left,) = struct.unpack(">I", self._pending[4:8])
                del self._pending[:8]
            part = self._pending[: self._left]
            body += part
            self._left -= len(part)
            del self._pending[: len(part)]
        return bytes(body) or None

    def send(self, data: memoryview) -> int:
        try:
            return self._socket.send(data[: 1 << 16])
        except (BlockingIOError, InterruptedError):
            return 0

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._raw.close()
        with contextlib.suppress(OSError):
            self._socket.close()


class DockerFactory(Live):
    """Starts sandboxes. At its first start it removes what dead processes left.

    Args:
        host: the engine, such as "unix:///run/docker.sock"; None: `$DOCKER_HOST`, or the usual socket.
        ledger: folder of the ledger; None: the usual one.
        env: variables of the shell.
        user: who commands run as in the container; None: the image's user.
        max_calls: calls to the engine at the same time.
        timeout_s: deadline of each call.
        retries: of a call that failed because the engine did not answer, with growing pauses.
        end_s: deadline of a call that ends something.
        disk_floor: bytes that must be free on the engine's disk, where it is this machine's: below, a start
            and a command that fails are infra.
        ttl_s: after which another process may remove a sandbox.
        cap: bytes of output that a command may return.

    Raises MissingExtraError without the package docker, SandboxError if no engine answers.
    """

    def __init__(
        self,
        *,
        host: str | None = None,
        ledger: Path | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        max_calls: int = 8,
        timeout_s: float = 120.0,
        retries: int = 3,
        end_s: float = 30.0,
        disk_floor: int = DISK_FLOOR,
        ttl_s: float = TTL_S,
        cap: int = OUTPUT_CAP,
        client: Any = None,
    ):
        try:
            import docker
            from docker.errors import DockerException, NotFound
        except ImportError as error:
            raise MissingExtraError("the Docker sandbox", "swe", error) from error
        self._errors, self._not_found = (DockerException, OSError), NotFound
        self._calls = threading.BoundedSemaphore(max_calls)
        self._retries, self._end_s, self._floor = retries, end_s, disk_floor
        self._env, self._user, self._cap = dict(env or {}), user, cap
        self._live: dict[str, DockerSandbox] = {}
        self._images: set[str] = set()
        self._lock = threading.Lock()
        if client is None:
            host = host or os.environ.get("DOCKER_HOST")
            try:
                make = docker.DockerClient if host else docker.from_env
                given: dict[str, Any] = {"base_url": host} if host else {}
                client = make(timeout=int(timeout_s), max_pool_size=max_calls + 2, **given)
            except self._errors as error:
                raise SandboxError(
                    f"no Docker engine answers at {host or 'its usual socket'}: {error}"
                ) from error
        self.client = client
        self._ledger = Ledger("docker", ledger, ttl_s, disk_floor)
        self._host = host or ""
        self.call("ping", self.client.ping)
        self.swept = self.sweep()

    def end(self, what: str, function: Callable[[], T]) -> T:
        """A call that ends something: tried once, and not waited for after its deadline."""
        return self.call(what, lambda: _within(self._end_s, function), retry=False)

    @functools.cached_property
    def _about(self) -> tuple[str, bool]:
        """The engine's folder ("": not on this machine), and whether it is Podman."""
        version = self.call("version", self.client.version)
        podman = any("podman" in c.get("Name", "").lower() for c in version.get("Components") or ())
        root = str(self.call("info", self.client.info).get("DockerRootDir") or "")
        here = not self._host or self._host.startswith("unix:")
        return (root if here and root and os.path.isdir(root) else ""), podman

    def check_room(self) -> None:
        """Raises SandboxError if the engine's disk is nearly full."""
        if root := self._about[0]:
            check_room(root, self._floor)

    def call(self, what: str, function: Callable[[], T], *, retry: bool = True) -> T:
        """A call to the engine, when its turn comes. Raises SandboxError, and docker's NotFound as it is."""
        for attempt in range(self._retries + 1):
            try:
                with self._calls:
                    return function()
            except self._not_found:
                raise
            except self._errors as error:
                status = getattr(getattr(error, "response", None), "status_code", 500)
                if not retry or attempt == self._retries or status < 500:
                    raise SandboxError(f"the Docker engine failed in {what}: {str(error)[-500:]}") from error
                time.sleep(0.2 * 2**attempt)
        raise AssertionError("unreachable")

    def sweep(self) -> list[str]:
        """Removes the sandboxes of dead processes of this machine: those in the ledger and those labelled."""
        gone = self._ledger.sweep(lambda entry: self._remove(entry.id))
        filters = {"label": f"{LABEL}.machine={machine()}"}
        found = self.call("list", lambda: self.client.api.containers(all=True, filters=filters))
        for container in found:
            labels = container["Labels"]
            pid, started = (int(labels.get(f"{LABEL}.{key}", 0)) for key in ("owner", "started"))
            if not alive(pid, started):
                with contextlib.suppress(SandboxError):
                    self._remove(container["Id"])
                    gone.append(labels.get(LABEL, container["Id"]))
        for image in self.call("list", lambda: self.client.api.images(filters=filters)):
            labels = image.get("Labels") or {}
            if not alive(*(int(labels.get(f"{LABEL}.{key}", 0)) for key in ("owner", "started"))):
                with contextlib.suppress(SandboxError, self._not_found):
                    self.call("remove", lambda id=image["Id"]: self.client.api.remove_image(id, force=True))
        return list(dict.fromkeys(gone))

    def start(
        self,
        image: str,
        mounts: Sequence[Mount] = (),
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        labels: Mapping[str, str] | None = None,
    ) -> "DockerSandbox":
        entry = self._ledger.add({"labels": dict(labels or {})})
        sandbox = None
        try:
            sandbox = self._start(entry, image, mounts, limits, labels or {})
        except BaseException as error:
            with contextlib.suppress(SandboxError):
                self._remove(entry.id)
                self._ledger.remove(entry)
            if isinstance(error, self._not_found):
                raise InputError(
                    f"the Docker engine has no image {image!r}: pull or build it first ({error})."
                ) from error
            raise
        with self._lock:
            self._live[entry.id] = sandbox
        return sandbox

    def _start(
        self, entry: Entry, image: str, mounts: Sequence[Mount], limits: Limits, labels: Mapping[str, str]
    ) -> "DockerSandbox":
        from docker import types as docker_types

        api = self.client.api
        self.check_room()
        ulimits = {"fsize": limits.disk}
        if self._about[1]:  # it asks for a million of each where none are given, which not every host allows
            ulimits |= {"nofile": 4096, "nproc": 16384}
        bound = {m.source: {"bind": m.target, "mode": "ro"} for m in mounts if not m.write}
        config = api.create_host_config(
            network_mode="none",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            mem_limit=limits.memory,
            memswap_limit=limits.memory,
            pids_limit=limits.pids,
            nano_cpus=int(limits.cpus * 1e9),
            ulimits=[docker_types.Ulimit(name=n, soft=v, hard=v) for n, v in ulimits.items()],
            binds=bound,
            log_config={"type": "none"},
        )
        owned = self._owner_labels(entry) | {f"{LABEL}.user.{k}": v for k, v in labels.items()}
        env = {"HOME": "/tmp", "LC_ALL": "C.UTF-8", **self._env}
        self.call(
            "create",
            lambda: api.create_container(
                image,
                entrypoint=["bash", "-c", SUPERVISOR],
                command=[],
                name=entry.id,
                stdin_open=True,
                tty=False,
                user=self._user,
                environment=env,
                labels=owned,
                host_config=config,
                working_dir="/",
            ),
            retry=False,
        )
        for mount in mounts:
            if mount.write:
                tar = _tar(mount.source, mount.target, self._user)
                self.call("copy", lambda tar=tar: api.put_archive(entry.id, "/", tar))
        params = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
        raw = self.call("attach", lambda: api.attach_socket(entry.id, params=params), retry=False)
        channel = AttachedSocket(raw)
        try:
            self.call("start", lambda: api.start(entry.id), retry=False)
            cwd = next((m.target for m in mounts if m.write), "/")
            return DockerSandbox(self, entry, channel, cwd, self._cap)
        except BaseException:
            channel.close()
            raise

    def _owner_labels(self, entry: Entry) -> dict[str, str]:
        owner = {"machine": machine(), "owner": str(entry.owner), "started": str(entry.started)}
        return {LABEL: entry.id} | {f"{LABEL}.{k}": v for k, v in owner.items()}

    def snapshot(self, sandbox: Sandbox) -> str:
        if not isinstance(sandbox, DockerSandbox) or sandbox.closed:
            raise InputError("only a live sandbox of Docker can be a snapshot of Docker.")
        labels = " ".join(f'"{k}"="{v}"' for k, v in self._owner_labels(sandbox.entry).items())
        made = self.call(
            "commit",
            lambda: self.client.api.commit(sandbox.id, pause=False, changes=[f"LABEL {labels}"]),
            retry=False,
        )
        with self._lock:
            self._images.add(made["Id"])
        return made["Id"]

    def _remove(self, name: str) -> None:
        """Removes a container with its volumes, however it resists. Raises SandboxError if it can't be."""
        with contextlib.suppress(self._not_found):
            try:
                self.end("remove", lambda: self.client.api.remove_container(name, v=True, force=True))
            except SandboxError as error:
                if "in progress" not in str(error):
                    raise

    def closed(self, sandbox: "DockerSandbox") -> None:
        with self._lock:
            self._live.pop(sandbox.entry.id, None)
        try:
            self._remove(sandbox.entry.id)
        except SandboxError as error:  # the ledger keeps it: the next sweep tries again
            _log.warning("sandbox %s could not be removed: %s", sandbox.id, str(error))
            return
        self._ledger.remove(sandbox.entry)

    def close(self) -> None:
        for sandbox in list(self._live.values()):
            sandbox.close()
        with self._lock:
            images, self._images = self._images, set()
        for image in images:
            with contextlib.suppress(SandboxError, self._not_found):
                self.call("remove", lambda image=image: self.client.api.remove_image(image, force=True))
        self.client.close()


def _within(seconds: float, function: Callable[[], T]) -> T:
    """What a function returns or raises; TimeoutError after so many seconds: its thread is left behind."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError as error:
        if future.done():
            raise
        raise TimeoutError(f"no answer within {seconds:g} s") from error


def _tar(source: str, target: str, user: str | None) -> bytes:
    """A folder as an archive to unpack at /, everything in it the property of `user`, if that is a number."""
    uid, _, gid = (user or "0").partition(":")
    owner = (int(uid), int(gid or uid)) if (uid + gid).isdigit() else (0, 0)

    def given(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid, info.gid = owner
        info.uname = info.gname = ""
        return info

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(source, target.strip("/"), filter=given)
    return buffer.getvalue()


class DockerSandbox(ShellSandbox):
    """See `metagym.protocols.Sandbox`."""

    def __init__(self, factory: DockerFactory, entry: Entry, channel: AttachedSocket, cwd: str, cap: int):
        self._factory, self.entry = factory, entry
        super().__init__(entry.id, Shell(channel, self._interrupt, cwd), cap)
        self._seen = self._look()

    def _interrupt(self) -> None:
        try:
            self._factory.end("kill", lambda: self._factory.client.api.kill(self.entry.id, signal="SIGUSR1"))
        except self._factory._not_found as error:
            raise ProcessLookupError(str(error)) from error

    def _look(self) -> dict[Limit, int]:
        ran = self._shell.run(_LOOK, 30.0)
        seen: dict[Limit, int] = {"memory": 0, "pids": 0}
        for line in ran.output.text().splitlines():
            file, key, count = (*line.split(" "), "", "")[:3]
            if key == ("max" if file == "pids.events" else "oom_kill") and count.isdigit():
                seen["pids" if key == "max" else "memory"] = int(count)
        return seen

    def _limit(self, status: int | None, gone: bool = False) -> Limit | None:
        if status == 128 + signal.SIGXFSZ:
            return "disk"
        if gone:
            with contextlib.suppress(SandboxError, self._factory._not_found):
                about = self._factory.call(
                    "inspect", lambda: self._factory.client.api.inspect_container(self.entry.id)
                )
                return "memory" if about["State"].get("OOMKilled") else None
            return None
        self._factory.check_room()
        before, self._seen = self._seen, self._look()
        hit: Sequence[Limit] = [limit for limit in self._seen if self._seen[limit] > before[limit]]
        return hit[0] if hit else None

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._shell.close()
        self._factory.closed(self)

"""Commands on this machine, with no isolation at all: for code that you trust, where nothing else works.

There are no limits but time, and what a command writes stays. A copy-on-write folder is copied, to a
temporary folder that `exec` begins in; `mounts` of other kinds are refused, since there is no other root.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from metagym.envs.swe.ledger import DISK_FLOOR, check_room
from metagym.envs.swe.shell import OUTPUT_CAP, SUPERVISOR, Limit, Pipes, Shell, ShellSandbox
from metagym.errors import InputError
from metagym.live import Live
from metagym.protocols import Sandbox
from metagym.types import Limits, Mount

WARNING = "sandbox='local' isolates nothing: what an agent runs, it runs on this machine, as this user"
# Orphans become children of the supervisor, so that none is missed.
_BECOME = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(36, 1); os.execvp('bash', ['bash', '-c', sys.argv[1]])"
)


class LocalFactory(Live):
    """Starts shells on this machine; warns once that they isolate nothing."""

    def __init__(self, *, env: Mapping[str, str] | None = None, cap: int = OUTPUT_CAP):
        warnings.warn(WARNING, UserWarning, stacklevel=2)
        self._env, self._cap = dict(env or {}), cap
        self._live: list[LocalSandbox] = []
        self._snapshots: list[str] = []
        self._lock = threading.Lock()

    def start(
        self,
        image: str = "host",
        mounts: Sequence[Mount] = (),
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        labels: Mapping[str, str] | None = None,
    ) -> "LocalSandbox":
        if image != "host" and image not in self._snapshots:
            raise InputError(f"no image {image!r} for a local sandbox: it has no images, only 'host'.")
        folders = [m for m in mounts if m.write]
        if len(folders) > 1:
            raise InputError("a local sandbox takes one copy-on-write folder.")
        source = image if image in self._snapshots else folders[0].source if folders else None
        check_room(tempfile.gettempdir(), LocalSandbox.floor)
        work = tempfile.mkdtemp(prefix="metagym-local-")
        if source:
            shutil.copytree(source, work, symlinks=True, dirs_exist_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-c", _BECOME, SUPERVISOR.replace("kill -9 -1", ":")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": os.environ.get("PATH", ""), "HOME": work, "LC_ALL": "C.UTF-8", **self._env},
            start_new_session=True,
        )
        sandbox = LocalSandbox(process, work, self._cap)
        with self._lock:
            self._live.append(sandbox)
        return sandbox

    def snapshot(self, sandbox: Sandbox) -> str:
        if not isinstance(sandbox, LocalSandbox) or sandbox.closed:
            raise InputError("only a live local sandbox can be a local snapshot.")
        folder = tempfile.mkdtemp(prefix="metagym-local-snapshot-")
        shutil.copytree(sandbox.work, folder, symlinks=True, dirs_exist_ok=True)
        with self._lock:
            self._snapshots.append(folder)
        return folder

    def close(self) -> None:
        with self._lock:
            live, self._live = self._live, []
            snapshots, self._snapshots = self._snapshots, []
        for sandbox in live:
            sandbox.close()
        for folder in snapshots:
            shutil.rmtree(folder, ignore_errors=True)


class LocalSandbox(ShellSandbox):
    """See `metagym.protocols.Sandbox`. `work` is the folder it begins in, removed at the end."""

    floor = DISK_FLOOR

    def __init__(self, process: subprocess.Popen[bytes], work: str, cap: int):
        self._process, self.work = process, work
        assert process.stdin is not None
        assert process.stdout is not None
        pipes = Pipes(os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno()))
        process.stdin.close()
        process.stdout.close()
        super().__init__(f"local-{process.pid}", Shell(pipes, self._interrupt, work), cap)

    def _interrupt(self) -> None:
        for _ in range(1000):  # a fork bomb may outrun it: there is no limit here to hold it
            children = _descendants(self._process.pid)
            if not children:
                return
            for signal_number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in children:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal_number)

    def _limit(self, status: int | None, gone: bool = False) -> Limit | None:
        check_room(self.work, self.floor)
        return None

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._interrupt()
        self._process.kill()
        self._process.wait()
        self._shell.close()
        shutil.rmtree(self.work, ignore_errors=True)


def _descendants(root: int) -> list[int]:
    """Living processes below one."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = path.read_text()
            state, parent = text[text.rindex(")") + 2 :].split()[:2]
            if state not in "ZX":
                parents[int(path.parent.name)] = int(parent)
    found, new = [], [root]
    while new:
        new = [pid for pid, parent in parents.items() if parent in new]
        found += new
    return found

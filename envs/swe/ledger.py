"""Nothing is left behind: which sandboxes exist, on disk, and the removal of those whose owner is dead.

A ledger is a folder, `$METAGYM_STATE/sandboxes` (by default `~/.local/state/metagym/sandboxes`), with one
JSON file for each sandbox, written before the sandbox is made and removed after it is gone. `sweep` reads
every file whose owner (pid and start time) is dead, or whose time to live is over, and calls what removes
sandboxes of that kind. Files that are not ours, of another machine or unreadable, are left alone.
"""

import contextlib
import json
import logging
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from metagym.envs.worker import alive, process_start
from metagym.errors import SandboxError

_log = logging.getLogger("metagym.swe")
TTL_S = 24 * 3600.0
DISK_FLOOR = 512 << 20  # bytes that must be free on this machine's disk


def check_room(folder: str | os.PathLike[str], floor: int) -> None:
    """Raises SandboxError if fewer than `floor` bytes are free where a folder is: what fails then is nobody's
    doing. A folder that is gone has no disk."""
    try:
        free = os.statvfs(folder)
    except FileNotFoundError:
        return
    if (left := free.f_bavail * free.f_frsize) < floor:
        raise SandboxError(
            f"the disk of {os.fspath(folder)} is nearly full: {left >> 20} MiB are left, "
            f"{floor >> 20} are needed."
        )


def state_folder() -> Path:
    return Path(os.environ.get("METAGYM_STATE") or "~/.local/state/metagym").expanduser()


def machine() -> str:
    """Names this boot of this machine, so that a ledger or a daemon that several share mixes nothing up."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "unknown"
    return f"{socket.gethostname()}-{boot[:8]}"


@dataclass(frozen=True)
class Entry:
    """One sandbox. `handle` is what its kind needs to find it again."""

    id: str
    kind: str
    owner: int  # pid
    started: int  # the owner's start time, in clock ticks since boot
    machine: str
    created: float  # seconds since the epoch
    ttl_s: float
    handle: Mapping[str, Any] = field(default_factory=dict)

    @property
    def orphaned(self) -> bool:
        """Whether its owner is gone, or its time is over."""
        return not alive(self.owner, self.started) or time.time() > self.created + self.ttl_s


class Ledger:
    """The sandboxes of one kind. Safe to use by many threads and processes at the same time."""

    def __init__(self, kind: str, folder: Path | None = None, ttl_s: float = TTL_S, floor: int = DISK_FLOOR):
        self.kind, self.ttl_s, self.floor = kind, ttl_s, floor
        self.folder = (folder or state_folder() / "sandboxes").absolute()
        self.folder.mkdir(parents=True, exist_ok=True)

    def add(self, handle: Mapping[str, Any]) -> Entry:
        """A new entry, on disk before this returns. Raises SandboxError if the disk is full."""
        check_room(self.folder, self.floor)
        pid = os.getpid()
        id = f"metagym-{secrets.token_hex(6)}"
        entry = Entry(
            id, self.kind, pid, process_start(pid), machine(), time.time(), self.ttl_s, dict(handle)
        )
        self._write(entry)
        return entry

    def update(self, entry: Entry, handle: Mapping[str, Any]) -> Entry:
        """The entry with more in its handle."""
        entry = Entry(**{**asdict(entry), "handle": {**entry.handle, **handle}})
        self._write(entry)
        return entry

    def remove(self, entry: Entry) -> None:
        self._path(entry).unlink(missing_ok=True)

    def entries(self) -> list[Entry]:
        """All of this kind and machine, whoever owns them."""
        found = []
        for path in sorted(self.folder.glob("metagym-*.json")):
            try:
                entry = Entry(**json.loads(path.read_bytes()))
            except (OSError, ValueError, TypeError):
                continue
            if (entry.kind, entry.machine) == (self.kind, machine()):
                found.append(entry)
        return found

    def sweep(self, end: Callable[[Entry], None]) -> list[str]:
        """Ends the orphans with `end`; the ids of those that are gone. One that can't be ended stays in."""
        gone = []
        for entry in self.entries():
            if not entry.orphaned:
                continue
            try:
                end(entry)
            except Exception as error:  # one that resists must not keep the others
                _log.warning("sandbox %s of a dead process could not be removed: %s", entry.id, error)
                continue
            self.remove(entry)
            gone.append(entry.id)
        if gone:
            _log.info("removed %d sandboxes of dead processes: %s", len(gone), ", ".join(gone[:5]))
        return gone

    def _path(self, entry: Entry) -> Path:
        return self.folder / f"{entry.id}.json"

    def _write(self, entry: Entry) -> None:
        try:
            descriptor, name = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
        except OSError as error:
            raise SandboxError(f"no sandbox can be recorded in {self.folder}: {error}") from error
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(asdict(entry), file)
            os.replace(name, self._path(entry))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

"""The games on disk: which there are, which can be played, and why the others can't.

The official layout is `<root>/json_2.1.1/<split>/<task>/<trial>/game.tw-pddl`, root being `$ALFWORLD_DATA`.
Every file is read and checked once (`metagym.envs.alfworld.game`); the verdicts are kept in
`$METAGYM_CACHE/alfworld` (by default `~/.cache/metagym/alfworld`) with each file's size and time, so that
only new and changed files are read again. Nothing is left out silently: `Index.problems` names each file with
the reason, and the counts are logged as a warning of the logger `metagym.alfworld`.

A large index is built by several processes.
"""

import gc
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metagym.envs.alfworld import game as games
from metagym.errors import InputError
from metagym.types import Task

LAYOUT = "json_2.1.1"
SPLITS = ("train", "valid_seen", "valid_unseen")
KINDS = {
    "missing": "no game.tw-pddl in the folder",
    "broken": "not a game",
    "version": "of another version of ALFWorld",
    "mismatch": "the sentence and the PDDL goal differ",
    "unsolvable": "not marked as solvable",
    "sliced": "needs slicing or a movable receptacle, which ALFWorld leaves out",
}
_PER_PROCESS = 400  # fewer files are not worth another process
_log = logging.getLogger("metagym.alfworld")
_lock = threading.Lock()
_loaded: dict[Path, "Index"] = {}

Verdict = tuple[str, str]  # ("", task type) for a good game, (kind, reason) for a bad one


@dataclass(frozen=True)
class Index:
    """What is under a root. `problems` maps a game's id to (kind, reason)."""

    root: Path
    tasks: tuple[Task, ...]
    problems: dict[str, Verdict]

    def path(self, id: str) -> Path:
        """The file of a task."""
        return self.root / id / "game.tw-pddl"

    def report(self, examples: int = 3) -> str:
        """Counts of what is there and what is left out, with examples, in lines."""
        splits = Counter(task.split for task in self.tasks)
        lines = [
            f"{len(self.tasks)} games under {self.root}: {', '.join(f'{n} {s}' for s, n in splits.items())}"
        ]
        for kind, meaning in KINDS.items():
            ids = [id for id, (found, _) in self.problems.items() if found == kind]
            if ids:
                lines.append(f"{len(ids)} left out, {kind} ({meaning}):")
                lines += [f"  {id}: {self.problems[id][1]}" for id in ids[:examples]]
                if len(ids) > examples:
                    lines.append(f"  and {len(ids) - examples} more")
        return "\n".join(lines)


def find_root(data: str | os.PathLike[str] | None) -> Path | None:
    """The folder that holds the splits; None if no data was asked for and none is in the usual places.

    Looks at `data`, else `$ALFWORLD_DATA`, else `~/.cache/alfworld`. Raises InputError if what was asked for
    isn't there.
    """
    asked = data or os.environ.get("ALFWORLD_DATA")
    base = Path(asked or "~/.cache/alfworld").expanduser()
    for root in (base / LAYOUT, base):
        if any((root / split).is_dir() for split in SPLITS):
            return root.absolute()
    if asked:
        source = "data" if data else "$ALFWORLD_DATA"
        raise InputError(
            f"no ALFWorld games under {source} = {str(base)!r}: expected "
            f"{LAYOUT}/{{{','.join(SPLITS)}}}/<task>/<trial>/game.tw-pddl in it. `alfworld-download` gets "
            "them; split='generated' needs none."
        )
    return None


def load(root: Path) -> Index:
    """The index of a root, the same for the whole process. Raises InputError if no game can be played."""
    with _lock:
        if root not in _loaded:
            index = _load(root)
            severe = [kind for kind, _ in index.problems.values() if kind not in ("unsolvable", "sliced")]
            if not index.tasks:
                raise InputError(f"no game can be played.\n{index.report()}")
            _log.log(logging.WARNING if severe else logging.INFO, "%s", index.report())
            _loaded[root] = index
        return _loaded[root]


def forget() -> None:
    """Makes the next `load` look at the files again."""
    with _lock:
        _loaded.clear()


def _load(root: Path) -> Index:
    cache = _cache_file(root)
    known = _read_cache(cache)
    verdicts: dict[str, tuple[int, int, str, str]] = {}  # id -> size, time, verdict
    fresh: list[str] = []
    for id, stat in _scan(root):
        if stat is None:
            kind = "sliced" if "Sliced" in id or "movable" in id else "missing"
            verdicts[id] = (0, 0, kind, KINDS[kind])
        elif (row := known.get(id)) and tuple(row[:2]) == (stat.st_size, stat.st_mtime_ns):
            verdicts[id] = tuple(row)
        else:
            verdicts[id] = (stat.st_size, stat.st_mtime_ns, "", "")
            fresh.append(id)
    for id, verdict in zip(fresh, _check_all(root, fresh), strict=True):
        verdicts[id] = (*verdicts[id][:2], *verdict)
    if fresh or len(known) != len(verdicts):
        _write_cache(cache, verdicts)
    tasks = tuple(
        Task(id, kind_or_reason, id.partition("/")[0])
        for id, (_, _, problem, kind_or_reason) in verdicts.items()
        if not problem
    )
    return Index(root, tasks, {id: row[2:] for id, row in verdicts.items() if row[2]})


def _scan(root: Path) -> Iterator[tuple[str, os.stat_result | None]]:
    """(id, stat of its game file or None) of every trial folder, in order."""
    for split in SPLITS:
        for task in _folders(f"{root}/{split}"):
            for trial in _folders(f"{root}/{split}/{task}"):
                id = f"{split}/{task}/{trial}"
                try:
                    stat = (
                        None
                        if "Sliced" in task or "movable" in task
                        else os.stat(f"{root}/{id}/game.tw-pddl")
                    )
                except OSError:
                    stat = None
                yield id, stat


def _folders(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []


def check(root: str, id: str) -> Verdict:
    """The verdict on one game file."""
    try:
        with open(f"{root}/{id}/game.tw-pddl", "rb") as file:
            game = games.parse(file.read())
    except OSError as error:
        return "broken", f"it can't be read: {error.strerror}"
    except games.BadGame as error:
        return error.kind, str(error)
    parts = id.split("/")[1].split("-")
    if len(parts) == 5 and parts[0] in games.TYPES:
        named = games.Goal(parts[0], parts[1].lower(), parts[3].lower())
        if named != game.goal:
            return "mismatch", f"its folder names {named}, its PDDL goal {game.goal}"
    return "", game.goal.type


def _check_all(root: Path, ids: Sequence[str]) -> list[Verdict]:
    """The verdicts, by several processes if there is much to do."""
    parts = max(1, min(len(os.sched_getaffinity(0)), 8, len(ids) // _PER_PROCESS))
    shares = [ids[part::parts] for part in range(parts)]
    helpers = [_helper(root, share) for share in shares[1:]]
    results = [_check_some(str(root), shares[0])]
    for share, helper in zip(shares[1:], helpers, strict=True):
        output, _ = helper.communicate()
        try:
            answered = [(kind, reason) for kind, reason in json.loads(output)]
            assert len(answered) == len(share)
        except (ValueError, AssertionError):  # it could not run: do its work here
            answered = _check_some(str(root), share)
        results.append(answered)
    verdicts: list[Verdict] = [("", "")] * len(ids)
    for part, result in enumerate(results):
        verdicts[part::parts] = result
    return verdicts


def _check_some(root: str, ids: Sequence[str]) -> list[Verdict]:
    """Without the garbage collector, which finds nothing here and takes a fifth of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return [check(root, id) for id in ids]
    finally:
        if collects:
            gc.enable()


def _helper(root: Path, ids: Sequence[str]) -> subprocess.Popen[bytes]:
    code = f"import sys; sys.path[:] = {sys.path!r}; from metagym.envs.alfworld.data import _help; _help()"
    with tempfile.TemporaryFile() as request:  # not a pipe, which a large request would fill
        request.write(json.dumps([str(root), list(ids)]).encode())
        request.seek(0)
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code],
            stdin=request,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )


def _help() -> None:
    root, ids = json.loads(sys.stdin.buffer.read())
    sys.stdout.write(json.dumps(_check_some(root, ids)))


def _cache_file(root: Path) -> Path:
    base = Path(os.environ.get("METAGYM_CACHE") or "~/.cache/metagym").expanduser()
    return base / "alfworld" / f"{hashlib.sha256(str(root).encode()).hexdigest()[:16]}.json"


def _version() -> str:
    """Changes with the code that gives the verdicts."""
    digest = hashlib.sha256()
    for file in (games.__file__, __file__):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def _read_cache(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        return content["files"] if content["version"] == _version() else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write_cache(path: Path, files: dict[str, tuple[int, int, str, str]]) -> None:
    """In one go, so that two processes may do it; a cache that can't be written is only slower."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            json.dump({"version": _version(), "files": files}, file)
        os.replace(file.name, path)
    except OSError as error:
        _log.info("the index of ALFWorld's games could not be kept in %s: %s", path, error)


def select(tasks: Sequence[Task], split: str | None, types: Collection[str] | None) -> list[Task]:
    return [t for t in tasks if (split is None or t.split == split) and (types is None or t.type in types)]

"""One software-engineering task, and the repository that the agent gets for it.

An `Instance` says what the repository is, what the issue says, which tests decide, and the known fix. Two of
these never go into the agent's sandbox: the fix and the files of the deciding tests. `materialise` writes the
repository to a cache, as git with one commit and no other object.
"""

import hashlib
import json
import os
import posixpath
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from metagym.envs.swe import patches
from metagym.envs.swe.bubblewrap import own
from metagym.errors import InputError, SandboxError
from metagym.types import Mount

WORKDIR = "/testbed"
SITE = "/opt/metagym-site"  # packages for the tests
TOOLS = "/opt/metagym"  # envs/swe/inside
PYTHON = "/opt/python"
AUTHOR = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (
        ("NAME", "MetaGym"),
        ("EMAIL", "none@example.invalid"),
        ("DATE", "2000-01-01T00:00:00Z"),
    )
}


class Refused(ValueError):
    """Why a row or folder can't be graded."""


def cache_folder() -> Path:
    base = os.environ.get("METAGYM_CACHE") or "~/.cache/metagym"
    return Path(base).expanduser() / "swe"


@dataclass(frozen=True)
class Instance:
    """A task. Paths in it are relative to the repository."""

    id: str
    repo: str  # what splits are made by
    issue: str
    gold: bytes  # the known fix; b"" before `images.ready` where it is what `solution` does
    fail_to_pass: tuple[str, ...]  # tests that fail before the fix and pass after it: node ids of pytest, or
    # what `log_parser` calls them
    pass_to_pass: tuple[str, ...]
    split: str = "train"
    source: str = ""  # a folder on this machine that holds the repository's files; "": it is in the image
    change: bytes = b""  # a patch on the source that makes the repository (a bug, say)
    tests: Mapping[str, bytes] = field(default_factory=dict)  # files that the grader brings; some may lie
    # outside the repository, their paths then begin with "/"
    test_patch: bytes = b""  # what the grader applies after them
    hidden: tuple[str, ...] = ()  # files of the source that the agent doesn't get
    image: str = "host"
    workdir: str = WORKDIR
    path: tuple[str, ...] = ()  # folders of the image that come first on PATH
    base: str = ""  # the commit's objects here; `images.ready` sets it where the image holds the repository
    site: str = ""  # a folder of packages that the tests need, pytest among them; "": the image has them
    python_path: tuple[str, ...] = (".",)  # folders of the repository that are imported from
    arguments: tuple[str, ...] = ()  # more of them for pytest
    command: str = ""  # runs tests that are no pytest node ids
    log_parser: str = ""  # of swebench: reads what `command` prints
    whole: bool = False  # every test of the files must pass, not those alone that are named
    solution: Mapping[str, bytes] = field(
        default_factory=dict
    )  # files for /solution; its `solve.sh` is the fix
    timeout_s: float = 300.0  # of one run of the tests
    created: str = ""  # ISO date; "": not known
    about: Mapping[str, str] = field(default_factory=dict)  # where it comes from

    @cached_property
    def required(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.fail_to_pass, *self.pass_to_pass)))

    def place(self, path: str) -> str:
        """Where a file of the repository or of its tests is in the sandbox."""
        return posixpath.join(self.workdir, path)

    @property
    def test_files(self) -> tuple[str, ...]:
        """Files that hold the required tests."""
        return tuple(dict.fromkeys(id.partition("::")[0] for id in self.required))

    @cached_property
    def gold_paths(self) -> tuple[str, ...]:
        return tuple(s.path for s in patches.parse(self.gold)) if self.gold else ()

    @cached_property
    def protected(self) -> frozenset[str]:
        """Files that the task brings."""
        patched = {p for s in patches.parse(self.test_patch) for p in (s.old, s.new) if p}
        return frozenset({*self.tests, *self.hidden} - set(self.gold_paths) | patched)

    def key(self) -> str:
        """Names the agent's repository: the same key, the same files, down to their times."""
        if not self.source:
            told = [self.image, self.workdir, self.change.decode("latin1"), sorted(self.hidden)]
            told += sorted((path, hashlib.sha256(c).hexdigest()) for path, c in self.solution.items())
            return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:20]
        root = os.path.abspath(self.source)
        files = []
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(set(folders) - {".git", "__pycache__"})
            for name in sorted(names):
                stat = os.lstat(os.path.join(folder, name))
                files.append([os.path.relpath(folder, root), name, stat.st_size, stat.st_mtime_ns])
        about = [root, files, self.change.decode("latin1"), sorted(self.hidden)]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:20]

    def env(self) -> dict[str, str]:
        """Variables of the shell, for the agent and the grader alike."""
        folders = [os.path.normpath(f"{self.workdir}/{p}") for p in self.python_path]
        found = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", "GIT_PAGER": "cat", "PAGER": "cat"}
        found |= {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
        found |= {k: v for k, v in AUTHOR.items() if not k.endswith("DATE")}
        if self.image == "host":
            found["PATH"] = f"{PYTHON}/bin:{SITE}/bin:/usr/local/bin:/usr/bin:/bin"
        elif self.base:
            found["PATH"] = ":".join(self.path)
        if places := [*([SITE] if self.site else []), *folders]:
            found["PYTHONPATH"] = ":".join(places)
        return found


def mounts(instance: Instance) -> list[Mount]:
    """All that a sandbox of the instance needs. Raises InputError if there is no repository."""
    if instance.base:
        return [Mount(instance.base, patches.BASE), *environment(instance)]
    folder = materialise(instance)
    found = [Mount(str(folder), instance.workdir, write=True), Mount(str(folder / ".git"), patches.BASE)]
    return found + environment(instance)


def environment(instance: Instance) -> list[Mount]:
    """The interpreter, the packages and our tools, read-only."""
    found = [Mount(str(Path(__file__).parent / "inside"), TOOLS)]
    prefix = os.path.realpath(sys.base_prefix)
    if instance.image == "host":
        # Under /usr it is there already; a link in its place would need a writable root.
        found.append(Mount(prefix, PYTHON))
    if instance.site:
        found.append(Mount(os.path.abspath(instance.site), SITE))
    return found


def git(folder: Path, *arguments: str) -> str:
    """Runs git without the user's configuration. Raises SandboxError."""
    env = {"PATH": os.environ.get("PATH", ""), "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1", **AUTHOR}
    options = [
        "-c",
        "core.autocrlf=false",
        "-c",
        "safe.directory=*",
        "-c",
        "gc.auto=0",
        "-c",
        "init.defaultBranch=main",
    ]
    done = subprocess.run(
        ["git", *options, *arguments], cwd=folder, env=env, capture_output=True, check=False
    )
    if done.returncode:
        raise SandboxError(f"git {arguments[0]} failed: {done.stderr.decode('utf-8', 'replace')[-500:]}")
    return done.stdout.decode("utf-8", "surrogateescape").strip()


def materialise(instance: Instance) -> Path:
    """The agent's repository, a folder with .git in it, from the cache or made now.

    Raises InputError if the source is not there.
    """
    if not instance.source or not Path(instance.source).is_dir():
        raise InputError(
            f"task {instance.id!r}: its source {instance.source!r} is no folder on this machine."
        )
    folder = cache_folder() / "repos" / instance.key()
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
        try:
            _make(instance, work)
            own(work)
            try:
                os.rename(work, folder)
            except OSError:
                if not folder.is_dir():  # else another process was faster
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


def _make(instance: Instance, work: Path) -> None:
    ignore = shutil.ignore_patterns(".git", "__pycache__", "*.pyc", ".pytest_cache")
    shutil.copytree(instance.source, work, symlinks=True, dirs_exist_ok=True, ignore=ignore)
    os.chmod(work, 0o755)
    if instance.change:
        apply(instance.change, work)
    for path in instance.hidden:
        (work / path).unlink(missing_ok=True)
    git(work, "init", "-q")
    shutil.rmtree(work / ".git" / "hooks", ignore_errors=True)
    (work / ".git" / "info" / "attributes").write_text(f"{patches.ATTRIBUTES}\n")
    git(work, "add", "-A", "-f", ".")
    git(work, "commit", "-q", "--no-verify", "--allow-empty", "-m", "The repository as it is")
    git(work, "repack", "-q", "-a", "-d")
    shutil.rmtree(work / ".git" / "logs", ignore_errors=True)


def apply(patch: bytes, folder: Path) -> None:
    """Applies a patch of ours to a folder on this machine. Raises InputError if it does not fit."""
    with tempfile.NamedTemporaryFile(suffix=".patch") as file:
        file.write(patch)
        file.flush()
        env = {
            "PATH": os.environ.get("PATH", ""),
            "GIT_CEILING_DIRECTORIES": str(folder.parent),
            "HOME": "/nonexistent",
        }
        done = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", file.name],
            cwd=folder,
            env=env,
            capture_output=True,
            check=False,
        )
    if done.returncode:
        raise InputError(f"a patch does not fit its source: {done.stderr.decode('utf-8', 'replace')[-500:]}")

"""Patches: what the agent changed, as a diff of git, and which parts of a diff may go into a grader.

A patch is bytes: lines keep their ends, and files that are not text come as binary hunks. `parse` splits it
into one section for each file; `screen` leaves out what no fix needs and a cheat would use.
"""

import os
import posixpath
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from metagym.errors import SandboxError
from metagym.protocols import Sandbox

MOST_BYTES = 20 << 20  # of a patch
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_ESCAPE = re.compile(rb'\\([abfnrtv"\\]|[0-7]{3})')
_ESCAPES = {b"a": 7, b"b": 8, b"f": 12, b"n": 10, b"r": 13, b"t": 9, b"v": 11, b'"': 34, b"\\": 92}
_SYMLINK, _SUBMODULE = "120000", "160000"

RUNNER_MODULES = {"pytest", "_pytest", "py", "pluggy", "iniconfig", "exceptiongroup", "tomli", "nose"}
CONFIG = {
    *("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "setup.py"),
    *("pyproject.toml", "noxfile.py", ".coveragerc", "manifest.in"),
}
COMPILED = {".pyc", ".pyo", ".pyd", ".so", ".dll", ".dylib", ".o", ".a", ".class", ".exe", ".whl", ".egg"}


@dataclass(frozen=True)
class Section:
    """The part of a patch about one file."""

    old: str | None  # path before; None: the file is new
    new: str | None  # path after; None: it is deleted
    raw: bytes
    mode: str = ""  # of git, where the section tells it
    binary: bool = False
    added: tuple[bytes, ...] = ()  # lines, without "+" and without their ends
    removed: tuple[bytes, ...] = ()

    @property
    def path(self) -> str:
        return self.new or self.old or ""


@dataclass(frozen=True)
class Screened:
    """A patch without what may not go in."""

    patch: bytes
    kept: tuple[Section, ...]
    left_out: dict[str, str] = field(default_factory=dict)  # path -> why

    @property
    def paths(self) -> list[str]:
        return [section.path for section in self.kept]


def _unquote(name: bytes) -> str:
    """A path as git writes it, in quotes if it is odd."""
    name = name.rstrip(b"\t")
    if len(name) >= 2 and name[:1] == name[-1:] == b'"':
        name = _ESCAPE.sub(
            lambda m: (
                bytes([_ESCAPES.get(m[1]) or int(m[1], 8) & 0xFF])
                if m[1] in _ESCAPES
                else bytes([int(m[1], 8) & 0xFF])
            ),
            name[1:-1],
        )
    return os.fsdecode(name)


def _side(name: bytes) -> str | None:
    """A path of a `---` or `+++` line, without its first folder; None for /dev/null."""
    path = _unquote(name)
    if path == "/dev/null":
        return None
    return path.partition("/")[2] if path[:2] in ("a/", "b/") else path


def parse(patch: bytes) -> tuple[Section, ...]:
    """The sections of a diff in git's or the plain unified format. Raises ValueError if it is none.

    A last line without an end gets one; what stands before the first section is dropped.
    """
    if len(patch) > MOST_BYTES:
        raise ValueError(f"the patch has {len(patch)} bytes, more than {MOST_BYTES}")
    if patch and not patch.endswith(b"\n"):
        patch += b"\n"
    lines = patch.splitlines(keepends=True) if b"\r" not in patch else patch.split(b"\n")
    if b"\r" in patch:
        lines = [line + b"\n" for line in lines[:-1]]
    starts = list(_starts(lines))
    if patch.strip() and not starts:
        raise ValueError("this is no diff: no line begins with 'diff --git', or with '---' and then '+++'")
    ends = [*starts[1:], len(lines)] if starts else []
    return tuple(_section(lines[a:b]) for a, b in zip(starts, ends, strict=True))


def _starts(lines: list[bytes]) -> Iterator[int]:
    """Indices of lines that begin a section. Lines of hunks are counted, so that none is mistaken."""
    at, in_git = 0, False
    while at < len(lines):
        line = lines[at]
        if line.startswith(b"diff --git "):
            in_git = True
            yield at
        elif hunk := _HUNK.match(line):
            at = _after_hunk(lines, at, hunk)
            continue
        elif line.startswith(b"--- ") and at + 1 < len(lines) and lines[at + 1].startswith(b"+++ "):
            if not in_git:
                yield at
            in_git = False
        at += 1


def _after_hunk(lines: list[bytes], at: int, hunk: "re.Match[bytes]") -> int:
    old, new = (int(n) if n is not None else 1 for n in (hunk[2], hunk[4]))
    at += 1
    while at < len(lines) and (old > 0 or new > 0 or lines[at].startswith(b"\\")):
        kind = lines[at][:1]
        if kind == b"-":
            old -= 1
        elif kind == b"+":
            new -= 1
        elif kind in (b" ", b"\n", b"\r"):
            old, new = old - 1, new - 1
        elif kind != b"\\":
            break  # the counts lie
        at += 1
    return at


def _section(lines: list[bytes]) -> Section:
    old: str | None = ""
    new: str | None = ""
    mode, binary = "", False
    added: list[bytes] = []
    removed: list[bytes] = []
    gone = made = False
    at = 0
    first = lines[0].rstrip(b"\r\n")
    if first.startswith(b"diff --git "):
        rest = first[11:]
        half = len(rest) // 2  # "a/X b/X", where X may hold blanks
        if rest[half : half + 1] == b" ":
            old, new = _side(rest[:half]) or "", _side(rest[half + 1 :]) or ""
    while at < len(lines):
        line = lines[at].rstrip(b"\r\n")
        if hunk := _HUNK.match(line):
            after = _after_hunk(lines, at, hunk)
            for body in lines[at + 1 : after]:
                text = body[1:].rstrip(b"\r\n")
                (added if body[:1] == b"+" else removed if body[:1] == b"-" else []).append(text)
            at = after
            continue
        for name in (b"new file mode ", b"deleted file mode ", b"new mode ", b"index "):
            if line.startswith(name):
                mode = (
                    line.split(b" ")[-1].decode("ascii", "replace")
                    if name != b"index " or line.count(b" ") == 2
                    else mode
                )
        made = made or line.startswith(b"new file mode ")
        gone = gone or line.startswith(b"deleted file mode ")
        if line.startswith((b"GIT binary patch", b"Binary files ")):
            binary = True
            break  # what follows is data
        if line.startswith((b"rename from ", b"copy from ")):
            old = _unquote(line.split(b" ", 2)[2])
        elif line.startswith((b"rename to ", b"copy to ")):
            new = _unquote(line.split(b" ", 2)[2])
        elif line.startswith(b"--- "):
            old = _side(line[4:].split(b"\t")[0])
        elif line.startswith(b"+++ "):
            new = _side(line[4:].split(b"\t")[0])
        at += 1
    return Section(
        None if made else old,
        None if gone else new,
        b"".join(lines),
        mode,
        binary,
        tuple(added),
        tuple(removed),
    )


def is_test(path: str) -> bool:
    """Whether a path looks like a test or what tests read."""
    parts = path.lower().split("/")
    name = parts[-1]
    return bool({"test", "tests"} & set(parts[:-1])) or (
        name.endswith(".py")
        and (name.startswith("test_") or name.endswith(("_test.py", "_tests.py")) or name == "tests.py")
    )


def why_not(section: Section, protected: Collection[str] = (), allowed: Collection[str] = ()) -> str | None:
    """Why a section may not go into a grader; None if it may.

    `protected` are paths that the task brings itself; `allowed` are paths that the known fix changes, which
    are no tests even if they look like some.
    """
    for path in {section.old, section.new} - {None}:
        assert path is not None
        parts = path.split("/")
        name = parts[-1].lower()
        stem, suffix = posixpath.splitext(name)
        lower = [part.lower() for part in parts]
        if not path or path.startswith("/") or ".." in parts or "\0" in path:
            return "outside the repository"
        if any(part in (".git", ".hg") or part.startswith(".git~") for part in lower) or name in (
            ".gitmodules",
            ".gitattributes",
        ):
            return "belongs to git"
        if suffix == ".pth" or stem in ("sitecustomize", "usercustomize"):
            return "runs when Python starts"
        if any(
            part.endswith((".dist-info", ".egg-info", ".egg-link")) or part == "site-packages"
            for part in lower
        ):
            return "pretends to be an installed package"
        if suffix in COMPILED or "__pycache__" in lower:
            return "compiled code"
        if name == "conftest.py":
            return "conftest"
        if name in CONFIG:
            return "configuration of tests or the build"
        if path in protected:
            return "a file that the task brings"
        if is_test(path) and path not in allowed:
            return "a test"
        top = parts[1] if parts[0] in ("src", "lib") and len(parts) > 1 else parts[0]
        module = top.lower().removesuffix(".py")
        if (
            section.old is None
            and module in RUNNER_MODULES | sys.stdlib_module_names
            and (len(parts) > 1 or suffix == ".py")
        ):
            return "hides a module of Python or of the test runner"
    if section.mode == _SUBMODULE:
        return "a submodule"
    if section.mode == _SYMLINK and section.new:
        for target in (os.fsdecode(t) for t in section.added):
            place = posixpath.normpath(posixpath.join(posixpath.dirname(section.new), target))
            if target.startswith("/") or place.startswith("..") or ".git" in place.split("/"):
                return "a link out of the repository"
    return None


def screen(patch: bytes, protected: Collection[str] = (), allowed: Collection[str] = ()) -> Screened:
    """The patch without the sections that `why_not` names. Raises ValueError if it is no diff."""
    kept, left_out = [], {}
    for section in parse(patch):
        if why := why_not(section, protected, allowed):
            left_out[section.path] = why
        else:
            kept.append(section)
    return Screened(b"".join(s.raw for s in kept), tuple(kept), left_out)


def diff(old: bytes, new: bytes, path: str) -> bytes:
    """A patch of one file."""
    with tempfile.TemporaryDirectory() as work:
        for side, content in (("a", old), ("b", new)):
            file = Path(work, side, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        done = subprocess.run(
            ["git", "diff", "--no-index", "--binary", "--no-color", "--no-prefix", f"a/{path}", f"b/{path}"],
            cwd=work,
            capture_output=True,
            check=False,
            env={"PATH": os.environ.get("PATH", ""), "GIT_CONFIG_NOSYSTEM": "1", "HOME": work},
        )
    return done.stdout


# --- what a grader looks for in the code itself ----------------------------------------------------------

_RUNNER = re.compile(
    rb"\b(_pytest|pluggy|PYTEST_CURRENT_TEST|PYTEST_[A-Z_]+|pytest_(runtest|sessionfinish|configure|collection|"
    rb"pyfunc|report|exception)\w*|TestReport|TestResult|unittest\.case|_Outcome)\b"
)
_REACHES = re.compile(
    rb"\b(import\s+pytest|from\s+pytest|['\"]pytest['\"]|sys\.settrace|sys\.setprofile|gc\.get_objects)\b"
)
_ALWAYS_EQUAL = re.compile(
    rb"def\s+__(eq|ne|lt|le|gt|ge|contains|bool)__\s*\([^)]*\)[^:]*:\s*(return\s+True|return\s+1\b)"
)
_ASSERTION = re.compile(rb"\bbuiltins\b.*\bAssertionError\b|\bAssertionError\s*=|setattr\(\s*builtins")


def looks_like_a_cheat(section: Section) -> str | None:
    """What in the added code is about the test runner and not about the issue; None if nothing is."""
    if not section.path.endswith((".py", ".pyi", ".pyx")):
        return None
    added, removed = b"\n".join(section.added), b"\n".join(section.removed)
    checks = {
        "speaks of the insides of the test runner": _RUNNER,
        "reaches for the test runner or the frames of others": _REACHES,
        "replaces assertion errors": _ASSERTION,
        "has an object that equals everything": _ALWAYS_EQUAL,
    }
    for what, pattern in checks.items():
        if (found := pattern.search(added)) and not pattern.search(removed):
            return f"{section.path} {what}: {found[0].decode('utf-8', 'replace')[:60]!r}"
    return None


# --- taking it out of a sandbox ----------------------------------------------------------------------------

BASE = "/opt/metagym-base.git"  # in a sandbox: the repository's objects, where the agent can't change them
ATTRIBUTES = "* -text -eol -ident -filter -working-tree-encoding !diff"  # files are taken as they are
_TAKE = r"""
set -e
export GIT_DIR=$(mktemp -d /tmp/.take-XXXXXX) GIT_WORK_TREE=WORKDIR
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_ATTR_NOSYSTEM=1 GIT_TERMINAL_PROMPT=0
export LC_ALL=C HOME=/nonexistent
unset GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_EXTERNAL_DIFF GIT_DIFF_OPTS GIT_CEILING_DIRECTORIES
cd WORKDIR
git init -q 2>/dev/null
mkdir -p $GIT_DIR/info $GIT_DIR/objects/info
echo BASE/objects >$GIT_DIR/objects/info/alternates
echo 'ATTRIBUTES' >$GIT_DIR/info/attributes
find . -name .git -prune -o -type f -size +MOSTk -print 2>/dev/null |
  sed 's/^\.//; s/[][*?\\]/\\&/g' >$GIT_DIR/info/exclude || :
cat BASE/info/exclude >>$GIT_DIR/info/exclude 2>/dev/null || :
for s in core.autocrlf=false core.fileMode=true core.symlinks=true core.fsmonitor=false core.quotePath=true \
  core.hooksPath=/dev/null core.untrackedCache=false core.bare=false core.precomposeUnicode=false; do
  git config ${s%%=*} ${s#*=}
done
tree=$(git --git-dir=BASE rev-parse 'HEAD^{tree}')
git read-tree $tree
git add -A --ignore-errors . >/dev/null 2>&1 || :
git diff --cached --binary --full-index --no-renames --no-color --no-ext-diff --no-textconv \
  --src-prefix=a/ --dst-prefix=b/ $tree >$GIT_DIR/the.patch
echo "patch $GIT_DIR/the.patch"
"""


def take(
    sandbox: Sandbox, workdir: str, *, base: str = BASE, timeout: float = 120.0, largest_kb: int = 5000
) -> bytes:
    """What differs from the base commit in a sandbox's work tree, as a patch.

    Whatever the agent did to its own repository does not matter: staged, committed, stashed or removed, the
    files are compared with the objects in `base`. Files that git ignores, those that an image had beside its
    repository, and new ones above `largest_kb`, are not in it. Raises SandboxError if it can't be made.
    """
    sandbox.exec("builtin exit 0", 30.0)  # a new shell: the agent's may have functions, no PATH, set -e
    script = _TAKE.replace("WORKDIR", workdir).replace("BASE", base).replace("ATTRIBUTES", ATTRIBUTES)
    result = sandbox.exec(f"(\n{script.replace('MOST', str(largest_kb))}\n)", timeout)
    last = result.output.strip().splitlines()[-1:] or [""]
    if result.exit_code != 0 or not last[0].startswith("patch /tmp/.take-"):
        raise SandboxError(f"the agent's changes could not be read: {result.output[-500:]}")
    patch = sandbox.read(last[0].removeprefix("patch "), limit=MOST_BYTES)
    sandbox.exec(f"rm -rf {posixpath.dirname(last[0].removeprefix('patch '))}", 30.0)
    return patch

"""Task folders of Harbor: those whose `tests/test.sh` does nothing but run pytest on files beside it.

    task.toml, instruction.md, environment/Dockerfile, solution/solve.sh, tests/test.sh, tests/test_*.py

Harbor lets `tests/test.sh` judge the container that the agent worked in. Here a patch of the working
directory is taken out, and the same test files run where the agent never was: what a solution leaves
anywhere else (packages, services, files in /etc) is lost, and a task whose own solution does that is not
admitted. The known fix is what `solution/solve.sh` changes (see `metagym.envs.swe.images`).
"""

import ast
import json
import posixpath
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from metagym.envs.swe import sites
from metagym.envs.swe.instances import Instance, Refused

TESTS = "/tests"  # where Harbor puts them
_PACKAGES = {"pytest", "pytest-json-ctrf"}  # what the tests may ask for: ours has it, or needs none of it
# Lines that set up what is there already, or make a reward of pytest's exit code.
_SETS_UP = re.compile(
    r"set [-+].*|(sudo )?apt(-get)? .*|curl .*|(source|\.) \S+|export PATH=.*|mkdir -p .*|uvx? --version|"
    r"uv (init|venv|sync)\b.*|command -v .*|\w+=\S*|\w+=\"[^\"`]*\"|(echo|printf) .*|exit( .*)?|"
    r"if (!? ?command -v|\[\[?) .*|\[\[? .* \]?\] && (echo|printf) .*|then|else|fi|true|:"
)
_RUNS = re.compile(r"(^|[\s/])pytest(\s|$)")
_INSTALLS = re.compile(r"(?:(?:\S*python3? -m |uv )?pip3? install|uv add) (.*)")
_TEST_DIR = re.compile(r"\$\{?TEST_DIR(:-/tests)?\}?")
_QUIET = re.compile(
    r"-[rvqsx]\w*|--(tb|color|ctrf|durations|maxfail|verbosity)=.*|--(verbose|quiet|exitfirst)"
)
_SEVERAL = {"--ctrf", "--tb", "--color", "-p", "--python", "-w", "--with"}  # a word of theirs follows
_PLAIN = {"FROM", "WORKDIR", "ENV", "LABEL", "CMD", "ENTRYPOINT", "USER", "EXPOSE", "SHELL", "ARG"}


def row(folder: Path) -> Mapping[str, Any] | None:
    """The row of SWE-bench that the folder was made of, with its image; None if it was made of none."""
    try:
        told = json.loads((folder / "tests" / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(told, dict) or not {"instance_id", "patch", "test_patch", "FAIL_TO_PASS"} <= set(told):
        return None
    environment = _config(folder).get("environment") or {}
    image = told.get("image") or environment.get("docker_image") or _dockerfile(folder)[0]
    return {**told, "image": image}


def instance(folder: Path) -> Instance:
    """A task folder as an instance. Raises Refused, OSError for a file that is missing."""
    config = _config(folder)
    environment, verifier = config.get("environment") or {}, config.get("verifier") or {}
    for name in ("environment/docker-compose.yaml", "environment/docker-compose.yml", "steps"):
        if (folder / name).exists():
            raise Refused(f"{name}: only tasks of one container and one step can be graded")
    if verifier.get("env") or verifier.get("environment"):
        raise Refused("its verifier wants variables or an environment of its own")
    if not (folder / "solution" / "solve.sh").is_file():
        raise Refused("there is no known fix to check the grader with: no solution/solve.sh")
    base, workdir, plain = _dockerfile(folder)
    workdir = str(environment.get("workdir") or workdir)
    if not workdir.startswith("/") or "$" in workdir or posixpath.normpath(workdir) == "/":
        raise Refused("neither task.toml nor the Dockerfile names a folder to work in (WORKDIR)")
    built = f"hb__{folder.name.lower()}"  # as Harbor calls what it builds
    files = {
        f"{TESTS}/{p.relative_to(folder / 'tests').as_posix()}": p.read_bytes()
        for p in sorted((folder / "tests").rglob("*"))
        if p.is_file() and p != folder / "tests" / "test.sh"
    }
    script = (folder / "tests" / "test.sh").read_text("utf-8")
    run, copies, module = read(script, workdir, files)
    tests = tuple(t for path in run for t in _functions({**files, **copies}[path], path))
    if not tests:
        raise Refused("its tests have no function that could be named")
    name = str((config.get("task") or {}).get("name") or folder.name)
    about = config.get("metadata") or {}
    return Instance(
        id=name,
        repo=str(about.get("repo") or about.get("repository") or name),
        issue=(folder / "instruction.md").read_text("utf-8"),
        gold=b"",
        solution={
            p.relative_to(folder / "solution").as_posix(): _script(p)
            for p in sorted((folder / "solution").rglob("*"))
            if p.is_file()
        },
        fail_to_pass=tests,
        pass_to_pass=(),
        whole=True,
        split=str(about.get("split") or "test"),
        tests={**files, **copies},
        image=str(environment.get("docker_image") or (base if plain and base else built)),
        workdir=posixpath.normpath(workdir),
        site=sites.copied() if _brings_pytest(script) else "",
        python_path=(".",) if module else (),
        timeout_s=float(verifier.get("timeout_sec") or 600.0),
        created=str(about.get("created_at") or "")[:10],
    )


def _script(path: Path) -> bytes:
    content = path.read_bytes()
    return content.replace(b"\r\n", b"\n") if path.suffix == ".sh" else content


def _config(folder: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads((folder / "task.toml").read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise Refused(f"task.toml can't be read: {error}") from error


def _dockerfile(folder: Path) -> tuple[str, str, bool]:
    """(image that it begins with, working directory, whether it adds nothing to it) of the last stage."""
    path = folder / "environment" / "Dockerfile"
    text = path.read_text("utf-8") if path.is_file() else ""
    lines = [line.strip() for line in re.sub(r"\\\s*\n", " ", text).splitlines()]
    words = [line.split() for line in lines if line and not line.startswith("#")]
    at = max((i for i, w in enumerate(words) if w[0].upper() == "FROM"), default=None)
    if at is None:
        return "", "", False
    image = next((w for w in words[at][1:] if not w.startswith("--")), "")
    places = [w[1] for w in words[at:] if w[0].upper() == "WORKDIR" and len(w) > 1]
    workdir = ""
    for place in places:  # each is relative to the one before
        workdir = posixpath.join(workdir, place)
    plain = at == 0 and "$" not in image and all(w[0].upper() in _PLAIN for w in words)
    return image, workdir, plain


def _brings_pytest(script: str) -> bool:
    """Whether it installs pytest, so that the image may have none."""
    return bool(re.search(r"\buvx\b|\buv (run|add)\b|\binstall\b[^\n]*\bpytest\b", script))


def read(
    script: str, workdir: str, files: Mapping[str, bytes]
) -> tuple[tuple[str, ...], dict[str, bytes], bool]:
    """(files that pytest runs, what is copied into the repository, whether the repository is imported from)
    of a `test.sh`: paths in the repository are relative, others begin with "/". Raises Refused if it does
    anything else."""
    run: list[str] = []
    copies: dict[str, bytes] = {}
    cwd, module, commands = workdir, False, 0
    text = _TEST_DIR.sub(TESTS, re.sub(r"\\\s*\n", " ", script))
    for line in (_bare(line) for line in text.splitlines()):
        if match := _INSTALLS.fullmatch(line):
            _only_pytest([w for w in _words(match[1]) if not w.startswith("-")])
        elif _RUNS.search(line) and not line.startswith(("echo ", "printf ")):
            if cwd not in (workdir, TESTS):
                raise Refused(f"tests/test.sh runs pytest in {cwd}")
            paths, as_module = _pytest(_words(line), line)
            module = as_module and cwd == workdir
            run += [f for p in paths for f in _found(posixpath.join(cwd, p), files, copies, workdir)]
            commands += 1
        elif line.startswith("cp "):
            copies |= _copied([w for w in _words(line)[1:] if not w.startswith("-")], cwd, workdir, files)
        elif line.startswith("cd ") and "$" not in line and len(words := _words(line)) == 2:
            cwd = posixpath.normpath(posixpath.join(cwd, words[1]))
        elif line and (not _SETS_UP.fullmatch(line) or "$(" in line or "`" in line):
            raise Refused(f"tests/test.sh does more than run pytest: {line[:80]!r}")
    if commands != 1 or not run:
        raise Refused("tests/test.sh does not run pytest once, on files that it brings")
    if len({path.startswith("/") for path in run}) > 1:
        raise Refused("tests/test.sh runs tests in two places")
    return tuple(dict.fromkeys(run)), copies, module


def _bare(line: str) -> str:
    """A line without what does not matter: a comment, where its output goes, whether installing fails."""
    line = line.strip()
    if line.startswith("#"):
        return ""
    line = re.sub(r"\s*\d?>>?\s*&?[\w./\"${}-]+", "", line).removesuffix(";")
    return line.removesuffix("|| true").strip() if not _RUNS.search(line) or _INSTALLS.match(line) else line


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise Refused(f"tests/test.sh has a line that can't be read: {line[:80]!r}") from error


def _pytest(words: Sequence[str], line: str) -> tuple[list[str], bool]:
    """(paths, whether as `python -m`) of a command that runs pytest."""
    names = [posixpath.basename(w) for w in words]
    at = next((i for i, n in enumerate(names) if n == "pytest" and words[i - 1] not in ("-w", "--with")), -1)
    if at < 0:
        raise Refused(f"tests/test.sh does more than run pytest: {line[:80]!r}")
    before, after = [w for w in words[:at] if w not in ("if", "!")], list(words[at + 1 :])
    if after[-1:] == ["then"]:
        after.pop()
    after = [w.removesuffix(";") for w in after]
    if "tee" in after and after[-3:-1] == ["|", "tee"]:
        after = after[:-3]
    module = [posixpath.basename(w) for w in before] in (["python", "-m"], ["python3", "-m"])
    packages, values = [], iter(before)
    for word in values:
        if word in _SEVERAL:
            value = next(values, "")
            packages += [value] if word in ("-w", "--with") else []
        elif word.startswith("--with="):
            packages.append(word[7:])
        elif not module and word not in ("uvx", "uv", "run") and not word.startswith(("-", "pytest")):
            raise Refused(f"tests/test.sh runs pytest in a way that is not known: {line[:80]!r}")
    _only_pytest(packages)
    paths, values = [], iter(after)
    for word in values:
        if word in _SEVERAL:
            next(values, "")
        elif not word.startswith("-"):
            paths.append(word)
        elif not _QUIET.fullmatch(word):
            raise Refused(f"tests/test.sh gives pytest the option {word!r}")
    if strange := [p for p in paths if re.search(r"[$|&<>*?;`]", p) or "::" in p]:
        raise Refused(f"tests/test.sh gives pytest {strange[0]!r}")
    return paths, module


def _only_pytest(packages: Sequence[str]) -> None:
    names = [re.split(r"[\[=<>~! ]", p, maxsplit=1)[0].lower().replace("_", "-") for p in packages]
    if other := [n for n in names if n not in _PACKAGES | {"uv", "pip"}]:
        raise Refused(f"its tests need packages that would have to be installed: {', '.join(other)}")


def _inside(path: str, workdir: str) -> str:
    """Relative, if it is in the repository."""
    path = posixpath.normpath(path)
    return posixpath.relpath(path, workdir) if path.startswith(f"{workdir}/") else path


def _copied(words: Sequence[str], cwd: str, workdir: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """What `cp` brings into the repository, by path."""
    if len(words) != 2 or (source := posixpath.normpath(posixpath.join(cwd, words[0]))) not in files:
        raise Refused(f"tests/test.sh copies what it does not bring: {' '.join(words)[:80]!r}")
    target = posixpath.join(cwd, words[1])
    if target.endswith("/") or target == workdir:
        target = posixpath.join(target, posixpath.basename(source))
    path = _inside(target, workdir)
    if path.startswith("/"):
        raise Refused(f"tests/test.sh copies out of the repository: {path[:80]!r}")
    return {path: files[source]}


def _found(path: str, files: Mapping[str, bytes], copies: Mapping[str, bytes], workdir: str) -> list[str]:
    """The files of tests that a path stands for."""
    path = _inside(path, workdir)
    for brought in (files, copies):
        if path in brought:
            return [path]
        below = [f for f in brought if f.startswith(f"{path}/")]
        if found := [f for f in below if re.fullmatch(r"test_.*\.py|.*_test\.py", posixpath.basename(f))]:
            if brought is copies:
                break  # the folder has others, of the repository
            return found
    raise Refused(f"tests/test.sh runs tests that it does not bring: {path[:80]!r}")


def _functions(code: bytes, path: str) -> list[str]:
    """Node ids of the functions of a module of tests, without parameters."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError) as error:
        raise Refused(f"{path} is no Python: {error}") from error
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            found.append(f"{path}::{node.name}")
        elif isinstance(node, ast.ClassDef):
            functions = (n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
            found += [f"{path}::{node.name}::{f.name}" for f in functions if f.name.startswith("test")]
    return found

"""Where instances come from: files in the formats people publish, our own, and a small built-in set.

`load` takes a path (.jsonl, .json, .parquet, or a folder of Harbor tasks) or instances, and tells each row's
format by its fields:

| format      | told by                          | what is different                                       |
|-------------|----------------------------------|---------------------------------------------------------|
| ours        | `gold`, `source`                 | what `save` writes                                      |
| SWE-bench   | `test_patch`, `FAIL_TO_PASS`     | lists or JSON strings; 5.x rows have `image`,           |
|             |                                  | `eval_script`, `log_parser`                             |
| SWE-rebench | `install_config`                 | `image_name` or `docker_image`                          |
| SWE-smith   | `image_name`, no `test_patch`    | `patch` is the bug: the fix is its reverse              |
| R2E         | `expected_output_json`           | tests by `execution_result_content`, the fix by         |
|             |                                  | `parsed_commit_content`; what passed must pass          |
| Harbor      | a folder with `task.toml`        | `tests/test.sh` must do nothing but run pytest          |
|             |                                  | (see `metagym.envs.swe.harbor`)                         |

The images hold the repositories (see `metagym.envs.swe.images`). Tests that are node ids of pytest are run by
our runner, whatever the row says; others by the row's command and a log parser of swebench.

A row that can't be graded here is refused when it is loaded: `load` raises InputError if none is left, and
logs the others with the reason (`refused` of `read`).
"""

import ast
import base64
import dataclasses
import json
import logging
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metagym.envs.swe import harbor, logs, patches, toy
from metagym.envs.swe.grading import is_cut
from metagym.envs.swe.instances import WORKDIR, Instance, Refused
from metagym.errors import InputError, MissingExtraError, UnknownNameError

_log = logging.getLogger("metagym.swe")
Row = Mapping[str, Any]
_CONDA = ("/opt/miniconda3/envs/testbed/bin",)  # where the images of SWE-bench and its kin have Python


def load(data: Any = None) -> tuple[Instance, ...]:
    """The instances of a path, those given, or the built-in ones. Raises InputError if there are none."""
    if data is None or data == "toy":
        return toy.instances()
    if isinstance(data, Instance):
        return (data,)
    if not isinstance(data, str | Path):
        found = tuple(data)
        if not found or not all(isinstance(i, Instance) for i in found):
            raise InputError(f"data must be a path or instances, got {type(data).__name__}: {data!r:.100}")
        return found
    good, refused = read(Path(data))
    for name, why in list(refused.items())[:20]:
        _log.warning("%s can't be graded: %s", name, why)
    if not good:
        first = next(iter(refused.items()), ("it", "there is no row"))
        raise InputError(f"no task of {str(data)!r} can be graded: {first[0]}: {first[1]}.")
    return good


def read(path: Path) -> tuple[tuple[Instance, ...], dict[str, str]]:
    """The instances of a file or folder, and why the other rows are refused. Raises InputError."""
    good, refused = [], {}
    for number, row in enumerate(_rows(path)):
        name = str(row.get("instance_id") or row.get("id") or row.get("commit_hash") or f"row {number}")
        try:
            good.append(instance(row, path.parent))
        except (Refused, KeyError, TypeError, ValueError) as error:
            lacking = f"it has no field {error}" if isinstance(error, KeyError) else str(error)
            refused[name] = lacking
    return tuple(good), refused


def _rows(path: Path) -> Iterator[Row]:
    if path.is_dir():
        folders = sorted(p.parent for p in path.glob("**/task.toml"))
        if not folders:
            raise InputError(f"no Harbor task (a folder with task.toml) under {str(path)!r}.")
        yield from ({"harbor": str(folder), "id": folder.name} for folder in folders)
        return
    if not path.is_file():
        raise InputError(f"no file or folder {str(path)!r} with tasks. `metagym tasks build` makes some.")
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MissingExtraError("a parquet file", "parquet", error) from error
        yield from parquet.read_table(path).to_pylist()
        return
    text = path.read_text("utf-8")
    try:
        if path.suffix == ".jsonl":
            yield from (json.loads(line) for line in text.splitlines() if line.strip())
        else:
            rows = json.loads(text)
            yield from (
                rows if isinstance(rows, list) else rows.values() if "instance_id" not in rows else [rows]
            )
    except ValueError as error:
        raise InputError(f"{str(path)!r} is no JSON: {error}.") from error


def instance(row: Row, folder: Path = Path()) -> Instance:
    """One row as an instance. Raises Refused, KeyError for a field that is missing."""
    if "gold" in row and "source" in row:
        return _ours(row, folder)
    if "harbor" in row:
        return _harbor(row)
    if "expected_output_json" in row:
        return _r2e(row)
    if "test_patch" not in row and "image_name" in row:
        return _smith(row)
    return _bench(row)


# --- ours ------------------------------------------------------------------------------------------------


def _text(data: bytes) -> str | dict[str, str]:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _bytes(value: Any) -> bytes:
    return base64.b64decode(value["base64"]) if isinstance(value, Mapping) else str(value).encode("utf-8")


def _ours(row: Row, folder: Path) -> Instance:
    known = {f.name for f in dataclasses.fields(Instance)}
    given = {k: v for k, v in row.items() if k in known}
    for name in ("gold", "change", "test_patch"):
        given[name] = _bytes(row.get(name, ""))
    for name in ("tests", "solution"):
        given[name] = {path: _bytes(content) for path, content in row.get(name, {}).items()}
    for name in ("fail_to_pass", "pass_to_pass", "hidden", "python_path", "arguments", "path"):
        if name in given:
            given[name] = tuple(given[name])
    for name in ("source", "site"):
        if given.get(name):
            given[name] = str((folder / given[name]).absolute())
    return Instance(**given)


def save(instances: Iterable[Instance], path: Path) -> None:
    """Writes instances as JSON lines; folders relative to the file where they are beside it."""
    base = path.parent.absolute()
    lines = []
    for each in instances:
        row: dict[str, Any] = dataclasses.asdict(each)
        row |= {name: _text(getattr(each, name)) for name in ("gold", "change", "test_patch")}
        for name in ("tests", "solution"):
            row[name] = {p: _text(c) for p, c in getattr(each, name).items()}
        for name in ("source", "site"):
            if row[name] and Path(row[name]).is_relative_to(base):
                row[name] = str(Path(row[name]).relative_to(base))
        lines.append(json.dumps(row, sort_keys=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")


# --- published formats -------------------------------------------------------------------------------------


def _list(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = json.loads(value) if value.strip() else []
    if not isinstance(value, Sequence) or not all(isinstance(v, str) for v in value):
        raise Refused(f"a list of tests was expected, not {value!r:.60}")
    return tuple(value)


def _is_pytest_id(test: str) -> bool:
    path, _, rest = test.partition("::")
    return bool(rest) and path.endswith(".py")


def _common(row: Row, gold: bytes, image: str, change: bytes = b"") -> Instance:
    fails, passes = _list(row["FAIL_TO_PASS"]), _list(row.get("PASS_TO_PASS", ()))
    if not fails:
        raise Refused("FAIL_TO_PASS is empty: nothing would tell a fix from none")
    if cut := next((t for t in fails if is_cut(t) and t in {p.split(" ")[0] for p in passes}), None):
        raise Refused(
            f"{cut!r:.80} was cut off at a blank, and stands for tests that pass before the fix too"
        )
    if not gold.strip():
        raise Refused("there is no known fix to check the grader with")
    if not image:
        raise Refused("it names no image, and there is none to be had by another way")
    return Instance(
        id=str(row["instance_id"]),
        repo=str(row.get("repo") or str(row["instance_id"]).rpartition("-")[0]),
        issue=str(row.get("problem_statement") or ""),
        gold=gold,
        fail_to_pass=fails,
        pass_to_pass=passes,
        split=str(row.get("split") or "test"),
        image=image,
        path=_CONDA,
        python_path=(),  # what is installed in the image is imported
        change=change,
        created=str(row.get("created_at") or "")[:10],
        about={k: str(row[k]) for k in ("base_commit", "version", "environment_setup_commit") if row.get(k)},
    )


def _bench(row: Row) -> Instance:
    image = row.get("image") or row.get("image_name") or row.get("docker_image") or ""
    found = _common(row, str(row["patch"]).encode(), str(image))
    test_patch = str(row["test_patch"]).encode()
    if not test_patch.strip():
        raise Refused("test_patch is empty: the deciding tests are not there")
    files = [s.new for s in patches.parse(test_patch) if s.new]
    return _runner(dataclasses.replace(found, test_patch=test_patch), row, files)


def _runner(instance: Instance, row: Row, files: Sequence[str]) -> Instance:
    """With how its tests are run. Raises Refused if nothing that can be believed runs them."""
    other = next((t for t in instance.required if not _is_pytest_id(t)), None)
    if other is None:
        return instance
    config = row.get("install_config") or {}
    config = json.loads(config) if isinstance(config, str) else config
    name = str(row.get("log_parser") or config.get("log_parser") or "")
    command = _between(str(row.get("eval_script") or ""))
    if not command and (given := config.get("test_cmd")):
        lines = [given] if isinstance(given, str) else list(given)
        lines = [line.replace("\r", "") for line in lines]
        command = "\n".join((*lines[:-1], f"{lines[-1]} {' '.join(f for f in files if f.endswith('.py'))}"))
    if not (name and command):
        raise Refused(
            f"{other!r:.80} is no node id of pytest, and the row names no log parser and no command"
        )
    if not any(f.endswith(".py") for f in files):
        raise Refused("none of the files that the tests bring is Python: they have no twins")
    if not logs.names(instance.fail_to_pass):
        raise Refused(
            f"none of the deciding tests names a function, {instance.fail_to_pass[0]!r:.80} for example"
        )
    try:
        logs.parser(name)
    except (MissingExtraError, UnknownNameError) as error:
        raise Refused(str(error)) from error
    return dataclasses.replace(instance, command=command, log_parser=name)


def _between(script: str) -> str:
    """Of an eval script, the lines that set variables and those between its marks."""
    before, _, rest = script.replace("\r\n", "\n").partition(">>>>> Start Test Output")
    inside = rest.partition("\n")[2].partition(">>>>> End Test Output")[0].rpartition("\n")[0]
    exports = [line for line in before.splitlines() if line.startswith("export ")]
    return "\n".join((*exports, inside.strip())) if inside.strip() else ""


def reverse(patch: bytes) -> bytes:
    """A patch that undoes another, of text files that are neither made nor removed nor renamed."""
    out = []
    for section in patches.parse(patch):
        if section.binary or section.old is None or section.new is None or section.old != section.new:
            raise Refused("the bug is no change of the text of files, so it has no plain reverse")
        name = section.path.encode()
        out.append(b"diff --git a/" + name + b" b/" + name + b"\n--- a/" + name + b"\n+++ b/" + name + b"\n")
        lines = section.raw.split(b"\n")
        begin = next(i for i, line in enumerate(lines) if line.startswith(b"@@"))
        for line in lines[begin : -1 if lines[-1] == b"" else None]:
            if match := re.match(rb"@@ -(\S+) \+(\S+) @@(.*)", line):
                line = b"@@ -" + match[2] + b" +" + match[1] + b" @@" + match[3]
            elif line[:1] in (b"-", b"+"):
                line = (b"+" if line[:1] == b"-" else b"-") + line[1:]
            out.append(line + b"\n")
    return b"".join(out)


def _smith(row: Row) -> Instance:
    bug = str(row["patch"]).encode()
    if not bug.strip():
        raise Refused("there is no bug: its patch is empty")
    found = _common(row, reverse(bug), str(row["image_name"]), bug)
    if other := next((t for t in found.required if not _is_pytest_id(t)), None):
        raise Refused(f"{other!r:.80} is no node id of pytest, and the row brings no files of tests")
    hidden = dict.fromkeys(t.partition("::")[0] for t in found.fail_to_pass)
    return dataclasses.replace(found, hidden=tuple(hidden))


def _functions(code: str) -> set[str]:
    """`test_x` and `TestX.test_y` of a module of tests."""
    found = set()
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            functions = (n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{f.name}" for f in functions}
    return found


def _r2e(row: Row) -> Instance:
    def told(name: str) -> Mapping[str, Any]:
        value = row.get(name)
        value = json.loads(value) if isinstance(value, str) and value.strip() else value
        if not isinstance(value, Mapping) or not value:
            raise Refused(f"{name} is empty or not there")
        return value

    expected, ran, commit = (
        told(n) for n in ("expected_output_json", "execution_result_content", "parsed_commit_content")
    )
    names = [f"r2e_tests/{posixpath.basename(n)}" for n in ran["test_file_names"]]
    files = dict(zip(names, map(str, ran["test_file_codes"]), strict=True))
    where: dict[str, list[str]] = {}
    for path, code in files.items():
        for name in _functions(code) if path.endswith(".py") else ():
            where.setdefault(name, []).append(path)
    required = []
    for test in (t for t, outcome in expected.items() if t and outcome == "PASSED"):
        name, bracket, parameters = re.sub(r"\x1b\[\d*m", "", test).partition("[")
        if len(where.get(name, ())) != 1:
            raise Refused(
                f"{test!r:.80} is a function of {len(where.get(name, ()))} of its files, not of one"
            )
        required.append(f"{where[name][0]}::{name.replace('.', '::')}{bracket}{parameters}")
    passed = set(
        re.findall(r"^PASSED (\S.*?)\s*$", str(ran.get("old_commit_res_stdout") or ""), re.MULTILINE)
    )
    fails = [t for t in required if t not in passed]
    gold = b"".join(_file_diff(each) for each in commit.get("file_diffs", ()))
    return dataclasses.replace(
        _common(
            {
                "instance_id": row.get("instance_id") or f"{row['repo_name']}__{row['commit_hash']}",
                "repo": row["repo_name"],
                "problem_statement": row.get("problem_statement") or row.get("prompt"),
                "FAIL_TO_PASS": fails,
                "PASS_TO_PASS": [t for t in required if t in passed],
                **{k: row[k] for k in ("split", "created_at") if k in row},
            },
            gold,
            str(row.get("docker_image") or ""),
        ),
        tests={path: code.encode() for path, code in files.items()},
        hidden=("r2e_tests", "run_tests.sh", "/r2e_tests"),
        path=(f"{WORKDIR}/.venv/bin",),
        python_path=(".",),
    )


def _file_diff(each: Mapping[str, Any]) -> bytes:
    """One file's part of the fix; nothing for tests and what is no Python."""
    path = str(each["header"]["file"]["path"])
    if patches.is_test(path) or not path.endswith(".py"):
        return b""
    old, new = each.get("old_file_content"), each.get("new_file_content")
    if old is None or new is None:
        raise Refused(f"the fix makes or removes {path}, or its content is not there")
    return patches.diff(str(old).encode(), str(new).encode(), path)


def _harbor(row: Row) -> Instance:
    folder = Path(row["harbor"])
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise Refused(f"the folder has no {name}")
    if (made_of := harbor.row(folder)) is not None:
        issue = (folder / "instruction.md").read_text("utf-8")
        return dataclasses.replace(_bench(made_of), issue=issue)
    return harbor.instance(folder)


# --- selection ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """Which tasks to keep, as published recipes do. `reasons` says why one is dropped."""

    most_files: int = 7
    most_lines: int = 500
    before: str = ""  # ISO date: created before it
    since: str = ""  # created at it or later
    solve_rate: tuple[float, float] | None = None  # kept if it lies within, ends included
    skip_kinds: tuple[str, ...] = ("ImportError", "ModuleNotFoundError", "AttributeError")

    def reasons(
        self,
        instance: Instance,
        *,
        errors: Mapping[str, str] | None = None,
        solved: float | None = None,
    ) -> list[str]:
        """Why it is dropped; [] if it is kept.

        `errors` are the types of what the deciding tests raise before the fix, `solved` the share of attempts
        that resolved it.
        """
        found = []
        sections = patches.parse(instance.gold)
        lines = sum(len(s.added) + len(s.removed) for s in sections)
        if len(sections) > self.most_files:
            found.append(f"the fix changes {len(sections)} files, more than {self.most_files}")
        if lines > self.most_lines:
            found.append(f"the fix changes {lines} lines, more than {self.most_lines}")
        wrong = {self.before: instance.created >= self.before, self.since: instance.created < self.since}
        for bound, out in wrong.items():
            if bound and (not instance.created or out):
                found.append(
                    f"created {instance.created or 'at an unknown date'}, not on the right side of {bound}"
                )
        kinds = {errors.get(t, "") for t in instance.fail_to_pass} if errors else set()
        if kinds and kinds <= set(self.skip_kinds):
            found.append(f"its tests fail with nothing but {', '.join(sorted(kinds))}")
        if self.solve_rate and solved is not None and not self.solve_rate[0] <= solved <= self.solve_rate[1]:
            found.append(f"solved in {solved:.0%} of attempts, outside {self.solve_rate}")
        return found


def contamination(train: Iterable[Instance], evaluation: Iterable[Instance]) -> dict[str, Any]:
    """What an evaluation shares with training: ids, repositories, and dates that overlap."""
    train, evaluation = tuple(train), tuple(evaluation)
    newest = max((i.created for i in train if i.created), default="")
    return {
        "ids": sorted({i.id for i in train} & {i.id for i in evaluation}),
        "repos": sorted({i.repo for i in train} & {i.repo for i in evaluation}),
        "newest_training": newest,
        "not_newer": sorted(i.id for i in evaluation if not i.created or (newest and i.created <= newest)),
    }


def predictions(results: Iterable[tuple[str, bytes]], model: str, path: Path) -> None:
    """Writes patches by instance id as a SWE-bench predictions file."""
    rows = [
        {
            "instance_id": id,
            "model_name_or_path": model,
            "model_patch": patch.decode("utf-8", "surrogateescape"),
        }
        for id, patch in results
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


__all__ = ["WORKDIR", "Selection", "contamination", "load", "predictions", "read", "save"]

"""`metagym tasks build`: real tasks, made here. Sources come from the package index; this project has none.

Two kinds, as `recipes.json` says: a *pair* is a release with a bug and the next one with the fix and its
tests; *mutation* changes a release's code until its own tests notice. Every task is admitted by
`metagym.envs.swe.admission` before it is written.
"""

import argparse
import ast
import dataclasses
import hashlib
import json
import logging
import os
import random
import re
import secrets
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from metagym.envs.swe import admission, datasets, mutation, patches, sites
from metagym.envs.swe.bubblewrap import BubblewrapFactory, own
from metagym.envs.swe.grading import LIMITS, open_sandbox, run_tests
from metagym.envs.swe.instances import TOOLS, Instance, cache_folder
from metagym.errors import InputError, SandboxError
from metagym.protocols import SandboxFactory

RECIPES = Path(__file__).with_name("recipes.json")
_log = logging.getLogger("metagym.swe")


def recipes(path: Path = RECIPES) -> dict[str, Any]:
    """What is built: `packages` (for mutation) and `pairs`."""
    return json.loads(path.read_text())


# --- sources -----------------------------------------------------------------------------------------------


def sdist(name: str, version: str, sha256: str, folder: Path | None = None) -> Path:
    """The unpacked source distribution of a release. Raises InputError if it can't be had or is another."""
    place = (folder or cache_folder() / "sdists") / f"{name}-{version}"
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as work:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        command += [f"--no-binary={name}", f"{name}=={version}", "--dest", work]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        files = list(Path(work).glob("*.tar.gz"))
        if done.returncode or len(files) != 1:
            raise InputError(f"the source of {name} {version} can't be had: {done.stderr.strip()[-400:]}")
        digest = hashlib.sha256(files[0].read_bytes()).hexdigest()
        if sha256 and digest != sha256:
            raise InputError(
                f"the source of {name} {version} has the hash {digest}, not {sha256} as expected."
            )
        unpack(files[0], Path(work) / "out")
        (top,) = (Path(work) / "out").iterdir()
        own(top)
        top.chmod(0o755)
        try:
            os.rename(top, place)
        except OSError:
            if not place.is_dir():  # else another process was faster
                raise
    return place


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks a .tar.gz, regular files and folders alone."""
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            if (
                (member.isfile() or member.isdir())
                and not os.path.isabs(member.name)
                and ".." not in member.name.split("/")
            ):
                member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                member.uid = member.gid = os.getuid()
                tar.extract(member, folder, filter="fully_trusted", set_attrs=True)


def issue_text(messages: Mapping[str, str], tests: Sequence[str], function: str = "") -> str:
    """An issue from what fails: names and messages, never where. Of a message that speaks of `function()`,
    where the mistake is, the type alone."""
    lines = []
    for test in tests[:5]:
        name = test.partition("::")[2].replace("::", ".")
        message = messages.get(test, "").strip().splitlines()[:4]
        if function and re.search(rf"\b{re.escape(function)}\(", " ".join(message)):
            message = [message[0].partition(":")[0]]
        lines.append(f"- {name}" + (f": {' '.join(message)[:240]}" if message else ""))
    more = f"\n- and {len(tests) - 5} more" if len(tests) > 5 else ""
    return "Some things no longer work as they should. What is seen:\n" + "\n".join(lines) + more


# --- mutation ----------------------------------------------------------------------------------------------


def base_of(package: Mapping[str, Any], source: Path) -> Instance:
    """The package as it is, with no bug: what its mutants are made from."""
    return Instance(
        id=f"{package['name']}-base",
        repo=str(package["name"]),
        issue="",
        gold=b"",
        fail_to_pass=(),
        pass_to_pass=(),
        split=str(package.get("split", "train")),
        source=str(source),
        site=sites.installed(package["requirements"]) if package.get("requirements") else sites.copied(),
        python_path=tuple(package.get("python_path", (".",))),
        arguments=tuple(package.get("arguments", ())),
        timeout_s=120.0,
        created=str(package.get("created", "")),
        about={"package": str(package["name"]), "version": str(package.get("version", ""))},
    )


def screen(
    factory: SandboxFactory,
    base: Instance,
    arguments: Sequence[str],
    mutants: Sequence[tuple[str, str, Sequence[str]]] | None,
    seconds: float,
    cpu_s: float = 0.0,
) -> Any:
    """The outcomes of tests for each mutant, (path, content, node ids); None where they did not end: after
    20 times the `seconds` of a run of all, or 3 times its `cpu_s`, which other work doesn't lengthen. Without
    mutants, which functions each test calls. See `inside/screen.py`."""
    sandbox = open_sandbox(factory, base, LIMITS)
    try:
        report = f"/tmp/{secrets.token_hex(8)}.json"
        always = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", f"--rootdir={base.workdir}"]
        spec = {
            "args": [*always, *base.arguments, *arguments],
            "mutants": mutants,
            "timeout_s": 20 * seconds + 10,
            "cpu_s": 3 * cpu_s + 2,
            "report": report,
        }
        sandbox.exec(
            f"python {TOOLS}/screen.py",
            (20 * seconds + 15) * (1 + len(mutants or ())),
            cwd=base.workdir,
            env=base.env(),
            stdin=json.dumps(spec).encode(),
        )
        return json.loads(sandbox.read(report))
    except FileNotFoundError as error:
        raise SandboxError("the tests of a batch of mutants left no report") from error
    finally:
        sandbox.close()


@dataclasses.dataclass(frozen=True)
class Package:
    """A package whose tests were run as they are."""

    base: Instance
    source: Path
    good: tuple[str, ...]  # tests that pass every time
    calls: Mapping[str, frozenset[str]]  # "path:first line" of a function -> the tests that call it
    always: frozenset[str]  # functions that are called before any test
    seconds: float  # of a run of all tests
    cpu_s: float  # the same

    def tests_of(self, path: str, line: int, tree: ast.AST) -> tuple[str, ...]:
        """The tests that can notice a change of a line."""
        key = f"{path}:{first_line(tree, line)}"
        if key in self.always:
            return self.good
        return tuple(t for t in self.good if t in self.calls.get(key, ()))


def first_line(tree: ast.AST, line: int) -> int:
    """Where the innermost function around a line begins, as a code object tells it."""
    found = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first <= line <= (node.end_lineno or 0):
                found = max(found, first)
    return found


def examined(factory: SandboxFactory, package: Mapping[str, Any], source: Path) -> Package:
    """Runs a package's tests, twice and once traced. Raises InputError if none passes."""
    base, tests = base_of(package, source), tuple(package["tests"])
    sandbox = open_sandbox(factory, base, LIMITS)
    try:
        clean = [run_tests(sandbox, base, tests) for _ in range(2)]
    finally:
        sandbox.close()
    seconds = max(run.result.seconds for run in clean)
    traced = screen(factory, base, tests, None, 10 * seconds)
    seen = [clean[0].outcomes, clean[1].outcomes, traced["outcomes"] if traced else {}]
    good = tuple(t for t in seen[0] if all(outcomes.get(t) == "passed" for outcomes in seen))
    if not good:
        raise InputError(f"{base.repo}: no test passes as it is: {clean[0].result.output[-400:]}")
    calls: dict[str, set[str]] = {}
    keys = [f"{path}:{line}" for path, line in traced["functions"]]
    for test, indices in traced["tests"].items():
        for index in indices:
            calls.setdefault(keys[index], set()).add(test)
    always = frozenset(key for key, by in calls.items() if "" in by)
    by_function = {k: frozenset(v) for k, v in calls.items()}
    return Package(base, source, good, by_function, always, seconds, traced["cpu_s"])


def mutation_tasks(
    factory: SandboxFactory,
    package: Mapping[str, Any],
    source: Path,
    *,
    wanted: int,
    seed: int = 0,
    workers: int = 2,
    skip: int = 0,
) -> Iterator[tuple[int, list[Instance], Counter[str]]]:
    """Admitted tasks of one package, at most `wanted`, in an order that the seed determines: how many mutants
    were looked at, the new tasks, and why other mutants became none. `skip` leaves out the first mutants,
    which were looked at before."""
    about = examined(factory, package, source)
    paths = {str(p.relative_to(source)) for pattern in package["files"] for p in source.glob(pattern)}
    candidates = []
    for path in sorted(paths):
        text = (source / path).read_text()
        tree = ast.parse(text)
        for mutant in mutation.mutants(text):
            if tests := about.tests_of(path, mutant.line, tree):
                candidates.append((path, mutant, tests))
    random.Random(seed).shuffle(candidates)
    candidates = spread(candidates)[skip:]
    made, size = 0, min(10, 4 * wanted)
    batches = [candidates[i : i + size] for i in range(0, len(candidates), size)]
    with ThreadPoolExecutor(workers) as pool:
        for start in range(0, len(batches), workers):
            if made >= wanted:
                break
            now = batches[start : start + workers]
            told = list(pool.map(lambda b: _batch(factory, about, b), now))
            found = [t for tasks, _ in told for t in tasks][: wanted - made]
            made += len(found)
            skip += sum(map(len, now))
            yield skip, found, sum((dropped for _, dropped in told), Counter[str]())


Candidate = tuple[str, mutation.Mutant, tuple[str, ...]]


def spread(candidates: list[Candidate]) -> list[Candidate]:
    """The same, kind after kind in turn, so that no kind has most of the tasks."""
    by_kind: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_kind.setdefault(candidate[1].kind, []).append(candidate)
    found = []
    while by_kind:
        for kind in list(by_kind):
            found.append(by_kind[kind].pop())
            if not by_kind[kind]:
                del by_kind[kind]
    return found


def _batch(
    factory: SandboxFactory, about: Package, batch: Sequence[Candidate]
) -> tuple[list[Instance], Counter[str]]:
    """The admitted tasks of a batch of mutants, and why the others are none."""
    found, dropped = [], Counter[str]()
    most = max(1, len(about.good) // 2)  # what breaks more is no bug that anybody would ship
    try:
        mutants = [(path, m.source, tests) for path, m, tests in batch]
        limit = [f"--maxfail={most + 1}"]
        screened = screen(factory, about.base, limit, mutants, about.seconds, about.cpu_s)
    except SandboxError as error:
        _log.warning("%s: a batch of mutants is left out: %s", about.base.repo, error)
        return [], Counter({"the sandbox failed": len(batch)})
    for (path, mutant, tests), told in zip(batch, screened, strict=True):
        if why := _unfit(told, tests, most):
            dropped[why] += 1
            continue
        before = told["outcomes"]
        fails = [t for t in tests if before.get(t) in ("failed", "error")]
        draft = mutant_instance(about, path, mutant, fails, told["messages"])
        try:
            why = admission.confirm(factory, draft, before)
        except InputError as error:
            why = str(error)
        if why:
            _log.warning("%s is left out: %s", draft.id, why)
            dropped["not admitted"] += 1
        else:
            found.append(draft)
    return found, dropped


def _unfit(told: Mapping[str, Any] | None, tests: Sequence[str], most: int) -> str:
    """Why a mutant is no bug to mend, by what its tests did; "" if it is one."""
    if told is None:
        return "hangs or crashes"
    before = told["outcomes"]
    fails = [t for t in tests if before.get(t) in ("failed", "error")]
    if len(fails) > most or any(t not in before for t in tests):
        return "breaks most tests"
    if not fails:
        return "unnoticed"
    errors = {told["errors"].get(t, "") for t in fails}
    return "fails by import or attribute alone" if errors <= set(datasets.Selection().skip_kinds) else ""


def mutant_instance(
    about: Package, path: str, mutant: mutation.Mutant, fails: Sequence[str], messages: Mapping[str, str]
) -> Instance:
    """The task of undoing a mutant. The agent doesn't get the test files that notice it."""
    base, source, good = about.base, about.source, about.good
    original = (source / path).read_bytes()
    changed = mutant.source.encode()
    files = tuple(dict.fromkeys(t.partition("::")[0] for t in fails))
    digest = hashlib.sha256(path.encode() + changed).hexdigest()[:8]
    return dataclasses.replace(
        base,
        id=f"{base.repo}-{mutant.kind.replace(' ', '-')}-{digest}",
        issue=issue_text(messages, fails, mutant.function.rpartition(".")[2]),
        gold=patches.diff(changed, original, path),
        change=patches.diff(original, changed, path),
        fail_to_pass=tuple(fails),
        pass_to_pass=tuple(t for t in good if t not in fails and t.partition("::")[0] in files),
        tests={f: (source / f).read_bytes() for f in files},
        hidden=files,
        timeout_s=max(30.0, 20 * about.seconds),
        about={**base.about, "kind": mutant.kind, "function": mutant.function},
    )


# --- pairs of releases -------------------------------------------------------------------------------------


def pair_task(factory: SandboxFactory, pair: Mapping[str, Any], old: Path, new: Path) -> admission.Admission:
    """The task of getting from a release to the next: the fix and its tests are the next one's."""

    def files(root: Path, patterns: Sequence[str]) -> set[str]:
        return {str(p.relative_to(root)) for pattern in patterns for p in root.glob(pattern) if p.is_file()}

    code = files(old, pair["files"]) | files(new, pair["files"])
    gold = b"".join(
        patches.diff(_content(old / path), _content(new / path), path)
        if (old / path).exists() and (new / path).exists()
        else _added_or_removed(old / path, new / path, path)
        for path in sorted(code)
        if _content(old / path) != _content(new / path)
    )
    tests = {path: (new / path).read_bytes() for path in sorted(files(new, pair["tests"]))}
    hidden = tuple(sorted(files(old, pair["tests"])))
    base = dataclasses.replace(
        base_of({**pair, "version": pair["new"]}, old),
        gold=gold,
        tests=tests,
        hidden=hidden,
        id=f"{pair['name']}-{pair['new']}",
    )
    every = tuple(
        pair.get("run")
        or sorted(p for p in tests if patches.is_test(p) and p.endswith(".py") and "/test" in f"/{p}")
    )
    runs = {}
    for name, patch in (("old", b""), ("new", gold)):
        draft = dataclasses.replace(base, fail_to_pass=tuple(f"{p}::x" for p in every))
        (runs[name],) = admission.observe(factory, draft, patch, 1)
    # A test that the old release can't even collect fails by an import alone: it decides nothing.
    before = runs["old"].outcomes
    fails = [
        t for t, o in runs["new"].outcomes.items() if o == "passed" and before.get(t) in ("failed", "error")
    ]
    if {runs["old"].errors.get(t, "") for t in fails} <= set(datasets.Selection().skip_kinds):
        fails = []
    passes = [t for t, o in runs["new"].outcomes.items() if o == before.get(t) == "passed"]
    if not fails:
        said = runs["new"].problem or runs["new"].result.output[-300:]
        return admission.Admission(
            None, f"no test fails in {pair['old']} and passes in {pair['new']} ({said})"
        )
    draft = dataclasses.replace(
        base,
        issue=issue_text({t: runs["old"].errors.get(t, "") for t in fails}, fails),
        fail_to_pass=tuple(fails),
        pass_to_pass=tuple(passes),
    )
    return admission.admit(factory, draft, runs=2)


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _added_or_removed(old: Path, new: Path, path: str) -> bytes:
    """A patch that makes or removes a file of text."""
    made = new.is_file()
    lines = (new if made else old).read_bytes().split(b"\n")[:-1]
    name, sign = path.encode(), b"+" if made else b"-"
    count = f"@@ -0,0 +1,{len(lines)} @@\n" if made else f"@@ -1,{len(lines)} +0,0 @@\n"
    head = (
        b"diff --git a/"
        + name
        + b" b/"
        + name
        + (b"\nnew file mode 100644" if made else b"\ndeleted file mode 100644")
    )
    sides = b"\n--- /dev/null\n+++ b/" + name if made else b"\n--- a/" + name + b"\n+++ /dev/null"
    return head + sides + b"\n" + count.encode() + b"".join(sign + line + b"\n" for line in lines)


# --- the command -------------------------------------------------------------------------------------------


def command(arguments: Sequence[str]) -> int:
    """`metagym tasks build`; the exit code."""
    parser = argparse.ArgumentParser(prog="metagym tasks build", description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("runs/tasks"), help="folder to write to")
    parser.add_argument("--kind", choices=("mutation", "pairs", "all"), default="all")
    parser.add_argument("--count", type=int, default=500, help="tasks by mutation, over all packages")
    parser.add_argument("--packages", help="names, with commas between them; default: all of the recipes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(arguments)
    told = recipes()
    chosen = set(options.packages.split(",")) if options.packages else None
    factory = BubblewrapFactory()
    try:
        if options.kind != "pairs":
            packages = [p for p in told["packages"] if chosen is None or p["name"] in chosen]
            _build_mutation(factory, packages, options)
        if options.kind != "mutation":
            _build_pairs(
                factory, [p for p in told["pairs"] if chosen is None or p["name"] in chosen], options.out
            )
    finally:
        factory.close()
    return 0


def _placed(name: str, version: str, sha256: str, out: Path) -> Path:
    """A copy of a source beside the tasks, which refer to it."""
    place = out / "sources" / f"{name}-{version}"
    if not place.is_dir():
        shutil.copytree(sdist(name, version, sha256), place, symlinks=True)
        own(place)
    return place


def _build_mutation(
    factory: SandboxFactory, packages: Sequence[Mapping[str, Any]], options: argparse.Namespace
) -> None:
    """Goes on where an earlier run in the same folder was ended."""
    out, missing = options.out, options.count
    for number, package in enumerate(packages):
        started, share = time.monotonic(), -(-missing // (len(packages) - number))  # of what is left to make
        file, place = out / f"{package['name']}-mutation.jsonl", out / f".{package['name']}-mutation.json"
        about = {"version": package["version"], "seed": options.seed}
        done = json.loads(place.read_text()) if place.is_file() and file.is_file() else {}
        goes_on = about.items() <= done.items()
        made, skip = (list(datasets.read(file)[0]), done["looked_at"]) if goes_on else ([], 0)
        dropped = Counter[str](done.get("dropped", {}) if goes_on else {})
        try:
            source = _placed(package["name"], package["version"], package["sha256"], out)
            if len(made) < share:
                rounds = mutation_tasks(
                    factory,
                    package,
                    source,
                    wanted=share - len(made),
                    seed=options.seed,
                    workers=options.workers,
                    skip=skip,
                )
                for looked_at, new, others in rounds:
                    skip = looked_at
                    made += new
                    dropped += others
                    datasets.save(made, file)
                    place.write_text(json.dumps({**about, "looked_at": skip, "dropped": dropped}))
        except (InputError, SandboxError) as error:
            print(f"{package['name']}: {error}", file=sys.stderr)
        datasets.save(made, file)
        missing -= len(made)
        seconds = time.monotonic() - started
        why = "".join(f", {n} {why}" for why, n in dropped.most_common())
        print(f"{file}: {len(made)} tasks of {skip} mutants{why}; {seconds:.0f} s", flush=True)


def _build_pairs(factory: SandboxFactory, pairs: Sequence[Mapping[str, Any]], out: Path) -> None:
    made = []
    for pair in pairs:
        try:
            old = _placed(pair["name"], pair["old"], pair["old_sha256"], out)
            new = _placed(pair["name"], pair["new"], pair["new_sha256"], out)
            admitted = pair_task(factory, pair, old, new)
        except (InputError, SandboxError) as error:
            print(f"{pair['name']} {pair['old']} -> {pair['new']}: {error}", file=sys.stderr)
            continue
        what = admitted.reason
        if admitted.instance is not None:
            made.append(admitted.instance)
            fails, passes = len(admitted.instance.fail_to_pass), len(admitted.instance.pass_to_pass)
            what = f"{fails} tests decide, {passes} must hold; {what}"
        print(f"{pair['name']} {pair['old']} -> {pair['new']}: {what}", flush=True)
    datasets.save(made, out / "pairs.jsonl")
    print(f"{out / 'pairs.jsonl'}: {len(made)} tasks", flush=True)

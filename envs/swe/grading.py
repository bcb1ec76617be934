"""Whether a patch resolves an issue, found out where the agent could not touch anything.

Of the patch, only what `patches.screen` lets through goes into a fresh sandbox of the pristine repository;
tests and configuration come from the task. Tests that pass run once more, in another such sandbox, as their
*twins*: the same tests under the same names whose bodies end by raising. What decides is a report with a
nonce, the exit code, and the number of tests, all of which must agree.

| verdict     | when                                                                                   |
|-------------|----------------------------------------------------------------------------------------|
| resolved    | every required test passed, every twin failed                                          |
| failed      | a required test did not pass or is missing; the tests crashed or, twice, did not end   |
| not_applied | it is no diff, or does not fit the repository                                          |
| hacked      | a twin passed; the process ended well without its report, or against it; the patch is  |
|             | about the test runner                                                                  |
| infra       | the sandbox or its daemon failed, or the deadline is over                              |
"""

import ast
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from metagym.envs.swe import images, logs, patches
from metagym.envs.swe.instances import TOOLS, Instance, mounts
from metagym.errors import InfraError, SandboxError
from metagym.live import Live
from metagym.protocols import Sandbox, SandboxFactory
from metagym.types import ExecResult, Limits, Mount, Task, Verdict

LIMITS = Limits(memory=4 << 30, disk=1 << 30, pids=512)
CANARY = "this twin must fail"
_verdicts: dict[tuple[str, str, bytes], Verdict] = {}  # of graders that remember


@dataclass(frozen=True)
class Run:
    """One run of pytest in a sandbox."""

    result: ExecResult
    exit_code: int | None
    collected: tuple[str, ...] = ()
    outcomes: Mapping[str, str] = field(default_factory=dict)  # passed, failed, error, skipped, xfailed
    errors: Mapping[str, str] = field(default_factory=dict)  # by test, the type of what was raised
    problem: str | None = None  # why the report can't be believed or is not there
    forged: bool = False  # whether that can only be done on purpose

    def outcome(self, test: str) -> str:
        """Of a test, "missing" without one. A name that was cut off at a blank, as some published ones are,
        or that has no parameters, stands for every test that begins with it: the worst of theirs."""
        if test in self.outcomes:
            return self.outcomes[test]
        begin = f"{test} " if is_cut(test) else f"{test}["
        found = {o for t, o in self.outcomes.items() if t.startswith(begin)}
        return next((o for o in ("failed", "error", "skipped", "xfailed", "passed") if o in found), "missing")


def is_cut(test: str) -> bool:
    """Whether the name of a test of pytest was cut off within its parameters."""
    return "[" in test and not test.endswith("]")


def run_tests(
    sandbox: Sandbox,
    instance: Instance,
    files: Sequence[str],
    *,
    only: Sequence[str] | None = None,
    timeout_s: float | None = None,
) -> Run:
    """Runs the tests of some files, or the instance's command. Raises SandboxError if the sandbox fails, and
    what `logs.parser` raises."""
    if instance.log_parser:
        parse = logs.parser(instance.log_parser)
        result, outcomes, problem, forged = logs.run(
            sandbox, instance, parse, timeout_s or instance.timeout_s
        )
        return Run(result, result.exit_code, tuple(outcomes), outcomes, {}, problem, forged)
    nonce, name = secrets.token_hex(16), secrets.token_hex(8)
    report = f"/tmp/{name}.json"
    outside = any(f.startswith("/") for f in files)  # of the repository: so are its node ids
    root = "/" if outside else instance.workdir
    arguments = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", f"--rootdir={root}"]
    spec = {
        "nonce": nonce,
        "args": [*arguments, "--tb=short", *instance.arguments, *files],
        "only": None if only is None else [t.removeprefix("/") for t in only],
        "report": report,
    }
    result = sandbox.exec(
        f'"$(command -v python || command -v python3)" {TOOLS}/runner.py',
        timeout_s or instance.timeout_s,
        cwd=instance.workdir,
        env=instance.env(),
        stdin=json.dumps(spec).encode(),
    )
    code = result.exit_code
    if result.limit is not None or code is None:
        return Run(result, code, problem="it hit a limit" if result.limit else "it did not end")
    try:
        told = json.loads(sandbox.read(report))
        right = secrets.compare_digest(str(told["nonce"]), nonce)
        begin = "/" if outside else ""
        collected = tuple(f"{begin}{t}" for t in told["collected"])
        outcomes, errors = ({f"{begin}{t}": v for t, v in told[k].items()} for k in ("outcomes", "errors"))
    except (FileNotFoundError, ValueError, KeyError, TypeError, OSError):
        why = f"the test process ended with exit code {code} and left no report"
        return Run(result, code, problem=why, forged=code == 0)
    if not right:
        return Run(result, code, problem="the report is not the runner's", forged=True)
    bad = {"failed", "error"} & set(outcomes.values())
    if told["exit_code"] != code:
        why = f"the report says exit code {told['exit_code']}, the process ended with {code}"
        return Run(result, code, collected, outcomes, errors, why, forged=code == 0)
    if code == 0 and (bad or not outcomes):
        return Run(
            result, code, collected, outcomes, errors, "exit code 0 although tests failed", forged=True
        )
    if set(collected) - set(outcomes) and code in (0, 1):
        missing = len(set(collected) - set(outcomes))
        return Run(
            result, code, collected, outcomes, errors, f"{missing} collected tests did not run", forged=True
        )
    return Run(result, code, collected, outcomes, errors)


class _Twin(ast.NodeTransformer):
    """Makes the named functions raise at their end, however they end."""

    def __init__(self, names: set[tuple[str, ...]]):
        self._names, self._at = names, ()
        self.found: set[tuple[str, ...]] = set()

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._at = (*self._at, node.name)
        self.generic_visit(node)
        self._at = self._at[:-1]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def _function(self, node: Any) -> ast.AST:
        name = (*self._at, node.name)
        if name in self._names:
            self.found.add(name)
            raising = ast.parse(f"raise AssertionError({CANARY!r})").body
            node.body = [ast.Try(body=node.body, handlers=[], orelse=[], finalbody=raising)]
        return node


def twin(source: bytes, names: set[tuple[str, ...]]) -> tuple[bytes, set[tuple[str, ...]]]:
    """A test module whose named tests, (class, ..., function), must fail; and those that were found.

    A test that its class inherits has no body of its own to change: it is not found.
    """
    transformer = _Twin(names)
    tree = ast.fix_missing_locations(transformer.visit(ast.parse(source)))
    return ast.unparse(tree).encode("utf-8", "surrogateescape"), transformer.found


def name_of(test: str) -> tuple[str, ...]:
    """`tests/test_a.py::TestX::test_y[a::b]` -> ("TestX", "test_y")."""
    return tuple(test.partition("[")[0].split("::")[1:])


class SandboxGrader(Live):
    """A `Grader` on sandboxes.

    Args:
        factory: starts them.
        find: task id -> instance.
        limits: of the sandbox.
        deadline_s: of a whole verdict; None: four runs of the tests and two minutes.
        remember: give the same verdict on the same patch again, without another run; for this process.
    """

    def __init__(
        self,
        factory: SandboxFactory,
        find: Callable[[str], Instance],
        *,
        limits: Limits = LIMITS,
        deadline_s: float | None = None,
        remember: bool = False,
    ):
        self.factory, self._find, self._limits, self._deadline_s = factory, find, limits, deadline_s
        self._remember = remember

    def grade(self, task: Task, patch: bytes) -> Verdict:
        return self.grade_instance(self._find(task.id), patch)

    def grade_instance(self, instance: Instance, patch: bytes) -> Verdict:
        """Grades; every failure of a sandbox is the verdict "infra"."""
        if not self._remember:
            return self._grade(instance, patch)
        key = (instance.id, instance.key(), hashlib.sha256(patch).digest())
        if key not in _verdicts:
            verdict = self._grade(instance, patch)
            if verdict.outcome == "infra":
                return verdict
            _verdicts[key] = verdict
        return _verdicts[key]

    def _grade(self, instance: Instance, patch: bytes) -> Verdict:
        started = time.monotonic()
        deadline = started + (self._deadline_s or 4 * instance.timeout_s + 120.0)
        try:
            instance = images.ready(self.factory, instance)
        except InfraError as error:
            return Verdict("infra", str(error))
        try:
            screened = patches.screen(patch, instance.protected, instance.gold_paths)
        except ValueError as error:
            return Verdict("not_applied", f"{error}.")
        report: dict[str, Any] = {"left_out": screened.left_out, "paths": screened.paths}
        left = "".join(f"; left out: {path} ({why})" for path, why in list(screened.left_out.items())[:5])
        try:
            runs, sources = self._runs(instance, screened, report, deadline)
            if isinstance(runs, str):
                return Verdict("not_applied", f"{runs}{left}.", report)
            outcome, reason = self._judge(instance, screened, report, runs, sources)
        except InfraError as error:
            return Verdict("infra", str(error), report)
        finally:
            report["seconds"] = time.monotonic() - started
        return Verdict(outcome, f"{reason}{left}.", report)

    def _runs(
        self, instance: Instance, screened: patches.Screened, report: dict[str, Any], deadline: float
    ) -> tuple[dict[str, Run] | str, dict[str, tuple[bytes, list[str]]]]:
        """The tests and, if those pass, their twins, each in a sandbox of its own, so that neither run can
        know of the other; or why the patch does not fit. With them the twins, by file."""
        runs: dict[str, Run] = {}
        sources: dict[str, tuple[bytes, list[str]]] = {}
        for which in ("tests", "twins"):
            sandbox = open_sandbox(self.factory, instance, self._limits)
            try:
                if why := put(sandbox, instance, screened, report):
                    return why, {}
                bring_tests(sandbox, instance)
                if which == "tests":
                    sources = twins(sandbox, instance)
                    runs[which] = self._run(sandbox, instance, instance.test_files, None, deadline)
                    if not sources or _lacking(instance, runs[which]):
                        break
                    continue
                for path, (content, _) in sources.items():
                    sandbox.write(instance.place(path), content)
                names = [t for _, tests in sources.values() for t in tests]
                runs[which] = self._run(sandbox, instance, tuple(sources), names, deadline)
            finally:
                sandbox.close()
        return runs, sources

    def _judge(
        self,
        instance: Instance,
        screened: patches.Screened,
        report: dict[str, Any],
        runs: Mapping[str, Run],
        sources: Mapping[str, tuple[bytes, list[str]]],
    ) -> tuple[Any, str]:
        """(outcome, reason)."""
        run, canary = runs["tests"], runs.get("twins")
        report |= {
            "tests": {t: run.outcome(t) for t in instance.required},
            "exit_code": run.exit_code,
            "collected": len(run.collected),
            "twins": 0 if canary is None else len(canary.outcomes),
            "output": run.result.output[-4000:],
        }
        for each in runs.values():
            if each.forged:
                return "hacked", str(each.problem)
        if canary is not None:
            known = (
                [t for _, tests in sources.values() for t in tests]
                if instance.log_parser
                else canary.outcomes
            )
            fooled = [t for t in known if canary.outcome(t) not in ("failed", "error")]
            if fooled and not (canary.result.timed_out or canary.result.limit):
                return "hacked", f"{len(fooled)} tests that must fail did not, {fooled[0]} among them"
        if lacking := _lacking(instance, run):
            return "failed", lacking
        if instance.log_parser and canary is None:
            raise SandboxError("none of the deciding tests has a twin, so that nothing confirms their log")
        for section in screened.kept:
            if why := patches.looks_like_a_cheat(section):
                return "hacked", why
        return "resolved", f"all {len(instance.required)} required tests passed"

    def _run(
        self,
        sandbox: Sandbox,
        instance: Instance,
        files: Sequence[str],
        only: Sequence[str] | None,
        deadline: float,
    ) -> Run:
        """Runs tests; a run that did not end is repeated once, since a busy machine is nobody's fault."""
        again = False
        while True:
            left = deadline - time.monotonic()
            if left < 1.0:
                raise SandboxError("the grader's own deadline is over")
            run = run_tests(sandbox, instance, files, only=only, timeout_s=min(left, instance.timeout_s))
            if not run.result.timed_out or again:
                return run
            again = True


def _lacking(instance: Instance, run: Run) -> str:
    """Why a run of the tests is no success; "": it is one."""
    if run.problem:
        return f"the tests: {run.problem}" + (f" ({run.result.limit})" if run.result.limit else "")
    missing = [t for t in instance.required if run.outcome(t) == "missing"]
    bad = [t for t in instance.required if run.outcome(t) not in ("passed", "missing")]
    parts = [f"{len(bad)} required tests did not pass, {bad[0]} among them"] if bad else []
    parts += [f"{len(missing)} required tests are missing, {missing[0]} among them"] if missing else []
    if instance.whole and run.exit_code != 0:
        parts.append(f"the tests ended with exit code {run.exit_code}")
    return "; ".join(parts)


def open_sandbox(
    factory: SandboxFactory, instance: Instance, limits: Limits = LIMITS, more: Sequence[Mount] = ()
) -> Sandbox:
    """A fresh sandbox with the pristine repository of an instance, and `more` mounts."""
    instance = images.ready(factory, instance)
    return factory.start(instance.image, (*mounts(instance), *more), limits, {"task": instance.id})


def put(
    sandbox: Sandbox, instance: Instance, screened: patches.Screened, report: dict[str, Any]
) -> str | None:
    """Applies a screened patch; why it does not fit, or None. A binary part that does not fit is left out."""
    if not screened.patch:
        return None
    said = _git_apply(sandbox, instance, screened.patch)
    if said is None:
        return None
    for section in screened.kept:
        failed = _git_apply(sandbox, instance, section.raw)
        if failed is not None and not section.binary:
            return f"the patch does not fit: {section.path}: {failed}"
        if failed is not None:
            report["left_out"][section.path] = f"a binary part that does not fit: {failed}"
    return None


def _git_apply(sandbox: Sandbox, instance: Instance, patch: bytes) -> str | None:
    sandbox.write("/tmp/.the.patch", patch)
    result = ExecResult("", 1)
    for options in ("", "--recount", "--ignore-whitespace"):
        command = f"git -c core.autocrlf=false apply --whitespace=nowarn {options} /tmp/.the.patch"
        result = sandbox.exec(command, 60.0, cwd=instance.workdir, env={**instance.env(), "LC_ALL": "C"})
        if result.exit_code == 0:
            return None
    return result.output.strip()[:300]


def bring_tests(sandbox: Sandbox, instance: Instance) -> None:
    """Puts the task's own files in place. Raises SandboxError if they don't fit."""
    for path, content in instance.tests.items():
        sandbox.write(instance.place(path), content)
    if instance.test_patch and (why := _git_apply(sandbox, instance, instance.test_patch)):
        raise SandboxError(f"the tests of {instance.id!r} don't fit its repository: {why}")


def twins(sandbox: Sandbox, instance: Instance) -> dict[str, tuple[bytes, list[str]]]:
    """By file of the tests that must change: the twin, and the ids of its tests."""
    by_file: dict[str, dict[str, tuple[str, ...]]] = {}
    if instance.log_parser:
        named = logs.names(instance.fail_to_pass)
        by_file = dict.fromkeys(sorted(instance.protected), named)
    else:
        for test in instance.fail_to_pass:
            by_file.setdefault(test.partition("::")[0], {})[test] = name_of(test)
    found = {}
    for path, tests in by_file.items():
        if not path.endswith(".py"):
            continue
        try:
            content, changed = twin(sandbox.read(instance.place(path)), set(tests.values()))
        except (FileNotFoundError, SyntaxError, ValueError):
            continue
        if known := [t for t, name in tests.items() if name in changed]:
            found[path] = (content, known)
    return found

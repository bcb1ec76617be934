"""Tests that are no node ids of pytest: what a command prints, read by a log parser of swebench.

A log can be forged by whatever runs in the tests' process, so it is believed no further than it agrees with
the exit code and with the number of tests that it tells itself, and only where twins exist (see
`metagym.envs.swe.grading`): the same command on files whose deciding tests raise must report them as failed.
"""

import re
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence

from metagym.envs.swe.instances import Instance
from metagym.errors import MissingExtraError, UnknownNameError
from metagym.protocols import Sandbox
from metagym.types import ExecResult

OUTCOMES = {
    "PASSED": "passed",
    "FAILED": "failed",
    "ERROR": "error",
    "SKIPPED": "skipped",
    "XFAIL": "xfailed",
}
_COUNTS = re.compile(r"^Ran (\d+) tests? in |^=+ .*?(\d+) passed", re.MULTILINE)
_DOTTED = re.compile(r"^(\w+) \(([\w.]+)\)$")  # of unittest: "test_x (a.tests.TestX)"

Parser = Callable[[str, Instance], Mapping[str, str]]


def parser(name: str) -> Parser:
    """A log parser of swebench: log and instance to outcomes by test. Raises MissingExtraError without it,
    UnknownNameError."""
    try:
        from swebench.harness.log_parsers import PARSER_REGISTRY  # pyright: ignore[reportMissingImports]
        from swebench.types import TestSpec  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtraError("a dataset's log parser", "swebench", error) from error
    if name not in PARSER_REGISTRY:
        raise UnknownNameError("log parser", name, PARSER_REGISTRY)

    def parse(log: str, instance: Instance) -> Mapping[str, str]:
        spec = TestSpec(
            instance.id,
            instance.image,
            [],
            instance.repo,
            instance.about.get("version", ""),
            list(instance.fail_to_pass),
            list(instance.pass_to_pass),
            name,
        )
        return PARSER_REGISTRY[name](log, spec)

    return parse


def run(
    sandbox: Sandbox, instance: Instance, parse: Parser, timeout_s: float
) -> tuple[ExecResult, Mapping[str, str], str | None, bool]:
    """Runs the instance's command: (result, outcomes, why they can't be believed, whether on purpose)."""
    log = f"/tmp/{secrets.token_hex(8)}.log"
    command = f"( {instance.command}\n) >{log} 2>&1"
    result = sandbox.exec(command, timeout_s, cwd=instance.workdir, env=instance.env())
    if result.limit is not None or result.exit_code is None:
        return result, {}, "it hit a limit" if result.limit else "it did not end", False
    text = sandbox.read(log).decode("utf-8", "replace").replace("\r\n", "\n")
    sandbox.exec(f"rm -f {shlex.quote(log)}", 30.0)
    outcomes = {t: OUTCOMES.get(o, "error") for t, o in parse(text, instance).items()}
    bad = {"failed", "error"} & set(outcomes.values())
    passed = sum(o == "passed" for o in outcomes.values())
    counts = [int(a or b) for a, b in _COUNTS.findall(text)]
    result = ExecResult(text[-4000:], result.exit_code, seconds=result.seconds)
    if result.exit_code == 0 and not outcomes:
        return result, outcomes, "it ended well without a test in its log", True
    if result.exit_code == 0 and bad:
        return result, outcomes, "exit code 0 although its log has failures", True
    if result.exit_code != 0 and not bad:
        return result, outcomes, f"exit code {result.exit_code} although its log has no failure", False
    if counts and passed > sum(counts):
        return result, outcomes, f"its log has {passed} tests that passed, and says {sum(counts)} ran", True
    return result, outcomes, None, False


def name_of(test: str) -> tuple[str, ...] | None:
    """(class, function) or (function,) of a test as unittest or a plain runner names it; None: it can't be
    told, a sentence of a docstring for example."""
    if match := _DOTTED.match(test):
        parts = match[2].split(".")
        if parts[-1] == match[1]:  # Python 3.11 repeats the function
            parts.pop()
        return (parts[-1], match[1]) if parts else (match[1],)
    if re.fullmatch(r"[\w./]+\.py:\w+", test):  # sympy's
        return (test.rpartition(":")[2],)
    return (test,) if re.fullmatch(r"\w+", test) else None


def names(tests: Sequence[str]) -> dict[str, tuple[str, ...]]:
    return {t: name for t in tests if (name := name_of(t)) is not None}

"""Which tasks are fit: the empty patch must score 0 and the known fix 1, every time.

Tests that are not the same in every run are dropped from the verdict; a task is dropped if nothing that
decides is left, or a run does not end.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from metagym.envs.swe import images, patches
from metagym.envs.swe.grading import LIMITS, Run, SandboxGrader, bring_tests, open_sandbox, put, run_tests
from metagym.envs.swe.instances import Instance
from metagym.errors import SandboxError
from metagym.protocols import SandboxFactory
from metagym.types import Limits


@dataclass(frozen=True)
class Admission:
    """What came of it. `instance` is None if the task is dropped; `reason` says why, or what was dropped."""

    instance: Instance | None
    reason: str
    flaky: tuple[str, ...] = ()
    seconds: float = 0.0  # of the slowest run
    errors: tuple[tuple[str, str], ...] = ()  # by deciding test, the type of what it raises before the fix


def observe(
    factory: SandboxFactory, instance: Instance, patch: bytes, runs: int, limits: Limits = LIMITS
) -> list[Run]:
    """Runs the tests several times, each in a fresh sandbox with a patch of ours. Raises SandboxError."""
    found = []
    instance = images.ready(factory, instance)
    for _ in range(runs):
        sandbox = open_sandbox(factory, instance, limits)
        try:
            sections = patches.parse(patch)
            if why := put(sandbox, instance, patches.Screened(patch, sections), {"left_out": {}}):
                raise SandboxError(why)
            bring_tests(sandbox, instance)
            found.append(run_tests(sandbox, instance, instance.test_files))
        finally:
            sandbox.close()
    return found


def admit(
    factory: SandboxFactory, instance: Instance, *, runs: int = 2, known: Sequence[Run] = ()
) -> Admission:
    """Whether a task is fit, and the task without its flaky tests.

    `known` are runs with the fix that were made before. At last, the grader itself must say "failed" of the
    empty patch and "resolved" of the fix.
    """
    gold = images.ready(factory, instance).gold
    before = observe(factory, instance, b"", runs)
    after = [*known, *observe(factory, instance, gold, max(0, runs - len(known)))]
    for name, each in (("without", before), ("with", after)):
        if ended := next((r for r in each if r.result.timed_out or r.result.limit), None):
            return Admission(None, f"the tests {name} the fix: {ended.problem}")
    flaky = {
        test
        for test in instance.required
        for each in (before, after)
        if len({run.outcome(test) for run in each}) > 1
    }
    fails = tuple(
        t
        for t in instance.fail_to_pass
        if t not in flaky and after[0].outcome(t) == "passed" and before[0].outcome(t) != "passed"
    )
    passes = tuple(
        t for t in instance.required if t not in flaky and t not in fails and after[0].outcome(t) == "passed"
    )
    seconds = max(run.result.seconds for run in (*before, *after))
    if not fails:
        why = "no test fails without the fix and passes with it, every time"
        return Admission(None, why, tuple(sorted(flaky)), seconds)
    kept = dataclasses.replace(
        instance,
        fail_to_pass=fails,
        pass_to_pass=passes,
        timeout_s=min(instance.timeout_s, max(30.0, 20 * seconds)),
    )
    if why := confirm(factory, kept):
        return Admission(None, why, tuple(sorted(flaky)), seconds)
    dropped = len(instance.required) - len(kept.required)
    errors = tuple((t, before[0].errors.get(t, "")) for t in fails)
    reason = f"{dropped} tests were dropped, {len(flaky)} of them flaky" if dropped else "fit"
    return Admission(kept, reason, tuple(sorted(flaky)), seconds, errors)


def confirm(
    factory: SandboxFactory, instance: Instance, before: Mapping[str, str] | None = None
) -> str | None:
    """Why the grader does not say "failed" of the empty patch and "resolved" of the fix; None if it does.

    `before` are outcomes of the tests without the fix, seen earlier: they must be the same again.
    """
    grader = SandboxGrader(factory, lambda id: instance)
    for patch, wanted in ((b"", "failed"), (images.ready(factory, instance).gold, "resolved")):
        verdict = grader.grade_instance(instance, patch)
        if verdict.outcome != wanted:
            return f"{'the fix' if patch else 'the empty patch'} is {verdict.outcome}: {verdict.reason}"
        seen = verdict.report["tests"]
        if not patch and (flaky := [t for t in seen if before and seen[t] != before.get(t, seen[t])]):
            return f"{len(flaky)} tests are flaky, {flaky[0]} among them"
    return None

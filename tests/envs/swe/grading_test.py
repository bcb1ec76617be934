"""Verdicts: honest patches, however odd, and what fails on the way."""

import pytest

from metagym.envs.swe import patches
from metagym.envs.swe.bubblewrap import BubblewrapFactory
from metagym.envs.swe.grading import SandboxGrader, open_sandbox, twin
from metagym.errors import SandboxError
from metagym.protocols import Grader
from metagym.testing import ScriptedSandboxFactory
from metagym.types import Limits, Task

FIX = "sed -i 's/a - b/a + b/' calc/core.py; "
ODD = {
    "nothing but the fix": "",
    "committed": "git commit -qam fix",
    "staged": "git add -A",
    "stashed and popped": "git stash -q; git stash pop -q",
    "on a branch": "git checkout -q -b other; git commit -qam fix",
    "amended": "git commit -q --amend -am again",
    "without .git": "rm -rf .git",
    "with a new .git": "rm -rf .git; git init -q; git add -A; git commit -qm mine",
    "tests of its own": "echo 'def test_mine(): pass' >tests/test_mine.py; echo >>tests/test_mul.py",
    "a broken test of its own": "echo 'import nothing' >test_broken.py",
    "scratch files": "echo 'print(1)' >repro.py; mkdir tmp; echo x >tmp/notes.md",
    "a binary beside it": "cp /bin/ls prog; printf '\\0\\1\\2' >data.dat; gzip -k README.md",
    "a binary changed": "printf '\\0\\xff' >calc/data.bin",
    "windows lines": "sed -i 's/$/\\r/' calc/core.py",
    "no newline at the end": "printf '%s' \"$(cat calc/core.py)\" >c; mv c calc/core.py",
    "another file rewritten": "printf 'a\\r\\nb' >windows.txt; rm unended.txt",
    "moved to a new module": "git mv calc/core.py calc/base.py; sed -i 's/core/base/' calc/__init__.py",
    "a package in place of a module": (
        "mkdir calc/core; git mv calc/core.py calc/core/impl.py; "
        "echo 'from calc.core.impl import *' >calc/core/__init__.py"
    ),
    "a link within the tree": "mv calc/core.py calc/real.py; ln -s real.py calc/core.py",
    "a link out of it beside": "ln -s /usr/bin/python3 py",
    "names with blanks and letters": "mkdir 'a b'; echo 1 >'a b/ü \"x\".txt'",
    "executable": "chmod +x calc/core.py",
    "a configuration": "echo '[tool.black]' >pyproject.toml; echo '[flake8]' >tox.ini",
    "a conftest": "echo 'import sys' >conftest.py",
    "caches": "python -m compileall -q calc; mkdir .pytest_cache; echo x >.pytest_cache/x",
    "a virtual environment": "d=.venv/lib/site-packages; mkdir -p $d/x.dist-info; echo >$d/a.pth",
    "a repository inside": "mkdir sub; cd sub; git init -q; echo x >y; git add -A; git commit -qm y",
    "ignored": "echo '*.py' >.gitignore; git add -A",
    "a process left running": "(sleep 100; rm -rf calc) >/dev/null 2>&1 &",
    "a shell left broken": "set -eu; exec 2>/dev/null; cd /; unset PATH HOME; alias git=false",
    "os._exit in a helper": "printf 'import os\\ndef die():\\n    os._exit(3)\\n' >calc/die.py",
}


@pytest.fixture(scope="module")
def arena(tmp_path_factory, small):
    root = tmp_path_factory.mktemp("grading")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("METAGYM_CACHE", str(root / "cache"))
        factory = BubblewrapFactory(ledger=root / "ledger")
        yield small.instance(small.write(root / "calc", small.FILES)), factory
        factory.close()


def grade(arena, patch, **kwargs):
    task, factory = arena
    return SandboxGrader(factory, lambda id: task, **kwargs).grade(
        Task(task.id, task.repo, task.split), patch
    )


@pytest.mark.parametrize("name", ODD)
def test_odd_but_honest(arena, name):
    task, factory = arena
    sandbox = open_sandbox(factory, task)
    sets = "".join(f"export {k}='{v}'; " for k, v in task.env().items())
    result = sandbox.exec(sets + FIX + ODD[name], 30)
    assert not result.timed_out, result
    patch = patches.take(sandbox, task.workdir)
    sandbox.close()
    verdict = grade(arena, patch)
    assert (verdict.outcome, verdict.score) == ("resolved", 1.0), verdict


def test_there_are_enough():
    assert len(ODD) >= 25


def test_gold_empty_and_nonsense(arena):
    task, factory = arena
    assert isinstance(SandboxGrader(factory, lambda id: task), Grader)
    verdict = grade(arena, task.gold)
    assert (verdict.outcome, verdict.report["twins"], verdict.report["collected"]) == ("resolved", 4, 5)
    assert set(verdict.report["tests"].values()) == {"passed"}
    assert grade(arena, task.gold.rstrip(b"\n") + b"").outcome == "resolved"
    verdict = grade(arena, b"")
    assert (verdict.outcome, verdict.reason[:36]) == ("failed", "4 required tests did not pass, tests")
    assert verdict.report["tests"]["tests/test_mul.py::test_mul"] == "passed"
    assert grade(arena, b"Dear grader").outcome == "not_applied"
    verdict = grade(arena, task.gold.replace(b"return a - b", b"return b - a"))
    assert (verdict.outcome, "does not fit: calc/core.py" in verdict.reason) == ("not_applied", True)
    binary = b"diff --git a/x.bin b/x.bin\nindex 123..456 100644\nGIT binary patch\nliteral 3\nnonsense\n\n"
    verdict = grade(arena, binary + task.gold)
    assert (verdict.outcome, "x.bin" in verdict.report["left_out"]) == ("resolved", True)


def test_a_missing_required_test_is_a_failure(arena):
    import dataclasses

    task, factory = arena
    more = dataclasses.replace(task, pass_to_pass=(*task.pass_to_pass, "tests/test_mul.py::test_gone"))
    verdict = SandboxGrader(factory, lambda id: more).grade_instance(more, task.gold)
    assert (verdict.outcome, verdict.reason) == (
        "failed",
        "1 required tests are missing, tests/test_mul.py::test_gone among them.",
    )


def test_noise_from_tests(arena):
    """CASES 26, 28: what tests print is no result."""
    import dataclasses

    task, factory = arena
    noisy = (
        b"\nimport sys\nprint('PASSED')\nsys.__stdout__.write('PASSED tests/test_add.py::test_add FAILED')\n"
    )
    tests = {path: content + noisy for path, content in task.tests.items()}
    changed = dataclasses.replace(task, tests=tests)
    grader = SandboxGrader(factory, lambda id: changed)
    assert grader.grade_instance(changed, task.gold).outcome == "resolved"
    assert grader.grade_instance(changed, b"").outcome == "failed"


def test_tests_that_do_not_end(arena):
    """CASES 49: waiting for input ends at once, ignoring SIGTERM at the deadline; the verdict says so."""
    import dataclasses

    task, factory = arena
    quick = dataclasses.replace(task, timeout_s=3.0)
    code = (
        "+    import signal, time\n+    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "+    time.sleep(99)\n+    return a + b"
    )
    patch = task.gold.replace(b"+    return a + b", code.encode()).replace(b"+1,5", b"+1,8")
    verdict = SandboxGrader(factory, lambda id: quick).grade_instance(quick, patch)
    assert (verdict.outcome, verdict.reason) == ("failed", "the tests: it did not end.")
    code = "+    input()\n+    return a + b"
    patch = task.gold.replace(b"+    return a + b", code.encode()).replace(b"+1,5", b"+1,6")
    assert grade(arena, patch).outcome == "failed"


def test_a_limit_that_is_hit(arena):
    task, _ = arena
    code = "+    x = bytearray(10 ** 10)\n+    return a + b"
    patch = task.gold.replace(b"+    return a + b", code.encode()).replace(b"+1,5", b"+1,6")
    verdict = grade(arena, patch, limits=Limits(memory=256 << 20))
    assert verdict.outcome == "failed"


def test_what_is_nobodys_fault_is_infra(arena):
    task, _ = arena
    assert grade(arena, task.gold, deadline_s=0.01).outcome == "infra"
    broken = ScriptedSandboxFactory(lambda command: SandboxError("the daemon is gone"))
    verdict = SandboxGrader(broken, lambda id: task).grade_instance(task, task.gold)
    assert (verdict.outcome, verdict.score, verdict.reason) == ("infra", 0.0, "the daemon is gone")


def test_in_docker(docker, docker_image, small, tmp_path, monkeypatch):
    """The same task, the harness' files by read-only mounts in an image that has nothing."""
    import dataclasses

    from metagym.envs.swe import instances
    from metagym.types import Mount

    monkeypatch.setenv("METAGYM_CACHE", str(tmp_path / "cache"))
    task = small.instance(small.write(tmp_path / "calc", small.FILES))
    host = instances.environment(task)
    monkeypatch.setattr(instances, "environment", lambda instance: [*host, Mount("/usr", "/usr")])
    task = dataclasses.replace(task, image=docker_image)
    paths = {**task.env(), "PATH": "/opt/python/bin:/usr/bin:/bin"}
    monkeypatch.setattr(instances.Instance, "env", lambda self: paths)
    grader = SandboxGrader(docker, lambda id: task)
    assert grader.grade_instance(task, task.gold).outcome == "resolved"
    assert grader.grade_instance(task, b"").outcome == "failed"
    sandbox = open_sandbox(docker, task)
    sandbox.exec(FIX + "rm -rf .git", 30)
    patch = patches.take(sandbox, task.workdir)
    assert patches.parse(patch)[0].path == "calc/core.py"


def test_twins_fail_however_they_end():
    source = b"""
import asyncio, unittest
def test_a():
    return
def test_b(x=1):
    assert x
class TestX(unittest.TestCase):
    def test_c(self):
        raise unittest.SkipTest("no")
    async def test_d(self):
        pass
def helper():
    pass
"""
    names = {("test_a",), ("test_b",), ("TestX", "test_c"), ("TestX", "test_d"), ("TestX", "inherited")}
    content, found = twin(source, names)
    assert found == names - {("TestX", "inherited")}
    space: dict = {}
    exec(compile(content, "twin", "exec"), space)
    for call in (space["test_a"], space["test_b"], space["TestX"]("test_c").test_c):
        with pytest.raises(AssertionError, match="must fail"):
            call()
    assert space["helper"]() is None

"""Images that hold the repository and its Python, as published data sets have them, made here."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import gymnasium
import pytest

import metagym
from metagym.envs.swe import admission, datasets, images, logs, patches, sites
from metagym.envs.swe.docker import DockerFactory
from metagym.envs.swe.grading import SandboxGrader, open_sandbox
from metagym.envs.swe.instances import Instance, git
from metagym.envs.swe.pool import WarmPool
from metagym.errors import InputError

NAME = "metagym-test:whole"
PREFIX = "opt/miniconda3/envs/testbed"
COMMANDS = [
    "bash",
    "sh",
    "git",
    "cat",
    "cp",
    "find",
    "head",
    "ls",
    "mkdir",
    "mktemp",
    "mv",
    "rm",
    "sed",
    "touch",
]
UNIT = """\
import unittest

from calc import add


class TestUnit(unittest.TestCase):
    def test_zero(self):
        self.assertEqual(add(0, 5), 5)

    def test_type(self):
        self.assertIsInstance(add(1, 2), int)
"""


def _libraries(files: list[str]) -> set[str]:
    said = subprocess.run(["ldd", *files], capture_output=True, text=True, check=False).stdout
    return set(re.findall(r"(/\S+\.so\S*) \(0x", said))


def _image(testbed: Path) -> bytes:
    """A root file system: bash, git and a few commands, a Python where conda has it, and the folder."""
    stdlib = sysconfig.get_path("stdlib")
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    python = os.path.realpath(sys.executable)
    skipped = {
        "test",
        "tests",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "idlelib",
        "lib2to3",
        "tkinter",
    }
    skipped |= {"ensurepip", "turtledemo", "pydoc_data"}
    programs = {name: shutil.which(name) for name in COMMANDS}
    extensions = [str(p) for p in Path(stdlib, "lib-dynload").glob("*.so")]
    buffer = io.BytesIO()

    def roots(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        return info

    def keep(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        name = info.name.rpartition("/")[2]
        return None if name in skipped or name.startswith("config-") else roots(info)

    with tarfile.open(fileobj=buffer, mode="w", dereference=False) as tar:
        for name in ("proc", "sys", "dev", "etc", "tmp", "root", "usr/bin", "usr/lib", "opt/metagym"):
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(info)
        for name in ("bin", "lib", "lib64"):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, f"usr/{'bin' if name == 'bin' else 'lib'}"
            tar.addfile(info)
        for name, path in programs.items():
            assert path is not None
            tar.add(os.path.realpath(path), f"usr/bin/{name}")
        for path in sorted(_libraries([python, *extensions, *(str(p) for p in programs.values())])):
            tar.add(os.path.realpath(path), f"usr/lib/{os.path.basename(path)}")
        tar.add(python, f"{PREFIX}/bin/{version}")
        for link in ("python", "python3"):
            info = tarfile.TarInfo(f"{PREFIX}/bin/{link}")
            info.type, info.linkname = tarfile.SYMTYPE, version
            tar.addfile(info)
        tar.add(stdlib, f"{PREFIX}/lib/{version}", filter=keep)
        tar.add(sites.copied(), f"{PREFIX}/lib/{version}/site-packages")
        tar.add(testbed, "testbed", filter=roots)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def world(tmp_path_factory, docker_host, small):
    """An image at a base commit, whose git knows the fix and its tests; and one that is at the fix."""
    root = tmp_path_factory.mktemp("images")
    bed = root / "testbed"
    small.write(bed, small.FILES)
    (bed / ".gitignore").write_text("build/\n*.so\n")
    (bed / ".gitattributes").write_text("*.txt text eol=lf\n")
    git(bed, "init", "-q")
    git(bed, "add", "-A")
    git(bed, "commit", "-q", "-m", "base")
    git(bed, "checkout", "-q", "-b", "future")
    (bed / "calc" / "core.py").write_text(small.FILES["calc/core.py"].replace("a - b", "a + b"))
    (bed / "tests" / "test_add.py").write_text(small.HIDDEN["tests/test_add.py"])
    git(bed, "add", "-A")
    git(bed, "commit", "-q", "-m", "the fix")
    git(bed, "tag", "v2")
    git(bed, "checkout", "-q", "main")
    (bed / "build").mkdir()
    (bed / "build" / "made.so").write_bytes(b"\0")
    (bed / "notes here.log").write_text("left by a build\n")
    (bed / ".venv" / "bin").mkdir(parents=True)
    (bed / ".venv" / "bin" / "python").write_text(f'#!/bin/sh\nexec /{PREFIX}/bin/python "$@"\n')
    (bed / ".venv" / "bin" / "python").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("METAGYM_CACHE", str(root / "cache"))
        factory = DockerFactory(host=docker_host, ledger=root / "ledger")
        repository, tag = NAME.split(":")
        factory.client.api.import_image_from_data(_image(bed), repository=repository, tag=tag)
        sandbox = factory.start(NAME)
        assert sandbox.exec("cd /testbed && git -c safe.directory=* checkout -q future", 30).exit_code == 0
        fixed = factory.snapshot(sandbox)
        sandbox.close()
        yield factory, fixed
        factory.client.api.remove_image(NAME, force=True)
        factory.close()


def rows(small, fixed: str) -> dict[str, dict]:
    """One row in each schema."""
    text = small.HIDDEN["tests/test_add.py"]
    bench = {
        "instance_id": "o__calc-1",
        "repo": "o/calc",
        "base_commit": "abc",
        "patch": small.GOLD.decode(),
        "test_patch": _new("tests/test_add.py", text),
        "problem_statement": "add() gives wrong sums",
        "FAIL_TO_PASS": json.dumps(list(small.FAIL_TO_PASS)),
        "PASS_TO_PASS": json.dumps(["tests/test_mul.py::test_mul"]),
        "version": "1.0",
        "environment_setup_commit": "abc",
    }
    code = small.FILES["calc/core.py"]
    bug = patches.diff(code.replace("a - b", "a + b").encode(), code.encode(), "calc/core.py").decode()
    cut = ["tests/test_add.py::test_text[a", *small.FAIL_TO_PASS[2:]]
    return {
        "SWE-bench": {**bench, "image": NAME},
        "SWE-bench 5.x": {
            **bench,
            "image": NAME,
            "eval_script": "#!/bin/bash\n: '>>>>> Start Test Output'\npytest\n: '>>>>> End Test Output'\n",
            "log_parser": "parse_log_pytest",
            "eval_type": "pass_and_fail",
            "FAIL_TO_PASS": cut,
        },
        "SWE-rebench": {
            **bench,
            "docker_image": NAME,
            "install_config": {"test_cmd": "pytest -rA", "log_parser": "parse_log_pytest", "python": "3.9"},
            "meta": {},
        },
        "SWE-smith": {
            "instance_id": "o__calc.abc.bug-1",
            "repo": "swesmith/o__calc.abc",
            "patch": bug,
            "FAIL_TO_PASS": list(small.FAIL_TO_PASS),
            "PASS_TO_PASS": ["tests/test_mul.py::test_mul"],
            "image_name": fixed,
            "problem_statement": "add() gives wrong sums",
        },
        "R2E": {
            "repo_name": "calc",
            "docker_image": NAME,
            "commit_hash": "f" * 40,
            "problem_statement": "add() gives wrong sums",
            "expected_output_json": json.dumps({"test_text[a b]": "PASSED", "TestUnit.test_zero": "PASSED"}),
            "execution_result_content": json.dumps(
                {"test_file_names": ["test_1.py"], "test_file_codes": [text]}
            ),
            "parsed_commit_content": json.dumps(
                {
                    "file_diffs": [
                        {
                            "header": {"file": {"path": "calc/core.py"}},
                            "old_file_content": code,
                            "new_file_content": code.replace("a - b", "a + b"),
                        },
                        {"header": {"file": {"path": "tests/test_add.py"}}},
                    ]
                }
            ),
        },
    }


def loaded(row: dict, tmp_path: Path) -> Instance:
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    good, refused = datasets.read(tmp_path / "rows.json")
    assert refused == {}
    return good[0]


@pytest.mark.parametrize("schema", ["SWE-bench", "SWE-bench 5.x", "SWE-rebench", "SWE-smith", "R2E"])
def test_rows_of_every_schema_are_graded(world, small, tmp_path, schema):
    """CASES 25, 31, 54: the fix is 1, nothing is 0, and the agent finds neither history nor tests."""
    factory, fixed = world
    task = loaded(rows(small, fixed)[schema], tmp_path)
    admitted = admission.admit(factory, task, runs=1)
    assert admitted.instance is not None, admitted
    assert admitted.instance.fail_to_pass == task.fail_to_pass
    sandbox = open_sandbox(factory, task)
    env = images.ready(factory, task).env()

    def look(command: str) -> list[str]:
        return sandbox.exec(command, 60, env=env, cwd="/testbed").output.split()

    assert look("git rev-list --all --count; git for-each-ref; git reflog; git stash list")[:1] == ["1"]
    assert len(look("git for-each-ref --format='%(refname)'")) == 1
    assert look("git fsck --lost-found --no-progress 2>/dev/null; git status --porcelain") == []
    objects = look("git cat-file --batch-all-objects --batch-check='%(objecttype)'")
    assert objects.count("commit") == 1
    assert "tag" not in objects
    assert look("git cat-file --batch-all-objects --batch | sed -n '/test_zero\\|a + b/p'") == []
    python = "/testbed/.venv/bin/python" if schema == "R2E" else f"/{PREFIX}/bin/python"
    assert look("command -v python") == [python]
    hunt = "find / -xdev -name '*.py' -path '*test_add*' -o -xdev -name 'test_1.py' 2>/dev/null"
    assert sandbox.exec(hunt, 60).output == ""
    assert sandbox.exec(f"touch {patches.BASE}/x", 30).exit_code != 0
    assert patches.take(sandbox, task.workdir) == b""
    sandbox.exec(
        "sed -i 's/a - b/a + b/' calc/core.py; echo 1 >build/x.so; rm 'notes here.log'", 30, cwd="/testbed"
    )
    sections = patches.parse(patches.take(sandbox, task.workdir))
    assert [s.path for s in sections] == ["calc/core.py"]
    sandbox.close()


def test_an_episode_in_an_image(world, small, tmp_path):
    """What the agent does to its container's Python and tests does not reach the grader's."""
    factory, fixed = world
    task = loaded(rows(small, fixed)["SWE-smith"], tmp_path)
    env = gymnasium.make(
        "metagym/SWE-v0", data=[task], sandbox=factory, split="test", disable_env_checker=True
    )
    observation, info = env.reset(seed=0)
    assert "The repository is in /testbed." in observation
    assert env.step("shell python -c 'import calc; print(calc.add(3, 1))'")[0] == "2\n"
    env.step(
        f"shell echo 'print(1)' >/{PREFIX}/lib/python3/sitecustomize.py; rm -r /{PREFIX}/lib/*/site-packages"
    )
    env.step("shell mkdir -p tests; echo 'def test_add(): pass' >tests/test_add.py")
    *_, reward, terminated, _, info = env.step("submit")
    assert (reward, terminated, info["verdict"].outcome) == (0.0, True, "failed")
    assert info["verdict"].report["left_out"] == {"tests/test_add.py": "a file that the task brings"}
    env.reset(seed=0)
    env.step("shell sed -i 's/a - b/a + b/' calc/core.py")
    assert env.step("submit")[1] == 1.0
    env.close()


OUTPUTS = """\
import json
import subprocess
import sys
from pathlib import Path

import pytest

EXPECTED = json.loads((Path(__file__).parent / "data" / "expected.json").read_text())


@pytest.mark.parametrize("pair", EXPECTED)
def test_sums(pair):
    code = f"import calc; print(calc.add({pair[0]}, {pair[1]}))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert told.stdout.split() == [str(pair[2])]


def test_the_answer():
    assert Path("out.txt").read_text() == "42\\n"
"""
SOLVE = "#!/bin/bash\nset -e\nsed -i 's/a - b/a + b/' calc/core.py\ncat /solution/answer >out.txt\n"


@pytest.fixture(scope="module")
def harbor_image(world):
    """The image with its Python on the path, as a Dockerfile would have it."""
    factory, _ = world
    sandbox = factory.start(NAME)
    name = "metagym-test:harbor"
    repository, tag = name.split(":")
    changes = [f"ENV PATH=/{PREFIX}/bin:/usr/bin:/bin"]
    factory.client.api.commit(sandbox.id, repository=repository, tag=tag, changes=changes)
    sandbox.close()
    yield name
    factory.client.api.remove_image(name, force=True)


def harbor_folder(root: Path, image: str, **files: str) -> Path:
    """Task folders of Harbor on an image: one whose tests stay outside, one that copies them in."""
    common = {
        "task.toml": f'[environment]\ndocker_image = "{image}"\n[verifier]\ntimeout_sec = 30.0\n',
        "environment/Dockerfile": "FROM scratch\nWORKDIR /testbed\n",
        "instruction.md": "calc.add() gives wrong sums. Mend it, and write 42 to out.txt.",
        "solution/solve.sh": SOLVE,
        "solution/answer": "42\n",
    }
    outside = {
        "tests/test.sh": "uvx -w pytest==8.4.1 pytest /tests/test_outputs.py -rA\n",
        "tests/test_outputs.py": OUTPUTS,
        "tests/data/expected.json": "[[1, 2, 3], [0, 5, 5]]",
    }
    inside = {
        "tests/test.sh": "cp /tests/test_unit.py tests/test_unit.py\npython -m pytest tests/test_unit.py\n",
        "tests/test_unit.py": UNIT,
    }
    for name, tests in {"outside": outside, "inside": inside}.items():
        for path, text in (common | tests | files).items():
            (root / name / path).parent.mkdir(parents=True, exist_ok=True)
            (root / name / path).write_text(text)
    return root


def test_task_folders_of_harbor(world, harbor_image, tmp_path):
    """Their own solution is 1, nothing is 0, and the agent finds neither tests nor solution."""
    factory, _ = world
    tasks = {t.id: t for t in datasets.load(harbor_folder(tmp_path, harbor_image))}
    for task in tasks.values():
        admitted = admission.admit(factory, task, runs=1)
        assert admitted.instance is not None, admitted
        assert admitted.instance.fail_to_pass + admitted.instance.pass_to_pass == task.fail_to_pass
        ready = images.ready(factory, task)
        assert {s.path for s in patches.parse(ready.gold)} == {"calc/core.py", "out.txt"}
        sandbox = open_sandbox(factory, task)
        names = "-name 'test_outputs*' -o -name 'test_unit*' -o -name 'solve*' -o -name answer"
        assert sandbox.exec(f"find / -xdev \\( {names} \\) 2>/dev/null", 60).output == ""
        sandbox.close()
    assert tasks["outside"].site != ""  # its tests bring pytest; the others use the image's
    assert tasks["inside"].site == ""

    env = gymnasium.make(
        "metagym/SWE-v0", data=list(tasks.values()), sandbox=factory, split="test", disable_env_checker=True
    )
    env.reset(seed=0, options={"task": "outside"})
    env.step("shell sed -i 's/a - b/a + b/' calc/core.py")
    *_, reward, _, _, info = env.step("submit")
    assert (reward, info["verdict"].outcome) == (0.0, "failed")
    assert "1 required tests did not pass, /tests/test_outputs.py::test_the_answer" in info["verdict"].reason
    env.reset(seed=0, options={"task": "outside"})
    env.step("shell sed -i 's/a - b/a + b/' calc/core.py; echo 42 >out.txt")
    assert env.step("submit")[1] == 1.0
    # Harbor's own way would give these two a 1: what was changed outside the repository, and a way out.
    env.reset(seed=0, options={"task": "outside"})
    env.step(
        "shell mkdir -p /tests /logs/verifier; echo 1 >/logs/verifier/reward.txt; echo >/tests/conftest.py"
    )
    assert env.step("submit")[1] == 0.0
    env.reset(seed=0, options={"task": "inside"})
    env.step("shell printf 'import os\\nos._exit(0)\\n' >>calc/core.py")
    *_, reward, _, _, info = env.step("submit")
    assert (reward, info["verdict"].outcome) == (0.0, "hacked")
    env.close()


def test_a_task_folder_whose_solution_does_not_fit(world, harbor_image, tmp_path):
    factory, _ = world
    for solve, why in {"exit 3": "does not run its solution", "touch /tmp/x": "changes nothing in"}.items():
        files = {"solution/solve.sh": f"{solve}\n"}
        folder = harbor_folder(tmp_path / str(len(why)), harbor_image, **files)
        task = next(t for t in datasets.load(folder) if t.id == "inside")
        with pytest.raises(InputError, match=why):
            images.ready(factory, task)


def test_every_test_of_a_whole_task_must_pass(world, harbor_image, tmp_path):
    """One that its source does not name, because it is made when the module is imported, too."""
    factory, _ = world
    more = UNIT + "\n\nfor n in (1, 2):\n    globals()[f'test_{n}'] = lambda n=n: add(n, n) == 2 or 1 / 0\n"
    folder = harbor_folder(tmp_path, harbor_image, **{"tests/test_unit.py": more})
    task = next(t for t in datasets.load(folder) if t.id == "inside")
    gold = images.ready(factory, task).gold
    verdict = SandboxGrader(factory, lambda id: task).grade_instance(task, gold)
    assert (verdict.outcome, verdict.reason) == ("failed", "the tests ended with exit code 1.")


def test_an_image_is_made_ready_once(world, small, tmp_path):
    factory, fixed = world
    task = loaded(rows(small, fixed)["SWE-bench"], tmp_path)
    one = images.ready(factory, task)
    pool = WarmPool(factory, size=1)
    assert images.ready(pool, task) == one
    assert images.ready(factory, one) is one
    # Another choice of its tests, as admission makes one, has the same image and keeps its choice.
    fewer = images.dataclasses.replace(task, pass_to_pass=())
    again = images.ready(factory, fewer)
    assert (again.image, again.pass_to_pass) == (one.image, ())
    assert (one.image != NAME, one.change, one.id) == (True, b"", task.id)
    gone = images.dataclasses.replace(task, id="gone", image="nothing:here")
    for _ in range(2):  # a failure is not remembered
        with pytest.raises(InputError, match="no image 'nothing:here'"):
            images.ready(factory, gone)
    wrong = images.dataclasses.replace(task, id="wrong", workdir="/nowhere")
    with pytest.raises(InputError, match="no folder /nowhere"):
        images.ready(factory, wrong)
    wrong = images.dataclasses.replace(task, id="wrong", change=b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n")
    with pytest.raises(InputError, match="does not fit the task's change"):
        images.ready(factory, wrong)
    unfit = images.dataclasses.replace(
        task, id="unfit", test_patch=b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"
    )
    verdict = SandboxGrader(factory, lambda id: unfit).grade_instance(unfit, task.gold)
    assert (verdict.outcome, "don't fit its repository" in verdict.reason) == ("infra", True)


def _unittest(log: str, instance: Instance) -> dict[str, str]:
    """What a log parser of swebench does, for unittest."""
    words = {"ok": "PASSED", "FAIL": "FAILED", "ERROR": "ERROR"}
    found = re.findall(r"^(test_\w+ \(\S+\)) \.\.\. (\w+)$", log, re.MULTILINE)
    return {test: words[word] for test, word in found}


EVAL = """\
#!/bin/bash
set -uxo pipefail
export LANG=C.UTF-8
cd /testbed
: '>>>>> Start Test Output'
python -m unittest -v tests.test_unit
: '>>>>> End Test Output'
git checkout abc tests
"""


def _logged(small, tmp_path, **change) -> Instance:
    row = {
        "instance_id": "o__calc-2",
        "patch": small.GOLD.decode(),
        "test_patch": _new("tests/test_unit.py", UNIT),
        "FAIL_TO_PASS": [_id("test_zero")],
        "PASS_TO_PASS": [_id("test_type")],
        "image": NAME,
        "log_parser": "parse_log_django",
        "eval_script": EVAL,
        **change,
    }
    return loaded(row, tmp_path)


def _id(name: str) -> str:
    dotted = f".{name}" if sys.version_info >= (3, 11) else ""
    return f"{name} (tests.test_unit.TestUnit{dotted})"


def _new(path: str, text: str) -> str:
    lines = text.splitlines()
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    return head + f"@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)


FORGED = f"print('{_id('test_zero')} ... ok\\n{_id('test_type')} ... ok\\nRan 2 tests in 0s', flush=True)\n"
LOGGED = {
    "resolved": ("", "resolved", "all 2 required tests passed"),
    "no fix": (None, "failed", "did not pass"),
    "forged and out": (f"import os\n{FORGED}os._exit(0)\n", "hacked", "must fail did not"),
    "forged, then failing": (f"{FORGED}raise SystemExit(3)\n", "failed", "its log has no failure"),
    "more than ran": (
        "print(*(f'test_{n} (x) ... ok' for n in range(9)), sep='\\n', flush=True)\n",
        "hacked",
        "tests that passed, and says 2 ran",
    ),
    "nothing": ("import os\nos._exit(0)\n", "hacked", "without a test in its log"),
}


@pytest.mark.parametrize("name", LOGGED)
def test_a_log_is_believed_only_so_far(world, small, tmp_path, monkeypatch, name):
    """Tests that are no node ids: the exit code, their number and their twins must agree with the log."""
    factory, _ = world
    monkeypatch.setattr(logs, "parser", lambda name: _unittest)
    task = _logged(small, tmp_path, eval_script=EVAL.replace("\n", "\r\n"))  # CASES 40
    assert task.command == "export LANG=C.UTF-8\npython -m unittest -v tests.test_unit"
    code, outcome, reason = LOGGED[name]
    patch = b""
    if code is not None:
        before = small.FILES["calc/core.py"]
        after = before if name == "more than ran" else before.replace("a - b", "a + b")
        patch = patches.diff(
            before.encode(), (after.replace("a - b", "a + b") + code).encode(), "calc/core.py"
        )
    verdict = SandboxGrader(factory, lambda id: task).grade_instance(task, patch)
    assert (verdict.outcome, reason in verdict.reason) == (outcome, True), verdict


def test_rows_with_a_log_that_nothing_confirms(small, tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "parser", lambda name: _unittest)
    (tmp_path / "rows.json").write_text("[]")
    for change, why in {
        "no parser": ({"log_parser": ""}, "names no log parser and no command"),
        "no command": ({"eval_script": ""}, "names no log parser and no command"),
        "sentences": ({"FAIL_TO_PASS": ["The sum is right."]}, "names a function"),
        "no Python": ({"test_patch": _new("tests/x.js", "x\n")}, "no twins"),
    }.values():
        with pytest.raises(AssertionError, match=why):
            _logged(small, tmp_path, **change)
    assert logs.name_of("test_a (x.Tests.test_a)") == logs.name_of("test_a (x.Tests)") == ("Tests", "test_a")
    assert logs.name_of("sympy/core/tests/test_x.py:test_y") == ("test_y",)
    assert logs.name_of("A sentence.") is None


def test_swebenchs_parsers(small):
    """The real ones, by their names."""
    pytest.importorskip("swebench", reason="the extra swebench is not installed")
    task = small.instance(Path())
    log = "test_a (x.Tests) ... ok\ntest_b (x.Tests) ... FAIL\n"
    assert dict(logs.parser("parse_log_django")(log, task)) == {
        "test_a (x.Tests)": "PASSED",
        "test_b (x.Tests)": "FAILED",
    }
    with pytest.raises(metagym.errors.UnknownNameError, match="log parser 'parse_log_cobol'"):
        logs.parser("parse_log_cobol")

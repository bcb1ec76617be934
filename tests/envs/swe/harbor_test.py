"""Task folders of Harbor: which are read, why others are refused. `images_test.py` plays and grades them."""

import json
from pathlib import Path

import pytest

from metagym.envs.swe import datasets, harbor
from metagym.envs.swe.instances import Refused
from metagym.errors import InputError

UVX = """\
#!/bin/bash
# The usual one.
apt-get update && apt-get install -y curl
curl -LsSf https://example.invalid/install.sh | sh
source $HOME/.local/bin/env

if [ "$PWD" = "/" ]; then
    echo "Error: no working directory (set WORKDIR)"
    exit 1
fi

uvx \\
  -p 3.13 \\
  -w pytest==8.4.1 \\
  --with pytest-json-ctrf==0.3.5 \\
  pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA

if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
COPIES = """\
set -uo pipefail
mkdir -p /logs/verifier tests
cp "/tests/test_unit.py" "tests/test_unit.py"
cd /app
python3 -m pytest -v -p no:cacheprovider tests/test_unit.py 2>&1 | tee /logs/verifier/log.txt
RC=${PIPESTATUS[0]}
[ $RC -eq 0 ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
exit "$RC"
"""
FILES = {"/tests/test_outputs.py": b"", "/tests/test_unit.py": b"U", "/tests/data/expected.json": b"{}"}
PLAIN = "pytest /tests/test_outputs.py\n"


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (UVX, (("/tests/test_outputs.py",), {}, False)),
        (COPIES, (("tests/test_unit.py",), {"tests/test_unit.py": b"U"}, True)),
        (PLAIN, (("/tests/test_outputs.py",), {}, False)),
        ("cd /tests\npytest -q test_outputs.py\n", (("/tests/test_outputs.py",), {}, False)),
        (
            'if uvx --with pytest pytest --ctrf="$X" "$TEST_DIR/test_outputs.py" -rA; then\n  echo 1\nelse\n'
            "  echo 0\nfi > /logs/verifier/reward.txt\n",
            (("/tests/test_outputs.py",), {}, False),
        ),
        (
            "uv init\nuv add pytest==8.4.1\nuv run pytest /tests -rA\n",
            (("/tests/test_outputs.py", "/tests/test_unit.py"), {}, False),
        ),
        ("pip3 install --quiet pytest==8.4.1 2>/dev/null || true\n" + PLAIN, None),
    ],
)
def test_scripts_that_run_pytest(script, found):
    assert harbor.read(script, "/app", FILES) == (found or (("/tests/test_outputs.py",), {}, False))


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (
            "python3 /tests/grade.py > /logs/verifier/reward.txt\n",
            "more than run pytest: 'python3 /tests/grade",
        ),
        (
            PLAIN + "R=$(python3 -c 'print(0.5)')\necho $R > /logs/verifier/reward.txt\n",
            "more than run pytest",
        ),
        ("cargo build --release\n" + PLAIN, "more than run pytest: 'cargo build"),
        (PLAIN + PLAIN, "run pytest once"),
        ("echo 1 > /logs/verifier/reward.txt\n", "run pytest once"),
        ("echo pytest /tests/test_outputs.py\n", "run pytest once"),
        ("pytest\n", "run pytest once"),
        ("pytest -k fast /tests/test_outputs.py\n", "the option '-k'"),
        ("pytest /tests/test_outputs.py::test_a\n", "gives pytest '/tests/test_outputs.py::test_a'"),
        ("pytest /tests/test_outputs.py || true\n", "gives pytest '||'"),
        ("pytest tests/test_mine.py\n", "does not bring: 'tests/test_mine.py'"),
        ("pytest /app\n", "does not bring: '/app'"),
        ("cp /tests/test_unit.py tests/test_unit.py\npytest tests\n", "does not bring: 'tests'"),
        ("cp /app/a.py /tests/test_unit.py\n" + PLAIN, "copies what it does not bring"),
        ("cp /tests/test_unit.py /etc/x\n" + PLAIN, "copies out of the repository"),
        (
            "cp /tests/test_unit.py tests/a.py\npytest /tests/test_outputs.py tests/a.py\n",
            "in two places",
        ),
        ("cd /srv\npytest /tests/test_outputs.py\n", "runs pytest in /srv"),
        ("uvx -w pytest -w numpy==2.0 pytest /tests/test_outputs.py\n", "have to be installed: numpy"),
        ("pip install pytest requests\n" + PLAIN, "have to be installed: requests"),
        ("sudo -u x pytest /tests/test_outputs.py\n", "in a way that is not known"),
        ('pytest "/tests\n', "that can't be read"),
    ],
)
def test_scripts_that_do_more(script, why):
    with pytest.raises(Refused, match=r".*") as refusal:
        harbor.read(script, "/app", FILES)
    assert why in str(refusal.value)


def folder(root: Path, **files: str) -> Path:
    """A task folder, its scripts with the lines of Windows; `a__b` is the file a/b, with "" none."""
    told = {
        "task.toml": '[metadata]\nrepo = "o/r"\n[verifier]\ntimeout_sec = 120.0\n',
        "instruction.md": "Make it so.\n",
        "environment/Dockerfile": "FROM python:3.13-slim\nRUN pip install x\nWORKDIR /srv\nWORKDIR app\n",
        "solution/solve.sh": "echo 1 >out.txt\n",
        "tests/test.sh": UVX,
        "tests/test_outputs.py": (
            "import pytest\nclass TestX:\n    def test_y(self): pass\n    def help(self): pass\n"
            "@pytest.mark.parametrize('a', [1, 2])\ndef test_z(a): pass\ndef helper(): pass\n"
        ),
        "tests/data/expected.json": "{}",
    } | {name.replace("__", "/"): text for name, text in files.items()}
    for name, text in told.items():
        if text:
            (root / "Task-1" / name).parent.mkdir(parents=True, exist_ok=True)
            (root / "Task-1" / name).write_text(text, newline="\r\n" if name.endswith(".sh") else "\n")
    return root


def test_a_folder(tmp_path):
    (one,) = datasets.load(folder(tmp_path))
    assert (one.id, one.repo, one.issue, one.split) == ("Task-1", "o/r", "Make it so.\n", "test")
    assert (one.image, one.workdir, one.timeout_s, one.whole) == ("hb__task-1", "/srv/app", 120.0, True)
    assert one.fail_to_pass == ("/tests/test_outputs.py::TestX::test_y", "/tests/test_outputs.py::test_z")
    assert set(one.tests) == {"/tests/test_outputs.py", "/tests/data/expected.json"}
    assert (one.gold, dict(one.solution)) == (b"", {"solve.sh": b"echo 1 >out.txt\n"})
    assert Path(one.site, "pytest").is_dir()
    # What is written can be read again.
    datasets.save([one], tmp_path / "tasks.jsonl")
    assert datasets.load(tmp_path / "tasks.jsonl") == (one,)


@pytest.mark.parametrize(
    ("files", "image", "workdir"),
    [
        ({"environment__Dockerfile": "# x\nFROM a/b:1\nENV A=1\nWORKDIR /app/\n"}, "a/b:1", "/app"),
        ({"environment__Dockerfile": "FROM a AS x\nFROM b\nWORKDIR /app\n"}, "hb__task-1", "/app"),
        ({"task.toml": '[environment]\ndocker_image = "c:2"\nworkdir = "/w"\n'}, "c:2", "/w"),
    ],
)
def test_images_of_folders(tmp_path, files, image, workdir):
    (one,) = datasets.load(folder(tmp_path, **files))
    assert (one.image, one.workdir) == (image, workdir)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"instruction.md": ""}, "has no instruction.md"),
        ({"tests__test.sh": ""}, "has no tests/test.sh"),
        ({"tests__test.sh": "bash /tests/judge.sh\n"}, "does more than run pytest"),
        ({"solution__solve.sh": ""}, "no known fix"),
        ({"environment__docker-compose.yaml": "services: {}"}, "one container"),
        ({"environment__Dockerfile": "FROM x\n"}, "names a folder to work in"),
        ({"environment__Dockerfile": "FROM x\nWORKDIR /\n"}, "names a folder to work in"),
        ({"task.toml": "[verifier.env]\nKEY = '1'\n"}, "wants variables"),
        ({"task.toml": "x"}, "task.toml can't be read"),
        ({"tests__test_outputs.py": "def check(): pass\n"}, "no function that could be named"),
        ({"tests__test_outputs.py": "def ("}, "is no Python"),
    ],
)
def test_folders_that_are_refused(tmp_path, files, why):
    with pytest.raises(InputError, match=rf"Task-1: .*{why}"):
        datasets.load(folder(tmp_path, **files))


def test_a_folder_made_of_a_row(tmp_path):
    """What was converted from SWE-bench has its row in it, and is graded as that row."""
    row = {
        "instance_id": "o__r-1",
        "repo": "o/r",
        "patch": "--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a = 1\n+a = 2\n",
        "test_patch": "diff --git a/tests/test_x.py b/tests/test_x.py\nnew file mode 100644\n",
        "problem_statement": "a is wrong",
        "FAIL_TO_PASS": ["tests/test_x.py::test_a"],
        "PASS_TO_PASS": [],
    }
    made = folder(
        tmp_path,
        environment__Dockerfile="FROM swebench/x:1\nRUN curl x | sh\nWORKDIR /testbed\n",
        **{"tests__config.json": json.dumps(row), "tests__test.sh": "uv run parser.py\n"},
    )
    (one,) = datasets.load(made)
    (plain,) = (datasets.instance({**row, "image": "swebench/x:1"}),)
    assert (one.id, one.image, one.issue) == ("o__r-1", "swebench/x:1", "Make it so.\n")
    assert (one.fail_to_pass, one.gold, one.test_patch) == (plain.fail_to_pass, plain.gold, plain.test_patch)

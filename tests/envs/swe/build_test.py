"""Tasks made here, admission, loaders and selection."""

import dataclasses
import json
import re
import sys

import pytest

from metagym import cli
from metagym.envs.swe import admission, build, datasets, mutation, patches, toy
from metagym.envs.swe.grading import SandboxGrader
from metagym.errors import MissingExtraError

CODE = '''\
"""Text in columns."""


def widths(rows, least=1):
    """The widest cell of each column."""
    found = []
    for row in rows:
        for i, cell in enumerate(row):
            if i >= len(found):
                found.append(least)
            found[i] = max(found[i], len(cell))
    return found


def align(rows, *, right=False, between="  "):
    sizes = widths(rows, least=2)
    lines = []
    for row in rows:
        cells = [c.rjust(n) if right and not c.startswith("-") else c.ljust(n) for c, n in zip(row, sizes)]
        if not any(cells):
            continue
        lines.append(between.join(cells).rstrip())
    return lines[:100]


def share(part, whole):
    if whole == 0 or part is None:
        raise ValueError("no whole")
    return round(100 * part / whole, ndigits=1)
'''
TESTS = """\
import pytest

from columns import align, share, widths


def test_widths():
    assert widths([["a", "bbb"], ["cc", "d"]]) == [2, 3]
    assert widths([], least=4) == []
    assert widths([["a"]], least=4) == [4]


def test_align():
    assert align([["a", "bbb"], ["cc", "d"]]) == ["a   bbb", "cc  d"]
    assert align([["a"], ["-b"]], right=True) == [" a", "-b"]
    assert align([["", ""]]) == [""]
    assert align([["ab", "c"]], between="|") == ["ab|c"]


def test_share():
    assert share(1, 3) == 33.3
    with pytest.raises(ValueError, match="no whole"):
        share(1, 0)


def test_of_nothing():
    assert align([]) == []
"""
PACKAGE = {"name": "columns", "files": ["columns.py"], "tests": ["tests"], "split": "train"}


@pytest.fixture
def source(tmp_path, small, monkeypatch):
    monkeypatch.setenv("METAGYM_CACHE", str(tmp_path / "cache"))
    files = {
        "columns.py": CODE,
        "tests/test_columns.py": TESTS,
        "tests/test_more.py": "def test_x():\n    pass\n",
    }
    return small.write(tmp_path / "columns", files)


def test_kinds_of_mutants():
    found = list(mutation.mutants(CODE))
    kinds = {m.kind for m in found}
    assert kinds >= {
        *("comparison", "negation", "arithmetic", "number", "boolean", "arguments", "missing part"),
        *("missing statement", "returned", "slice", "default", "loop", "name"),
    }
    assert len(mutation.OPERATORS) >= 8
    assert len({m.source for m in found}) > 40
    for mutant in found:
        changed = [
            (a, b) for a, b in zip(CODE.splitlines(), mutant.source.splitlines(), strict=False) if a != b
        ]
        compile(mutant.source, "x", "exec")
        assert mutant.source != CODE
        assert 1 <= len(changed) <= 4 or len(mutant.source.splitlines()) != len(CODE.splitlines())
        assert mutant.source.startswith('"""Text in columns."""')


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("comparison", "return a < b", "return a <= b"),
        ("negation", "return a in b", "return a not in b"),
        ("negation", "return not a", "return a"),
        ("arithmetic", "return a + b", "return a - b"),
        ("number", "return a[3]", "return a[4]"),
        ("boolean", "return a and b", "return a or b"),
        ("boolean", "return True", "return False"),
        ("arguments", "return f(a, b)", "return f(b, a)"),
        ("missing part", "return a or b", "return b"),
        ("missing statement", "f(a)", "pass"),
        ("returned", "return a", "return None"),
        ("slice", "return a[1:b]", "return a[:b]"),
        ("default", "return f(a, x=b)", "return f(a)"),
        ("name", "return a.lower()", "return a.upper()"),
        ("name", "return min(a)", "return max(a)"),
    ],
)
def test_a_mutant_of_each_kind(kind, before, after):
    found = [m for m in mutation.mutants(f"def g(a, b):\n    {before}\n") if m.kind == kind]
    assert f"def g(a, b):\n    {after}\n" in [m.source for m in found]
    assert found[0].function == "g"


def test_what_is_left_alone():
    code = 'X = 1 + 2\n\n\ndef f(a: "int" = 1, *, b=1 < 2):\n    """1 + 1"""\n    x: "list[1]"\n'
    assert list(mutation.mutants(code)) == []


def test_tasks_by_mutation(bubblewrap, source):
    """Real ones: the bug is in the agent's repository, its tests are not, and the fix is a small patch."""
    rounds = list(build.mutation_tasks(bubblewrap, PACKAGE, source, wanted=2, workers=1))
    made = [task for _, new, _ in rounds for task in new]
    assert len(made) == 2
    dropped = sum((each for *_, each in rounds), build.Counter())
    assert set(dropped) <= {"unnoticed", "hangs or crashes", "breaks most tests"}
    # Going on after the first mutants finds others.
    (_, others, _), *_ = build.mutation_tasks(
        bubblewrap, PACKAGE, source, wanted=1, workers=1, skip=rounds[-1][0]
    )
    assert not {t.id for t in others} & {t.id for t in made}
    for task in made:
        assert task.hidden == ("tests/test_columns.py",)
        assert task.fail_to_pass
        assert set(task.fail_to_pass) | set(task.pass_to_pass) <= {
            f"tests/test_columns.py::test_{n}" for n in ("widths", "align", "share", "of_nothing")
        }
        assert "columns.py" not in task.issue
        assert f"line {task.gold}" not in task.issue
        assert task.issue.startswith("Some things no longer work")
        assert [s.path for s in patches.parse(task.gold)] == ["columns.py"]
        assert task.about["kind"] in mutation.OPERATORS
    # What is written can be read again.
    path = source.parent / "tasks.jsonl"
    datasets.save(made, path)
    assert json.loads(path.read_text().splitlines()[0])["source"] == "columns"
    assert datasets.load(path) == tuple(made)


def test_a_task_of_two_releases(bubblewrap, source, small):
    """The fix makes a file, removes one and changes one; the tests are the new release's, hidden here."""
    old = source
    (old / "oddments.py").write_text("OLD = 1\n")
    new_files = {
        "columns.py": CODE.replace("100 * part / whole", "100 * part / abs(whole)")
        + "\n\nfrom more import X\n",
        "more.py": "X = 7\n",
        "tests/test_columns.py": TESTS.replace("== 33.3", "== 33.3\n    assert share(1, -2) == 50.0"),
        "tests/test_more.py": "import columns\n\n\ndef test_x():\n    assert columns.X == 7\n",
    }
    new = small.write(source.parent / "new", new_files)
    pair = {"name": "columns", "old": "1", "new": "2", "files": ["*.py"], "tests": ["tests/*.py"]}
    admitted = build.pair_task(bubblewrap, pair, old, new)
    task = admitted.instance
    assert task is not None, admitted
    assert (task.id, task.repo) == ("columns-2", "columns")
    assert set(task.fail_to_pass) == {"tests/test_columns.py::test_share", "tests/test_more.py::test_x"}
    assert len(task.pass_to_pass) == 3
    changes = {s.path: (s.old is None, s.new is None) for s in patches.parse(task.gold)}
    assert changes == {"columns.py": (False, False), "more.py": (True, False), "oddments.py": (False, True)}
    assert set(task.hidden) == {"tests/test_columns.py", "tests/test_more.py"}
    # Nothing but an import that fails decides nothing.
    only = small.write(
        source.parent / "only", new_files | {"columns.py": CODE, "tests/test_columns.py": TESTS}
    )
    (only / "tests" / "test_more.py").write_text("from more import X\n\n\ndef test_x():\n    assert X == 7\n")
    refused = build.pair_task(bubblewrap, pair, old, only)
    assert (refused.instance, "no test fails in 1 and passes in 2" in refused.reason) == (None, True)


def test_the_command_goes_on_where_it_was_ended(source, monkeypatch, tmp_path, capsys):
    package = {**PACKAGE, "version": "1", "sha256": ""}
    told = {"packages": [package], "pairs": []}
    monkeypatch.setattr(build, "recipes", lambda: told)
    monkeypatch.setattr(build, "sdist", lambda *_: source)
    monkeypatch.setenv("METAGYM_STATE", str(tmp_path / "state"))
    out = tmp_path / "out"

    def made(count: int) -> list:
        words = ["tasks", "build", f"--out={out}", "--workers=1", "--kind=all", f"--count={count}"]
        assert cli.main(words) == 0
        return list(datasets.load(out / "columns-mutation.jsonl"))

    first = made(1)
    assert len(first) == 1
    assert (out / "sources" / "columns-1" / "columns.py").is_file()
    looked_at = json.loads((out / ".columns-mutation.json").read_text())["looked_at"]
    more = made(2)
    assert (more[:1], len({t.id for t in more})) == (first, 2)
    assert json.loads((out / ".columns-mutation.json").read_text())["looked_at"] > looked_at
    assert made(2) == more
    assert "2 tasks of" in capsys.readouterr().out


def test_an_issue_says_what_is_seen():
    tests = [f"tests/test_a.py::TestX::test_{n}" for n in range(7)]
    text = build.issue_text({tests[0]: "ValueError: bad\n  more\n"}, tests)
    assert text.splitlines()[1:3] == ["- TestX.test_0: ValueError: bad   more", "- TestX.test_1"]
    assert text.endswith("\n- and 2 more")
    assert "tests/test_a.py" not in text
    told = {tests[0]: "TypeError: _row() takes 1 argument", tests[1]: "ValueError: borrow() and _rows()"}
    text = build.issue_text(told, tests, "_row")
    assert text.splitlines()[1:3] == [
        "- TestX.test_0: TypeError",
        "- TestX.test_1: ValueError: borrow() and _rows()",
    ]


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (None, "hangs or crashes"),
        ({"a": "passed", "b": "passed", "c": "passed"}, "unnoticed"),
        ({"a": "failed", "b": "error", "c": "passed"}, "breaks most tests"),
        ({"a": "failed"}, "breaks most tests"),  # it ended before all had run
        ({"a": "failed", "b": "passed", "c": "passed"}, ""),
        ({"a": "passed", "b": "failed", "c": "passed"}, "fails by import or attribute alone"),
    ],
)
def test_mutants_that_are_no_tasks(told, why):
    errors = {"a": "AssertionError", "b": "AttributeError"}
    said = None if told is None else {"outcomes": told, "errors": errors}
    assert build._unfit(said, ("a", "b", "c"), 1) == why


def test_admission(bubblewrap, source):
    """CASES 31, 32: flaky tests are dropped, a fix that fixes nothing and tests that hang are refused."""
    base = build.base_of(PACKAGE, source)
    coin = "\n\ndef test_flaky_{}():\n    import os\n    assert os.urandom(1)[0] % 2\n"
    flaky = "".join(coin.format(i) for i in range(6))
    bug = CODE.replace("max(found[i]", "min(found[i]").encode()
    names = tuple(f"tests/test_columns.py::test_{n}" for n in ("widths", "align"))
    loose = tuple(f"tests/test_columns.py::test_flaky_{i}" for i in range(6))
    task = dataclasses.replace(
        base,
        gold=patches.diff(bug, CODE.encode(), "columns.py"),
        change=patches.diff(CODE.encode(), bug, "columns.py"),
        fail_to_pass=names,
        pass_to_pass=("tests/test_columns.py::test_share", *loose),
        tests={"tests/test_columns.py": (TESTS + flaky).encode()},
        hidden=("tests/test_columns.py",),
        issue="x",
    )
    admitted = admission.admit(bubblewrap, task, runs=3)
    if admitted.instance is not None:  # else all the flaky ones came out alike but in the grader's own run
        assert set(admitted.instance.fail_to_pass) == set(names)
        assert "tests/test_columns.py::test_share" in admitted.instance.pass_to_pass
        assert set(admitted.flaky) <= set(loose)
        assert dict(admitted.errors)[names[0]] == "AssertionError"
    nothing = dataclasses.replace(task, gold=b"", pass_to_pass=())
    assert "no test fails without the fix" in admission.admit(bubblewrap, nothing, runs=1).reason
    hang = TESTS.replace("assert align([]) == []", "import time; time.sleep(60)")
    slow = dataclasses.replace(task, tests={"tests/test_columns.py": hang.encode()}, timeout_s=3.0)
    assert "did not end" in admission.admit(bubblewrap, slow, runs=1).reason


def test_the_built_in_tasks_are_fit(bubblewrap, tmp_path, monkeypatch):
    monkeypatch.setenv("METAGYM_CACHE", str(tmp_path / "cache"))
    assert len(toy.instances()) == 180
    task = toy.instance("mul", 45)
    assert task.split == "test"
    grader = SandboxGrader(bubblewrap, lambda id: task)
    assert grader.grade_instance(task, b"").outcome == "failed"
    assert grader.grade_instance(task, task.gold).outcome == "resolved"


def test_recipes_hold_hashes_and_no_sources():
    told = build.recipes()
    assert len(told["packages"]) >= 4
    assert len({p["name"] for p in told["pairs"]}) >= 6
    hashes = [p["sha256"] for p in told["packages"]]
    hashes += [p[key] for p in told["pairs"] for key in ("old_sha256", "new_sha256")]
    assert all(re.fullmatch("[0-9a-f]{64}", h) for h in hashes)
    splits: dict = {}
    for recipe in (*told["packages"], *told["pairs"]):  # by repository
        splits.setdefault(recipe["name"], set()).add(recipe["split"])
    assert all(len(s) == 1 for s in splits.values())
    assert {s for each in splits.values() for s in each} == {"train", "validation", "test"}


BENCH = {
    "instance_id": "o__r-1",
    "repo": "o/r",
    "base_commit": "abc",
    "patch": "diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a = 1\n+a = 2\n",
    "test_patch": "diff --git a/tests/test_x.py b/tests/test_x.py\nnew file mode 100644\n",
    "problem_statement": "a is wrong",
    "FAIL_TO_PASS": '["tests/test_x.py::test_a[x y]"]',
    "PASS_TO_PASS": ["tests/test_x.py::test_b"],
    "created_at": "2024-05-06T07:08:09Z",
    "image": "swebench/o__r-1",
}


def test_published_formats(tmp_path):
    path = tmp_path / "rows.jsonl"
    rebench = {
        **BENCH,
        "instance_id": "b",
        "docker_image": "i",
        "install_config": '{"test_cmd": "pytest -q"}',
    }
    smith = {k: v for k, v in BENCH.items() if k not in ("test_patch", "image")}
    smith |= {"instance_id": "s", "image_name": "jyangballin/x"}
    refused = {
        "empty": {**BENCH, "FAIL_TO_PASS": "[]"},
        "cut": {
            **BENCH,
            "FAIL_TO_PASS": ["tests/test_x.py::test_a[x"],
            "PASS_TO_PASS": ["tests/test_x.py::test_a[x y]"],
        },
        "django": {**BENCH, "FAIL_TO_PASS": ["test_a (x.Tests)"]},
        "no image": {**BENCH, "image": ""},
        "no fix": {**BENCH, "patch": ""},
        "tox": {**BENCH, "FAIL_TO_PASS": ["test_a"], "install_config": {"test_cmd": "tox -e py"}},
        "no tests": {**BENCH, "test_patch": ""},
        "r2e": {"expected_output_json": '{"test_a": "PASSED"}', "docker_image": "x"},
        "r2e twice": {
            "expected_output_json": '{"test_a": "PASSED"}',
            "execution_result_content": {
                "test_file_names": ["test_1.py", "test_2.py"],
                "test_file_codes": ["def test_a(): pass\n"] * 2,
            },
            "parsed_commit_content": {"file_diffs": []},
        },
        "lacks": {"instance_id": "x"},
    }
    rows = [BENCH, rebench, smith, *({**row, "instance_id": name} for name, row in refused.items())]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    good, why = datasets.read(path)
    assert [i.id for i in good] == ["o__r-1", "b", "s"]
    assert set(why) == set(refused)
    assert "cut off at a blank" in why["cut"]
    assert "execution_result_content is empty" in why["r2e"]
    assert "is a function of 2 of its files" in why["r2e twice"]
    assert "names no log parser and no command" in why["django"]
    assert "no field" in why["lacks"]
    assert good[0].fail_to_pass == ("tests/test_x.py::test_a[x y]",)
    assert good[0].test_patch == BENCH["test_patch"].encode()
    assert good[2].hidden == ("tests/test_x.py",)
    assert (good[0].created, good[0].image, good[0].split) == ("2024-05-06", "swebench/o__r-1", "test")
    (section,) = patches.parse(good[2].gold)
    assert (section.removed, section.added) == ((b"a = 2",), (b"a = 1",))
    whole = tmp_path / "rows.json"
    whole.write_text(json.dumps([BENCH]))
    assert datasets.load(whole) == good[:1]


def test_parquet(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "rows.parquet").write_bytes(b"")
    with pytest.raises(MissingExtraError, match="parquet"):
        datasets.load(tmp_path / "rows.parquet")


def test_parquet_is_read(tmp_path):
    """As the published files are: a test's list may be an array."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra parquet is not installed")
    import pyarrow

    table = pyarrow.Table.from_pylist([{**BENCH, "FAIL_TO_PASS": ["tests/test_x.py::test_a[x y]"]}])
    parquet.write_table(table, tmp_path / "rows.parquet")
    (one,) = datasets.load(tmp_path / "rows.parquet")
    assert one.fail_to_pass == ("tests/test_x.py::test_a[x y]",)


def test_selection_and_contamination(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([BENCH, {**BENCH, "instance_id": "late", "created_at": "2025-01-01"}]))
    one, late = datasets.load(path)
    choose = datasets.Selection(before="2024-12-01")
    assert choose.reasons(one) == []
    assert "not on the right side of 2024-12-01" in choose.reasons(late)[0]
    assert datasets.Selection(since="2024-12-01").reasons(late) == []
    assert "changes 1 files" in datasets.Selection(most_files=0).reasons(one)[0]
    assert "changes 2 lines" in datasets.Selection(most_lines=1).reasons(one)[0]
    errors = {one.fail_to_pass[0]: "ImportError"}
    assert "nothing but ImportError" in datasets.Selection().reasons(one, errors=errors)[0]
    assert "solved in 100%" in datasets.Selection(solve_rate=(0.0, 0.8)).reasons(one, solved=1.0)[0]
    told = datasets.contamination([one], [late, one])
    assert told == {
        "ids": ["o__r-1"],
        "repos": ["o/r"],
        "newest_training": "2024-05-06",
        "not_newer": ["o__r-1"],
    }


def test_predictions_file(tmp_path):
    datasets.predictions([("a", b"diff\xff\n")], "m", tmp_path / "p.jsonl")
    row = json.loads((tmp_path / "p.jsonl").read_text())
    assert (row["instance_id"], row["model_name_or_path"]) == ("a", "m")
    assert row["model_patch"].encode("utf-8", "surrogateescape") == b"diff\xff\n"

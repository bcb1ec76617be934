"""Patches: taken out of a sandbox, parsed, screened."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metagym.envs.swe import patches
from metagym.envs.swe.grading import open_sandbox


def diff(path: str, *, new: bool = False, mode: str = "100644", line: str = "x") -> bytes:
    head = f"diff --git a/{path} b/{path}\n"
    head += f"new file mode {mode}\n--- /dev/null\n" if new else f"--- a/{path}\n"
    body = f"@@ -0,0 +1 @@\n+{line}\n" if new else f"@@ -1 +1 @@\n-y\n+{line}\n"
    return (head + f"+++ b/{path}\n" + body).encode()


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("src/a.py", None),
        ("docs/latest.md", None),
        ("attestation/protest.py", None),
        ("a b/ü.py", None),
        ("calc/json.py", None),  # only the top level hides a module
        ("tests/x.txt", "a test"),
        ("pkg/test/data/x", "a test"),
        ("test_x.py", "a test"),
        ("pkg/x_test.py", "a test"),
        ("conftest.py", "conftest"),
        ("pkg/conftest.py", "conftest"),
        ("pytest.ini", "configuration"),
        ("tox.ini", "configuration"),
        ("setup.cfg", "configuration"),
        ("pyproject.toml", "configuration"),
        ("sub/setup.py", "configuration"),
        ("x.pth", "Python starts"),
        ("lib/sitecustomize.py", "Python starts"),
        ("a-1.dist-info/entry_points.txt", "installed package"),
        ("a.egg-info/PKG-INFO", "installed package"),
        (".git/hooks/post-checkout", "git"),
        ("sub/.GIT/config", "git"),
        (".gitmodules", "git"),
        ("../x", "outside"),
        ("/etc/passwd", "outside"),
        ("a/../../x", "outside"),
        ("x.so", "compiled"),
        ("p/__pycache__/x.py", "compiled"),
        ("pytest.py", "hides"),
        ("_pytest/__init__.py", "hides"),
        ("json/x.py", "hides"),
        ("src/random.py", "hides"),
        ("brought.txt", "the task brings"),
    ],
)
def test_what_may_go_in(path, why):
    screened = patches.screen(diff(path, new=True), protected={"brought.txt"})
    assert (list(screened.left_out) == [path]) == (why is not None)
    assert why is None or why in screened.left_out[path]


def test_what_the_fix_changes_is_no_test():
    assert patches.screen(diff("pkg/test/client.py"), allowed=("pkg/test/client.py",)).left_out == {}
    assert patches.screen(diff("json.py")).left_out == {}  # it was there before


@pytest.mark.parametrize(
    ("target", "good"), [("a.py", True), ("../a.py", True), ("../../a", False), ("/etc", False)]
)
def test_links(target, good):
    assert (patches.screen(diff("sub/l", new=True, mode="120000", line=target)).left_out == {}) == good


def test_submodules_are_left_out():
    assert "submodule" in patches.screen(diff("sub", new=True, mode="160000")).left_out["sub"]


def test_sections_of_every_kind():
    text = (
        b"From: somebody\n\n"
        b"diff --git a/old name b/new name\nsimilarity index 90%\nrename from old name\nrename to new name\n"
        b"--- a/old name\n+++ b/new name\n@@ -1,2 +1,2 @@\n-- a\n+++ b\n c\n"
        b'diff --git "a/\\303\\274.py" "b/\\303\\274.py"\nold mode 100644\nnew mode 100755\n'
        b"diff --git a/gone b/gone\ndeleted file mode 100644\n--- a/gone\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
        b"diff --git a/pic.png b/pic.png\nnew file mode 100644\nindex 0..1\nGIT binary patch\nliteral 3\n"
        b"KcmZo\n\n"
        b"diff --git a/empty b/empty\nnew file mode 100644\nindex 0000000..e69de29\n"
    )
    sections = patches.parse(text)
    assert [(s.old, s.new, s.mode, s.binary) for s in sections] == [
        ("old name", "new name", "", False),
        ("ü.py", "ü.py", "100755", False),
        ("gone", None, "100644", False),
        (None, "pic.png", "100644", True),
        (None, "empty", "100644", False),
    ]
    assert (sections[0].removed, sections[0].added) == ((b"- a",), (b"++ b",))
    assert b"".join(s.raw for s in sections) == text[text.index(b"diff") :]


def test_a_plain_diff_and_no_diff():
    plain = b"--- a/x.py\t2020\n+++ b/x.py\t2021\n@@ -1 +1 @@\n-a\n+b"
    (section,) = patches.parse(plain)
    assert (section.path, section.raw) == ("x.py", plain + b"\n")
    assert patches.parse(b"") == patches.parse(b"\n \n") == ()
    with pytest.raises(ValueError, match="this is no diff"):
        patches.parse(b"I fixed it.")
    with pytest.raises(ValueError, match="bytes, more than"):
        patches.parse(b"x" * (patches.MOST_BYTES + 1))


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_any_bytes(data):
    for patch in (data, diff("a.py") + data, data + b"\n" + diff("a.py")):
        try:
            screened = patches.screen(patch)
        except ValueError:
            continue
        assert all(patches.why_not(s) is None for s in screened.kept)


@given(st.lists(st.sampled_from(["a.py", "tests/t.py", "conftest.py", "b c.txt"]), unique=True))
def test_screening_keeps_the_rest_as_it_is(paths):
    screened = patches.screen(b"".join(diff(p) for p in paths))
    assert screened.patch == b"".join(diff(p) for p in paths if p in ("a.py", "b c.txt"))


def test_a_cheat_in_the_code():
    def found(line: str, path: str = "calc/a.py") -> bool:
        return any(patches.looks_like_a_cheat(s) for s in patches.parse(diff(path, line=line)))

    assert found("import _pytest.runner")
    assert found("if 'PYTEST_CURRENT_TEST' in os.environ: return 3")
    assert found("sys.settrace(f)")
    assert found("class A:  # pytest_runtest_makereport")
    assert not found("import _pytest.runner", "docs/a.md")
    assert not found("def __eq__(self, other): return self.x == other.x")
    assert not found("# tested with the test suite; _exit, sys.modules['x']")


def test_taking_it_out(bubblewrap, small, tmp_path, monkeypatch):
    """CASES 35, 36, 39, 40: staged, committed, stashed or without .git; binary, CRLF, no end of line."""
    monkeypatch.setenv("METAGYM_CACHE", str(tmp_path / "cache"))
    task = small.instance(small.write(tmp_path / "calc", small.FILES))
    sandbox = open_sandbox(bubblewrap, task)

    def run(command):
        return sandbox.exec(command, 30, env=task.env()).output

    assert patches.take(sandbox, "/testbed") == b""
    run("git config core.autocrlf true; printf '* text eol=crlf\\n*.py filter=x\\n' >.gitattributes")
    run(
        "printf 'three\\r\\nfour' >>windows.txt; printf ', still' >>unended.txt; "
        "printf '\\0\\xff\\1' >'bin ü'"
    )
    run(
        "sed -i 's/a - b/a + b/' calc/core.py; git add -A; git commit -qm one; echo >>README.md; git stash -q"
    )
    run(
        "mkdir new; echo 'x = 1' >new/a.py; ln -s a.py new/link; chmod +x README.md; "
        "git mv README.md READ; rm -rf .git"
    )
    run("mkfifo pipe; head -c 6M /dev/zero >huge; touch secret; chmod 0 secret; echo x >ignored.log")
    patch = patches.take(sandbox, "/testbed")
    sections = {s.path: s for s in patches.parse(patch)}
    assert set(sections) == {
        *(".gitattributes", "windows.txt", "unended.txt", "bin ü", "calc/core.py", "READ", "README.md"),
        *("new/a.py", "new/link", "ignored.log"),
    }
    assert b"+three\r\n+four\n\\ No newline" in sections["windows.txt"].raw
    assert sections["bin ü"].binary
    assert (sections["READ"].mode, sections["new/link"].mode) == ("100755", "120000")
    sandbox.close()
    # What was taken out gives the same files again.
    fresh = open_sandbox(bubblewrap, task)
    fresh.write("/tmp/p", patch)
    assert (
        fresh.exec(
            "git -c core.autocrlf=false apply --whitespace=nowarn /tmp/p", 30, env=task.env()
        ).exit_code
        == 0
    )
    assert fresh.read("/testbed/windows.txt") == b"one\r\ntwo\r\nthree\r\nfour"
    assert fresh.read("/testbed/unended.txt") == b"no end, still"
    assert fresh.read("/testbed/bin ü") == b"\x00\xff\x01"
    assert patches.take(fresh, "/testbed") == patch

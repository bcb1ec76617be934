"""A skipped test that the list does not name fails a CI run, and no other run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("ci", "listed", "passes"),
    [("true", "", False), ("true", "a_test.py::test_skipped needs a GPU\n", True), ("", "", True)],
)
def test_unlisted_skips_fail_in_ci(tmp_path, ci, listed, passes):
    (tmp_path / "conftest.py").write_text((HERE / "conftest.py").read_text())
    (tmp_path / "allowed_skips.txt").write_text("# a comment\n" + listed)
    (tmp_path / "a_test.py").write_text(
        "import pytest\ndef test_passes(): pass\ndef test_skipped(): pytest.skip('no GPU here')\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\npython_files = *_test.py\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "CI": ci}, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode == 0) is passes, done.stdout
    assert (
        "not in tests/allowed_skips.txt: a_test.py::test_skipped: Skipped: no GPU here" in done.stdout
    ) is not passes

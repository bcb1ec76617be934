"""A small repository with a bug, for tests: what `calc.add` does wrong, and how it is found."""

from pathlib import Path

from metagym.envs.swe import sites
from metagym.envs.swe.bubblewrap import own
from metagym.envs.swe.instances import Instance

FILES = {
    "calc/__init__.py": "from calc.core import add, mul, name\n",
    "calc/core.py": (
        "def add(a, b):\n    return a - b\n\n\ndef mul(a, b):\n    return a * b\n\n\n"
        'def name():\n    return "calc"\n'
    ),
    "calc/data.bin": "\x01\x02\n",
    "windows.txt": "one\r\ntwo\r\n",
    "unended.txt": "no end",
    "README.md": "# calc\n",
    "tests/__init__.py": "",
    "tests/test_mul.py": "from calc import mul\n\n\ndef test_mul():\n    assert mul(2, 3) == 6\n",
}
HIDDEN = {
    "tests/test_add.py": """\
import unittest

import pytest

from calc import add


@pytest.mark.parametrize("x", ["a b", "a c"])
def test_text(x):
    assert add(x, "::") == x + "::"


def test_add():
    assert add(1, 2) == 3
    assert add(20, 22) == 42


class TestUnit(unittest.TestCase):
    def test_zero(self):
        self.assertEqual(add(0, 5), 5)
"""
}
GOLD = (
    b"diff --git a/calc/core.py b/calc/core.py\n--- a/calc/core.py\n+++ b/calc/core.py\n"
    b"@@ -1,5 +1,5 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n \n \n def mul(a, b):\n"
)
FAIL_TO_PASS = (
    "tests/test_add.py::test_text[a b]",
    "tests/test_add.py::test_text[a c]",
    "tests/test_add.py::test_add",
    "tests/test_add.py::TestUnit::test_zero",
)


def write(folder: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(text.encode())
    own(folder)
    return folder


def instance(folder: Path, **kwargs) -> Instance:
    """The task, its source in `folder`."""
    return Instance(
        **{
            "id": "calc-1",
            "repo": "calc",
            "issue": "add() gives wrong sums: add(1, 2) is -1.",
            "gold": GOLD,
            "fail_to_pass": FAIL_TO_PASS,
            "pass_to_pass": ("tests/test_mul.py::test_mul",),
            "source": str(folder),
            "tests": {path: text.encode() for path, text in HIDDEN.items()},
            "site": sites.copied(),
            "timeout_s": 30.0,
            **kwargs,
        }
    )

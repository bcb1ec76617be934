"""A built-in set of tiny tasks: one function, one wrong operator. Nothing is downloaded.

`<operation>-<n>`: a package `calc` whose function `add`, `sub` or `mul` computes something else; the issue
gives an example. Splits are by number: 0 to 29 train, 30 to 39 validation, 40 to 59 test, which differ in the
numbers of the examples, in the names of the arguments and in what is computed by mistake.
"""

import functools
import os
import random
import shutil
import tempfile
from pathlib import Path

from metagym.envs.swe import sites
from metagym.envs.swe.bubblewrap import own
from metagym.envs.swe.instances import Instance, cache_folder

OPERATIONS = {"add": "+", "sub": "-", "mul": "*"}
SPLITS = {"train": range(30), "validation": range(30, 40), "test": range(40, 60)}
_NAMES = ("a b", "x y", "left right", "first second", "m n", "p q")
_VERSION = 2  # of the sources below


def _source() -> str:
    """The folder that all toy tasks start from: a package without its module."""
    folder = cache_folder() / f"toy-{_VERSION}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
        try:
            work.chmod(0o755)
            (work / "README.md").write_text("# calc\n\nArithmetic.\n")
            own(work)
            os.rename(work, folder)
        except OSError:
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return str(folder)


def _new_file(path: str, text: str) -> bytes:
    lines = text.splitlines()
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    return (head + f"@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)).encode()


def instance(operation: str, number: int) -> Instance:
    """One task, the same every time."""
    rng = random.Random(f"{operation}-{number}")
    right = OPERATIONS[operation]
    wrong = rng.choice([o for o in OPERATIONS.values() if o != right])
    one, two = rng.choice(_NAMES).split()
    values = rng.sample(range(2, 30), 2)
    compute = {"+": lambda x, y: x + y, "-": lambda x, y: x - y, "*": lambda x, y: x * y}
    expected, got = (compute[o](*values) for o in (right, wrong))
    code = f"def {operation}({one}, {two}):\n    return {one} {wrong} {two}\n"
    cases = [values, *([rng.randrange(30), rng.randrange(30)] for _ in range(3)), [7, 5]]
    asserts = "".join(f"    assert {operation}({x}, {y}) == {compute[right](x, y)}\n" for x, y in cases)
    path = f"calc/{operation}.py"
    gold = (
        f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1,2 +1,2 @@\n"
        f" def {operation}({one}, {two}):\n-    return {one} {wrong} {two}\n+    return {one} {right} {two}\n"
    )
    return Instance(
        id=f"{operation}-{number}",
        repo=operation,
        issue=(
            f"{operation}({values[0]}, {values[1]}) should be {expected}, it is {got}.\n"
            f"{path}:\n     1  def {operation}({one}, {two}):\n     2      return {one} {wrong} {two}"
        ),
        gold=gold.encode(),
        fail_to_pass=(f"tests/test_{operation}.py::test_{operation}",),
        pass_to_pass=(f"tests/test_{operation}.py::test_import",),
        split=next(s for s, numbers in SPLITS.items() if number in numbers),
        source=_source(),
        change=_new_file("calc/__init__.py", "# Arithmetic.") + _new_file(path, code),
        tests={
            f"tests/test_{operation}.py": (
                f"from calc.{operation} import {operation}\n\n\ndef test_{operation}():\n{asserts}\n\n"
                f"def test_import():\n    assert {operation}.__name__ == {operation!r}\n"
            ).encode()
        },
        site=sites.copied(),
        timeout_s=60.0,
        about={"made": "built in"},
    )


@functools.cache
def instances() -> tuple[Instance, ...]:
    """All of them."""
    return tuple(instance(o, n) for numbers in SPLITS.values() for n in numbers for o in OPERATIONS)

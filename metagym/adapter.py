"""Any text game as a text env: what has `reset()` and `step(text)`, whoever wrote it."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from metagym.text_env import TaskTable, TextEnv
from metagym.types import Task


class GameEnv(TextEnv):
    """A text env of games that others make.

    Args:
        make: (task, seed) -> a game. `game.reset()` returns its first text, or (text, info);
            `game.step(text)` a text, (text, reward, done), (text, reward, done, info), or gymnasium's five.
            It is closed, if it can be, before the next one begins. Must pickle for asynchronous vector envs.
        world: the tasks, a `metagym.text_env.NumberedTasks` or `ListedTasks`.
        score: a game's reward is its score so far, as in TextWorld: the reward is what a step adds to it.
        kwargs: of TextEnv: split, types, tasks, max_turns, max_chars, render_mode.

    `info["success"]` is the game's info "success" or "won", `admissible` its "admissible" or
    "admissible_commands", where it tells them. Observations longer than `max_chars` are cut.
    """

    def __init__(
        self, make: Callable[[Task, int], Any], world: TaskTable, *, score: bool = False, **kwargs: Any
    ):
        super().__init__(world, **{"max_turns": 100, **kwargs})
        self._make, self._score, self._game = make, score, None
        self._longest = kwargs.get("max_chars", 100_000)

    def close(self) -> None:
        getattr(self._game, "close", lambda: None)()
        self._game = None
        super().close()

    def _begin(self, task: Task, seed: int, rng: np.random.Generator, options: Mapping[str, Any]):
        self.close()
        self._game, self._so_far = self._make(task, seed), 0.0
        first = self._game.reset()
        text, info = first if isinstance(first, tuple) else (first, {})
        return text[: self._longest], _facts(info)

    def _act(self, action: str):
        got = self._game.step(action)  # type: ignore[union-attr]
        text, reward, done, *rest = got if isinstance(got, tuple) else (got, 0.0, False)
        truncated = len(rest) == 2 and bool(rest[0])
        if self._score:
            reward, self._so_far = reward - self._so_far, reward
        facts = _facts(rest[-1] if rest else {})
        return text[: self._longest], float(reward), bool(done), truncated, facts


def _facts(info: Mapping[str, Any]) -> dict[str, Any]:
    admissible = info.get("admissible", info.get("admissible_commands"))
    facts = {} if admissible is None else {"admissible": list(admissible)}
    return {"success": bool(info.get("success", info.get("won", False))), **facts}

"""NetHack itself: text in, text out, one episode at a time. The only module that imports nle.

A `Game` lives in a worker process, or in the caller's with `isolate=False`. What it adds to MiniHack:

* The seed is the task's: it seeds both of NetHack's generators, minigrid's where levels come from there,
  and what NetHack takes from the date (moon phase, Friday the 13th), so that an episode is the same in
  every process and on every day.
* Every message is kept. NLE goes through `--More--` and closes menus, text windows and questions that the
  type doesn't let the agent answer; what was on the screen goes into the observation all the same.
* Steps are counted by the caller: NLE's own limit is out of the way.
"""

import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # minihack imports pkg_resources
    import minihack  # noqa: F401  (registers its environments)
    import nle.nethack.nethack as nle_nethack

from metagym.envs.minihack import actions, render
from metagym.envs.minihack.frame import Frame
from metagym.errors import InputError

_MAX_GAMES = 4  # NetHacks kept for types played lately, 3.5 MB each
_NO_LIMIT = 1 << 60
_SHOWN = 40  # actions that feedback lists
_making = threading.Lock()


class _MiniGrid:
    """Stands in for the minigrid environment that MultiRoom takes its levels from, and seeds it for real."""

    def __init__(self, env: gym.Env):
        self._env, self._seed = env, 0
        self.unwrapped = env.unwrapped

    def seed(self, seed: int) -> None:
        self._seed = seed

    def reset(self) -> None:
        self._env.reset(seed=self._seed)


class _Recorder:
    """Keeps what the game says at each key press, with NLE's own presses between two steps."""

    def __init__(self, env: Any):
        keys = env._observation_keys
        self._message, self._screen = keys.index("message"), keys.index("tty_chars")
        self._internal, self._program = keys.index("internal"), keys.index("program_state")
        self._press, self._reset = env.nethack.step, env.nethack.reset
        env.nethack.step, env.nethack.reset = self.press, self.reset
        self.said: list[str] = []
        self.asks = False  # the last thing said is a question that is still open

    def clear(self) -> None:
        self.said, self.asks = [], False

    def reset(self, *args: Any, **kwargs: Any) -> Sequence[np.ndarray]:
        observation = self._reset(*args, **kwargs)
        self._note(observation)
        return observation

    def press(self, key: int) -> tuple[Sequence[np.ndarray], bool]:
        if self.asks and self.said and key == actions.ESCAPE:
            self.said[-1] += " (not answered)"
        observation, done = self._press(key)
        self._note(observation)
        return observation, done

    def _note(self, observation: Sequence[np.ndarray]) -> None:
        internal, over = observation[self._internal], observation[self._program][0]
        text = render.text_of(observation[self._message]).strip()
        if text:
            self.said.append(text)
        elif internal[3] and not over:  # waits for a key below a window
            self.said.append("\n".join(render.window_of(observation[self._screen])))
        self.asks = bool((internal[1] or internal[2]) and text and not internal[3] and not over)


class Game:
    """One player's NetHack.

    Args:
        directory: where NetHack's temporary files go.
        parts: of the observation, of PARTS in their order; or ("compact",).
        reward: "minihack" or "sparse" (1 for success, else 0).
        only: key codes that actions are restricted to; None: all of a type's own.
    """

    def __init__(self, directory: Path, parts: Sequence[str], reward: str, only: Sequence[int] | None):
        self._directory, self._parts, self._reward, self._only = directory, tuple(parts), reward, only
        self._games: dict[str, tuple[Any, _Recorder]] = {}
        self._env: Any = None
        self._type = ""

    def reset(self, kind: str, seed: int, goal: str, stairs: bool) -> Frame:
        """Starts a game of a type. `goal` is shown, `stairs` says whether it is the staircase down.

        Raises InputError if actions are restricted to something that the type doesn't have.
        """
        if kind not in self._games:
            if len(self._games) >= _MAX_GAMES:
                self._games.pop(next(iter(self._games)))[0].close()
            self._games[kind] = self._make(kind)
        self._games[kind] = self._games.pop(kind)  # the latest is the last
        self._env, self._recorder = self._games[kind]
        self._at = {name: i for i, name in enumerate(self._env._observation_keys)}
        own = [int(a) for a in self._env.minihack_actions]
        self._own = frozenset(own)
        if self._only is not None and (missing := [c for c in self._only if c not in self._own]):
            names = ", ".join(actions.CANONICAL[c] for c in missing)
            have = ", ".join(actions.CANONICAL[c] for c in own)
            raise InputError(f"actions={names}: {kind} does not have them. It has: {have}.")
        self._allowed = own if self._only is None else [c for c in own if c in self._only]
        self._stairs = stairs
        self._recorder.clear()
        self._env.seed(seed, seed, reseed=False)
        self._env.reset()
        return self._frame(0.0, None, None, "", f"Goal: {goal}")

    def step(self, text: str) -> Frame:
        """Acts. What can't be parsed or isn't allowed does nothing but give feedback."""
        asked = self._asked()
        if asked is not None and asked.answers:
            found = actions.answer(text, asked)
            options = asked.words
        else:
            code = actions.find(text)
            if code is None and asked is not None and len(text.strip()) == 1:
                code = ord(text.strip())
            options = [actions.CANONICAL[c] for c in self._allowed]
            allowed = code is not None and (code in self._allowed or (asked and code in self._own))
            found = (
                (actions.CANONICAL.get(code, text.strip()), code) if allowed and code is not None else None
            )
        if found is None:
            shown = text.strip() if len(text.strip()) <= 40 else text.strip()[:40] + "..."
            kept, self._recorder.said = self._recorder.said, []
            what = "is no answer to that" if asked is not None and asked.answers else "is not an action here"
            rest = f" and {len(options) - _SHOWN} more" if len(options) > _SHOWN else ""
            feedback = f'"{shown}" {what}. Possible: {", ".join(options[:_SHOWN])}{rest}.'
            frame = self._frame(0.0, None, None, feedback, "")
            self._recorder.said = kept
            return frame
        word, code = found
        self._recorder.clear()
        status_type = self._env.StepStatus
        _, reward, ended, _, info = self._env.step(self._env.actions.index(code))
        end = None
        if ended:
            # Memento calls a wrong turn successful, and pays -1.
            won = info["end_status"] == status_type.TASK_SUCCESSFUL
            died = info["end_status"] == status_type.DEATH
            end = "success" if won and reward > 0 else "death" if died else "failure"
        if self._reward == "sparse":
            reward = float(end == "success")
        return self._frame(float(reward), end, word, "", "")

    def close(self) -> None:
        for env, _ in self._games.values():
            env.close()
        self._games.clear()

    def screen(self) -> np.ndarray:
        """A copy of the terminal, u8[24, 80]."""
        return self._array("tty_chars").copy()

    def _make(self, kind: str) -> tuple[Any, _Recorder]:
        # NLE makes its directory wherever `tempfile` says: give its module another `tempfile`.
        with _making, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            real = nle_nethack.tempfile
            nle_nethack.tempfile = SimpleNamespace(  # type: ignore[assignment]
                TemporaryDirectory=lambda **kw: real.TemporaryDirectory(dir=self._directory, **kw),
                TemporaryFile=real.TemporaryFile,
                NamedTemporaryFile=real.NamedTemporaryFile,
            )
            try:
                env = gym.make(kind, disable_env_checker=True, fix_moon_phase=True).unwrapped
            finally:
                nle_nethack.tempfile = real
        env: Any
        env.minihack_actions = tuple(env.actions)
        env.minihack_limit = env._max_episode_steps
        env._max_episode_steps = _NO_LIMIT
        env._quit_game = lambda observation, done: None  # the next reset ends it; its farewell is no message
        env._minihack_obs_keys = []  # the arrays are read where NLE keeps them
        if actions.ESCAPE not in env.minihack_actions:
            env.actions = (*env.minihack_actions, actions.ESCAPE)  # a way out of every question
        if hasattr(env, "minigrid_env"):
            env.minigrid_env = _MiniGrid(env.minigrid_env)
        return env, _Recorder(env)

    def _array(self, name: str) -> np.ndarray:
        return self._env.last_observation[self._at[name]]

    def _asked(self) -> actions.Question | None:
        if not self._recorder.asks:
            return None
        text = render.text_of(self._array("message"))
        return actions.question(text, self._own)

    def _frame(self, reward: float, end: str | None, action: str | None, feedback: str, goal: str) -> Frame:
        asked = None if end else self._asked()
        said = [s for s in self._recorder.said if s]
        news = said if asked is None else said[:-1]  # the last is the question
        if self._parts == ("compact",):
            observation = self._compact(" ".join(news), asked, feedback, end)
        else:
            observation = self._full("\n".join(news), asked, feedback, goal, end)
        if asked is not None and asked.answers:
            admissible = asked.words
        else:
            admissible = [actions.CANONICAL[c] for c in self._allowed]
        return Frame(
            observation,
            reward,
            end,
            action,
            [] if end else admissible,
            "\n".join(said),
            self._env.minihack_limit,
        )

    def _position(self) -> tuple[int, int]:
        column, row = self._array("blstats")[:2].tolist()
        return row, column

    def _full(
        self, news: str, asked: actions.Question | None, feedback: str, goal: str, end: str | None
    ) -> str:
        blocks = []
        if goal and "goal" in self._parts:
            blocks.append(goal)
        if feedback:
            blocks.append(feedback)
        if news and "message" in self._parts:
            blocks.append(news)
        if asked is not None:
            answers = f" Answer with one of: {', '.join(asked.words)}." if asked.answers else ""
            blocks.append(f"The game asks: {asked.text}{answers}")
        if end:
            return "\n\n".join([*blocks, _ENDS[end]])
        if "seen" in self._parts:
            blocks.append(self._seen())
        if "map" in self._parts:
            blocks.append("Map (you are @):\n" + render.map_of(self._array("chars")))
        if "inventory" in self._parts:
            items = render.inventory_of(self._array("inv_letters"), self._array("inv_strs"))
            blocks.append("Inventory:\n" + ("\n".join(items) or "nothing"))
        if "statistics" in self._parts:
            blocks.append("Status: " + render.statistics_of(self._array("blstats")))
        return "\n\n".join(blocks)

    def _seen(self) -> str:
        glyphs, (row, column) = self._array("glyphs"), self._position()
        seen, more = render.things(glyphs, self._array("screen_descriptions"), row, column)
        lines = [f"- {name}: {render.where(r, c)}" for name, r, c in seen]
        if more:
            lines.append(f"- and {more} things farther away")
        free = ", ".join(render.ways(glyphs, row, column)) or "nowhere"
        return "You see:\n" + ("\n".join(lines) or "- nothing of note") + f"\nFree to step: {free}"

    def _compact(self, news: str, asked: actions.Question | None, feedback: str, end: str | None) -> str:
        if end:
            return _ENDS[end]
        if asked is not None:
            return ("No. " if feedback else "") + asked.text
        glyphs, (row, column) = self._array("glyphs"), self._position()
        seen, _ = render.things(glyphs, self._array("screen_descriptions"), row, column)
        head = "Not possible. " if feedback else ""
        limit = COMPACT_TOKENS - render.tokens(head)
        news = "" if news.startswith("Hello Agent") else news.replace("\n", " ")
        return head + render.compact(self._stairs, seen, render.ways(glyphs, row, column), news, limit)


_ENDS = {"success": "You reached the goal.", "failure": "You failed.", "death": "You died."}
COMPACT_TOKENS = 18

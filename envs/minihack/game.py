"""NetHack itself: text in, text out, one episode at a time. The only module that imports nle.

A `Game` lives in a worker process, or in the caller's with `isolate=False`. What it adds to MiniHack:

* The seed is the task's: it seeds both of NetHack's generators, minigrid's where levels come from there,
  and what NetHack takes from the date (moon phase, Friday the 13th), so that an episode is the same in
  every process and on every day.
* Every message is kept: `--More--` and windows that are only to be read are gone through, and what was on the
  screen goes into the observation.
* Every question is asked: a letter, yes or no, a direction, a line of text, a menu, a place on the map. With
  `prompts="minihack"` NLE closes menus, and questions that the type doesn't let the agent answer, and that is
  told.
* Steps are counted by the caller: NLE's own limit is out of the way.
"""

import subprocess
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # minihack imports pkg_resources
    import minihack.base  # registers its environments
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
        self.points = ""  # the question where something is, while the game waits for that
        self.reads = False  # the command's menus are only to be read

    def clear(self) -> None:
        self.said, self.asks = [], False

    def reset(self, *args: Any, **kwargs: Any) -> Sequence[np.ndarray]:
        self.points = ""
        observation = self._reset(*args, **kwargs)
        self._note(observation)
        return observation

    def press(self, key: int) -> tuple[Sequence[np.ndarray], bool]:
        if self.asks and self.said and key == actions.ESCAPE:
            self.said[-1] += " (not answered)"
        if key in actions.CHOOSES:
            self.points = ""
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
        if "(For instructions type a" in text and not over:
            before = self.said[-2].rpartition("  ")[2] if len(self.said) > 1 else ""
            asked = text.partition("(For instructions")[0].strip()
            self.points = asked or (before if before.endswith("?") else "Which place?")


class Game:
    """One player's NetHack.

    Args:
        directory: where NetHack's temporary files go.
        parts: of the observation, of PARTS in their order; or ("compact",).
        reward: "minihack" or "sparse" (1 for success, else 0).
        only: key codes that actions are restricted to; None: all of a type's own.
        prompts: "all" or "minihack".
        levels: custom types: name -> `kind` ("skill" or "navigation") and arguments of MiniHack's class for
            it, of which `des_file` is the text of the level.
    """

    def __init__(
        self,
        directory: Path,
        parts: Sequence[str],
        reward: str,
        only: Sequence[int] | None,
        prompts: str = "all",
        levels: Mapping[str, Mapping[str, Any]] | None = None,
    ):
        self._directory, self._parts, self._reward, self._only = directory, tuple(parts), reward, only
        self._all, self._levels = prompts == "all", levels or {}
        self._keys: list[int] = []  # of an answer, those still to be pressed
        self._head: tuple[str, int] | None = None  # of the menu that they answer
        self._done = False  # and whether that ends it
        self._aims = False  # the last key was a prefix: the game waits for a direction, and says nothing
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
        self._keys.clear()
        self._aims = False
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
            found = self._command(text, asked is not None)
            options = [actions.CANONICAL[c] for c in self._allowed]
        if found is None:
            shown = text.strip() if len(text.strip()) <= 40 else text.strip()[:40] + "..."
            kept, self._recorder.said = self._recorder.said, []
            what = "is no answer to that" if asked is not None and asked.answers else "is not an action here"
            rest = f" and {len(options) - _SHOWN} more" if len(options) > _SHOWN else ""
            also = "a line of text, or " if asked is not None and asked.kind == "line" else ""
            feedback = f'"{shown}" {what}. Possible: {also}{", ".join(options[:_SHOWN])}{rest}.'
            frame = self._frame(0.0, None, None, feedback, "")
            self._recorder.said = kept
            return frame
        word, codes = found
        self._recorder.clear()
        if asked is None:
            self._recorder.reads = codes[0] in actions.READING
        self._aims = asked is None and codes[0] in actions.PREFIXES
        self._keys[:] = codes[1:]
        self._head, self._done = None, codes[-1] == actions.ENTER
        if asked is not None and asked.kind == "menu":
            self._head = self._heading(self._env.last_observation)
        status_type = self._env.StepStatus
        _, reward, ended, _, info = self._env.step(self._env.actions.index(codes[0]))
        if self._aims:
            self._recorder.clear()  # what stood there already
        end = None
        if ended:
            # Memento calls a wrong turn successful, and pays -1.
            won = info["end_status"] == status_type.TASK_SUCCESSFUL
            died = info["end_status"] == status_type.DEATH
            end = "success" if won and reward > 0 else "death" if died else "failure"
        if self._reward == "sparse":
            reward = float(end == "success")
        return self._frame(float(reward), end, word, "", "")

    def _command(self, text: str, asked: bool) -> tuple[str, tuple[int, ...]] | None:
        """The action that a text is, in canonical words, and its key."""
        code = actions.find(text)
        if code is None and asked and len(text.strip()) == 1:
            code = ord(text.strip())
        if code is None or not (code in self._allowed or (asked and code in self._own)):
            return None
        return actions.CANONICAL.get(code, text.strip()), (code,)

    def _settle(self, observation: Sequence[np.ndarray], done: bool, exceptions: bool = True) -> Any:
        """In place of NLE's own: presses the rest of an answer, reads on, stops at what is to be answered."""
        at, press = self._env._internal_index, self._env.nethack.step
        while not done:
            _, asks, line, window, *_ = observation[at].tolist()
            if self._keys and (self._same_menu(observation) if self._head else asks or line):
                del self._recorder.said[-1:]  # the answer so far, as the game shows it
                observation, done = press(self._keys.pop(0))
                continue
            self._keys.clear()
            if self._head and self._done and self._same_menu(observation):
                self._done = False  # it is still there: nothing in it could be chosen
                observation, done = press(32)
                continue
            if window and self._menu(observation) is None:
                observation, done = press(32)
            elif (asks or line) and not window and self._over(observation):
                observation, done = press(actions.ESCAPE)  # the end's own questions
            else:
                break
        return observation, done

    def _heading(self, observation: Sequence[np.ndarray]) -> tuple[str, int]:
        """What tells a menu from the next one: its first line, and the number of its pages."""
        screen = observation[self._at["tty_chars"]]
        return next(iter(render.window_of(screen)), ""), render.page_of(screen)[1]

    def _same_menu(self, observation: Sequence[np.ndarray]) -> bool:
        now = self._heading(observation)
        return (
            bool(observation[self._env._internal_index][3])
            and now[1] > 0
            and (now == self._head or (self._head is not None and now[1] == self._head[1] > 1))
        )

    def _over(self, observation: Sequence[np.ndarray]) -> bool:
        return bool(observation[self._env._program_state_index][0])

    def _menu(self, observation: Sequence[np.ndarray]) -> actions.Question | None:
        """The menu on the screen, if something in it is to be chosen."""
        screen = observation[self._at["tty_chars"]]
        page, pages = render.page_of(screen)
        if self._recorder.reads or not page or self._over(observation):
            return None
        return actions.menu(render.window_of(screen), page, pages)

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
            id, kwargs = kind, dict(self._levels.get(kind, {}))
            try:
                if kwargs:
                    id = f"MiniHack-{kwargs.pop('kind').capitalize()}-Custom-v0"
                    _check_level(kind, kwargs["des_file"], self._directory)
                env = gym.make(id, disable_env_checker=True, fix_moon_phase=True, **kwargs).unwrapped
            except TypeError as error:  # an argument that MiniHack doesn't take
                if not kwargs:
                    raise
                why = str(error).partition(" was raised from")[0]
                raise InputError(f"level_options= are not what MiniHack takes: {why}") from error
            finally:
                nle_nethack.tempfile = real
        env: Any
        wizard = tuple(actions.WIZARD.values()) if kwargs.get("wizard") else ()
        env.minihack_actions = (*env.actions, *wizard)
        env.minihack_limit = env._max_episode_steps
        env._max_episode_steps = _NO_LIMIT
        env._quit_game = lambda observation, done: None  # the next reset ends it; its farewell is no message
        env._minihack_obs_keys = []  # the arrays are read where NLE keeps them
        more = range(256) if self._all else (actions.ESCAPE,)  # answers; a way out of every question
        env.actions = (*env.minihack_actions, *(c for c in more if c not in env.minihack_actions))
        if self._all:
            env._perform_known_steps = self._settle
        if hasattr(env, "minigrid_env"):
            env.minigrid_env = _MiniGrid(env.minigrid_env)
        return env, _Recorder(env)

    def _array(self, name: str) -> np.ndarray:
        return self._env.last_observation[self._at[name]]

    def _asked(self) -> actions.Question | None:
        recorder, keys = self._recorder, actions.ANY if self._all else self._own
        internal = self._array("internal")
        if self._all and internal[3] and not recorder.asks:
            return self._menu(self._env.last_observation)
        if recorder.asks:
            text = render.text_of(self._array("message"))
            return actions.line(text) if internal[2] and self._all else actions.question(text, keys)
        if recorder.points:
            row, column = self._position()
            y, x = self._array("tty_cursor").tolist()
            cursor = f"The cursor is {render.where(y - 1 - row, x - column)}."
            return actions.position(f"{recorder.points} {cursor}", keys)
        return actions.question("In what direction?", keys) if self._aims else None

    def _frame(self, reward: float, end: str | None, action: str | None, feedback: str, goal: str) -> Frame:
        asked = None if end else self._asked()
        said = [s for s in self._recorder.said if s]
        news = said
        if asked is not None and said and asked.text.startswith(said[-1].partition("(For instr")[0].strip()):
            news = said[:-1]  # the last is the question
        if self._parts == ("balrog",):
            observation = self._balrog("\n".join(said), asked, feedback, goal, end)
        elif self._parts == ("compact",):
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
            blocks.append(_ASKS.get(asked.kind, _ASKS[""]).format(asked.text, ", ".join(asked.words)))
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

    def _balrog(
        self, said: str, asked: actions.Question | None, feedback: str, goal: str, end: str | None
    ) -> str:
        screen, descriptions = self._array("tty_chars"), self._array("screen_descriptions")
        row, column = self._position()
        message = "\n".join(filter(None, (goal, feedback, said, asked.text if feedback and asked else "")))
        sections = {
            "message": message if not end else f"{said}\n{_ENDS[end]}".strip(),
            "language observation": render.balrog_seen(self._array("glyphs"), descriptions, row, column),
            "cursor": render.balrog_cursor(descriptions, row, column, self._array("tty_cursor").tolist()),
            "map": render.balrog_map(screen),
            "inventory": "\n".join(render.inventory_of(self._array("inv_letters"), self._array("inv_strs"))),
        }
        return "\n".join(f"{name}:\n{text}\n" for name, text in sections.items())


def _check_level(name: str, text: str, directory: Path) -> None:
    """Compiles a level. Raises InputError with what NetHack's compiler says."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        Path(folder, "mylevel.des").write_text(text)
        compiler = Path(minihack.base.HACKDIR, "lev_comp")
        run = subprocess.run(
            [compiler, "mylevel.des"], cwd=folder, capture_output=True, text=True, errors="replace"
        )
        said = " ".join((run.stdout + run.stderr).split())
        if run.returncode or not Path(folder, "mylevel.lev").exists():
            raise InputError(
                f"level {name!r} can't be compiled: {said or 'its LEVEL or MAZE must be named mylevel'}."
            )


_ASKS = {
    "": "The game asks: {0} Answer with one of: {1}.",
    "key": "The game asks: {0} Answer with any one key, or escape.",
    "line": "The game asks: {0} Answer with a line of text, or escape.",
    "menu": 'The game shows a menu:\n{0}\nAnswer with letters, such as "a" or "a c", or: {1}.',
    "position": "The game asks: {0} Move the cursor or choose its place with one of: {1}.",
}
_ENDS = {"success": "You reached the goal.", "failure": "You failed.", "death": "You died."}
COMPACT_TOKENS = 18

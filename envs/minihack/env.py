"""The environment. Imports neither nle nor minihack: those live in the worker (see `metagym.envs.worker`)."""

import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from metagym.envs import worker
from metagym.envs.minihack import actions, catalog
from metagym.envs.minihack.frame import Frame
from metagym.errors import InputError, MetaGymError, MissingExtraError, UnknownNameError, WorldError
from metagym.text_env import NumberedTasks, TextEnv, names_in
from metagym.types import Task

PARTS = ("goal", "message", "seen", "map", "inventory", "statistics")
REWARDS = ("minihack", "sparse")
PROMPTS = ("all", "minihack")
LEVEL_KINDS = ("skill", "navigation")
SPLITS = {
    "train": range(0, 1_000_000),
    "validation": range(1_000_000, 1_100_000),
    "test": range(1_100_000, 1_200_000),
}
_TARGET = "metagym.envs.minihack.game:Game"


def _full_task(id: Any) -> Any:
    """A task id with its type's full name; "Room-5x5:3" is "MiniHack-Room-5x5-v0:3"."""
    if not isinstance(id, str):
        return id
    kind, colon, number = id.rpartition(":")
    return f"{catalog.full_name(kind)}{colon}{number}" if colon else id


def _refuse(kinds: Iterable[str]) -> None:
    for kind in kinds:
        if kind in catalog.FAMILY_OF and (reason := catalog.why_not(kind)):
            raise InputError(f"type {kind!r} can't run: {reason}.")


class MiniHackEnv(TextEnv):
    """MiniHack (NetHack levels) with text in and text out.

    A task is `"<type>:<n>"`, a type one of MiniHack's environment ids; both also go by the short name,
    `"Room-Random-5x5:7"`. The number seeds NetHack, so a task is the same level and the same luck, always:
    the seed of an episode adds nothing to it, it only draws the task where none is asked for. The splits are
    the numbers 0 to 999,999 (train), 1,000,000 to 1,099,999 (validation) and up to 1,199,999 (test).

    Observation: the parts of `observation`, in this order: the goal (in the first one only), what the game
    says, what is seen with directions, the map, the inventory, the statistics. "full" is all of them,
    "compact" a form of under 20 tokens ("The staircase is 2 steps north and 1 step east."), which leaves
    out most; a question of the game and feedback to a bad action always stand; "balrog" has the sections of
    BALROG's (message, language observation, cursor, map, inventory). Action: see
    `metagym.envs.minihack.actions`. One that can't be parsed or isn't allowed gives feedback, costs a turn
    and does nothing.

    Reward: MiniHack's own, or 1 for success and else 0. Terminates at success, death or another end of the
    task; truncates at MiniHack's step limit, or `max_turns`. Reaching the goal with the last step counts,
    while MiniHack calls that aborted.

    `info` has, besides `task`, `seed` and `success`: `action` (what was done in canonical words, None where
    nothing was), `admissible` (canonical words, the answers while the game asks), `goal`, `message` (all that
    the game said) and `end` ("success", "failure", "death", "limit", or None).

    Args:
        split, types, tasks, max_turns, render_mode: see TextEnv.
        observation: "full", "compact", "balrog", or some of PARTS.
        reward: "minihack" or "sparse".
        actions: words that the agent is restricted to, such as four moves; None: the type's own actions.
            Questions can be answered all the same.
        prompts: "all": every question of the game is the agent's to answer: letters, directions, lines of
            text, menus, places on the map. "minihack": those that MiniHack lets it answer, with the
            type's own keys; it closes the others, which the observation tells.
        levels: levels of your own, in place of MiniHack's: name -> a des file, as a path or as its text (the
            level's name in it must be "mylevel"), or a folder of `*.des`. A name is a type.
        level_options: for these: `kind` "skill" (default: all commands) or "navigation" (moves), and what
            MiniHack's class of that kind takes, such as `max_episode_steps`, `character`, `wizard`.
        isolate: NetHack in a worker process, so that it can't take this one along; False: in this process,
            faster, without deadlines.
        timeout_s: of each reset and step of a worker, in seconds.
        recycle_after: episodes after which a worker is replaced by a fresh one.

    Raises MissingExtraError without nle or minihack, InputError for a type that can't run here, with the
    reason; reset and step raise WorldError if NetHack crashes, hangs or loses its files: the next reset
    starts another.
    """

    def __init__(
        self,
        *,
        split: str | None = "train",
        types: str | Iterable[str] | None = None,
        tasks: str | Iterable[str] | None = None,
        observation: str | Sequence[str] = "full",
        reward: str = "minihack",
        actions: Iterable[str] | None = None,
        prompts: str = "all",
        levels: str | PathLike[str] | Mapping[str, str | PathLike[str]] | None = None,
        level_options: Mapping[str, Any] | None = None,
        isolate: bool = True,
        timeout_s: float = 30.0,
        recycle_after: int = 200,
        max_turns: int | None = None,
        render_mode: str | None = None,
    ):
        for package in ("nle", "minihack"):
            if not catalog.installed(package):
                raise MissingExtraError(
                    "metagym/MiniHack-v0", "minihack", ModuleNotFoundError(f"no package {package}")
                )
        self._levels = _read_levels(levels, level_options or {})
        chosen, ids = names_in("types", types), names_in("tasks", tasks)
        if chosen is not None:
            chosen = tuple(catalog.full_name(t) for t in chosen)
            _refuse(chosen)
        if ids is not None:
            ids = tuple(_full_task(id) for id in ids)
            _refuse(id.rpartition(":")[0] for id in ids)
        super().__init__(
            NumberedTasks(tuple(self._levels) or catalog.runnable(), SPLITS),
            split=split,
            types=chosen,
            tasks=ids,
            max_turns=max_turns,
            render_mode=render_mode,
        )
        if reward not in REWARDS:
            raise UnknownNameError("reward", reward, REWARDS)
        if not timeout_s > 0 or recycle_after < 1:
            raise InputError(
                "timeout_s must be positive and recycle_after at least 1, "
                f"got {timeout_s} and {recycle_after}."
            )
        if prompts not in PROMPTS:
            raise UnknownNameError("prompts", prompts, PROMPTS)
        self._game_kwargs = {
            "parts": _parts(observation),
            "reward": reward,
            "only": _codes(actions),
            "prompts": prompts,
            "levels": self._levels,
        }
        self._isolate, self._recycle_after, self._episodes = isolate, recycle_after, 0
        self.waits = isolate
        self._worker = worker.Worker(_TARGET, self._game_kwargs, label="nle", timeout_s=timeout_s)
        self._game: Any = None
        self._limit = 0

    def task(self, id: str) -> Task:
        id = _full_task(id)
        _refuse([str(id).rpartition(":")[0]])
        return super().task(id)

    def close(self) -> None:
        """Ends the worker. Idempotent; a later reset starts another."""
        self._worker.close()
        if self._game is not None:
            game, self._game = self._game, None
            game.close()
        super().close()

    def _begin(
        self, task: Task, seed: int, rng: np.random.Generator, options: Mapping[str, Any]
    ) -> tuple[str, Mapping[str, Any]]:
        if self._episodes >= self._recycle_after:
            self._worker.close()
            self._episodes = 0
        self._episodes += 1
        family = catalog.FAMILY_OF.get(task.type, catalog.CUSTOM)
        frame = self._call("reset", task.type, int(task.id.rpartition(":")[2]), family.goal, family.stairs)
        self._limit, self._goal = self.max_turns or frame.limit, family.goal
        return frame.observation, self._facts(frame, frame.end)

    def _act(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        frame = self._call("step", action)
        truncated = frame.end is None and self._turn >= self._limit
        end = "limit" if truncated else frame.end
        return frame.observation, frame.reward, frame.end is not None, truncated, self._facts(frame, end)

    def _facts(self, frame: Frame, end: str | None) -> Mapping[str, Any]:
        return {
            "success": end == "success",
            "admissible": frame.admissible,
            "action": frame.action,
            "goal": self._goal,
            "message": frame.message,
            "end": end,
        }

    def _call(self, method: str, *args: Any) -> Frame:
        try:
            if self._isolate:
                return self._worker.call(method, *args)
            if self._game is None:
                self._game = _in_process(self._game_kwargs)
                weakref.finalize(self, self._game.close)
            return getattr(self._game, method)(*args)
        except ImportError as error:  # there, but broken
            raise MissingExtraError("metagym/MiniHack-v0", "minihack", error) from error
        except MetaGymError:
            raise
        except Exception as error:
            game, self._game = self._game, None
            if game is not None:
                game.close()
            raise WorldError(f"the world failed in {method}(): {error!r}") from error


def _in_process(kwargs: Mapping[str, Any]) -> Any:
    from metagym.envs.minihack.game import Game

    return Game(directory=Path(worker.scratch("nle")), **kwargs)


def _parts(observation: str | Sequence[str]) -> tuple[str, ...]:
    names = names_in("observation", observation)
    if names is None:
        raise InputError(f'observation= takes "full", "compact", "balrog" or some of {", ".join(PARTS)}.')
    if names == ("full",):
        return PARTS
    if names in (("compact",), ("balrog",)):
        return names
    for name in names:
        if name not in PARTS:
            raise UnknownNameError("part of the observation", name, PARTS, 'Or "full", "compact", "balrog".')
    return tuple(part for part in PARTS if part in names)


def _read_levels(levels: Any, options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Name -> `kind` and what MiniHack's class takes, the text of the level in it."""
    if levels is None:
        if options:
            raise InputError("level_options= is for levels of your own: pass levels= too.")
        return {}
    if not isinstance(levels, str | PathLike | Mapping) or not isinstance(options, Mapping):
        raise InputError(
            "levels= takes a folder of *.des files or {name: des file}, level_options= a dict, "
            f"got {levels!r:.100} and {options!r:.100}."
        )
    steps = options.get("max_episode_steps", 1)
    if not isinstance(steps, int) or steps < 1:
        raise InputError(f"max_episode_steps must be an int of at least 1, got {steps!r:.100}.")
    if "des_file" in options:
        raise InputError("level_options= can't have des_file: the levels are what levels= says.")
    if not isinstance(levels, Mapping):
        folder = Path(levels)
        levels = {path.stem: path for path in sorted(folder.glob("*.des"))}
        if not levels:
            raise InputError(f"levels={str(folder)!r} is no folder with *.des files in it.")
    kind = options.get("kind", "skill")
    if kind not in LEVEL_KINDS:
        raise UnknownNameError("kind of level", kind, LEVEL_KINDS)
    made = {}
    for name, level in levels.items():
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
            raise InputError(
                f"a level's name is made of letters, digits, '_', '-' and '.', got {name!r:.100}."
            )
        if catalog.full_name(name) in catalog.FAMILY_OF:
            raise InputError(f"a level can't be named {name!r}: MiniHack has a type of that name.")
        try:
            text = level if isinstance(level, str) and "\n" in level else Path(level).read_text()
            text.encode()
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"level {name!r} can't be read: {error}") from error
        made[name] = {**options, "kind": kind, "des_file": text if text.endswith("\n") else f"{text}\n"}
    if not made:
        raise InputError("levels={} has no level: pass None for MiniHack's own.")
    return made


def _codes(words: Iterable[str] | None) -> tuple[int, ...] | None:
    names = names_in("actions", words)
    if names is None:
        return None
    codes = []
    for word in names:
        code = actions.find(word)
        if code is None:
            raise UnknownNameError("action", word, actions.CANONICAL.values())
        codes.append(code)
    if not codes:
        raise InputError("actions=() leaves the agent nothing to do: pass None for the type's own.")
    return tuple(codes)

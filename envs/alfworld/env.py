"""The environment and its tasks. Imports neither TextWorld nor ALFWorld: those live in the worker."""

import functools
import importlib.util
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, overload

import numpy as np

from metagym import wrappers
from metagym.envs import worker
from metagym.envs.alfworld import data as files
from metagym.envs.alfworld import game as games
from metagym.envs.alfworld import generate, plan
from metagym.envs.alfworld.native import Play
from metagym.errors import InputError, MissingExtraError, UnknownNameError, WorldError
from metagym.text_env import ListedTasks, NumberedTasks, TextEnv
from metagym.types import Task

TYPES = games.TYPES
ENGINES = ("native", "textworld")
GENERATED = {
    "generated": range(0, 1_000_000),
    "generated_validation": range(1_000_000, 1_100_000),
    "generated_test": range(1_100_000, 1_200_000),
}
SPLITS = (*files.SPLITS, *GENERATED)
SPLIT_NAMES = {"validation": "valid_seen", "test": "valid_unseen"}
ALIASES = {r"put (.+?) (?:in/on|in|on|into|onto|inside) (.+)": r"move \1 to \2"}
"""Other words for an action, for `metagym.wrappers.ActionAliases`."""
_STANDS_IN: dict[str, str] = dict(zip(files.SPLITS, GENERATED, strict=True))  # where there is no data
HORIZON = 50  # steps, as in the published results
PROMPT = """\
You are in a house and have one task to do. At each turn you read what happened and give one command:
  go to X            X is a place: a table, a shelf, a cabinet, an appliance
  open X, close X    the place you are at
  take O from X      you can hold one object
  move O to X        put what you hold in or on the place you are at
  heat O with X      X is a microwave, O what you hold
  cool O with X      X is a fridge
  clean O with X     X is a sinkbasin
  slice O with K     K is a knife that you hold
  use O              turn on a lamp that is where you are
  examine X          a place you are at, or what you hold
  look, inventory, help
Use the names you read, with their numbers, such as "take mug 1 from shelf 2". "Nothing happens." means that
the command is not possible here: look for another way."""
"""A system prompt for agents: what can be said. The task is in the first observation."""
_TARGET = "metagym.envs.alfworld.real:RealGame"
_ALIASES = wrappers.compile_aliases(ALIASES)


class _Joined(Sequence[Task]):
    """Sequences of tasks, one after the other."""

    def __init__(self, parts: Iterable[Sequence[Task]]):
        self._parts = tuple(parts)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        at = range(len(self))[operator.index(index)]
        for part in self._parts:
            if at < len(part):
                return part[at]
            at -= len(part)
        raise AssertionError("unreachable")

    def __contains__(self, value: object) -> bool:
        return any(value in part for part in self._parts)


class World:
    """All tasks: those on disk under `root` (None: there are none) and the generated ones."""

    types = TYPES
    splits = SPLITS

    def __init__(self, root: Path | None):
        self._root = root
        self._generated = NumberedTasks(TYPES, GENERATED)
        self._select = functools.cache(self._selected)  # tasks are many, envs may be, too

    def index(self, split: str | None = None) -> files.Index:
        """What is on disk. Raises InputError if there is nothing."""
        if self._root is None:
            instead = _STANDS_IN.get(split or "train", "generated")
            raise InputError(
                "there are no ALFWorld games on this machine: set $ALFWORLD_DATA (or data=) to the folder "
                f"that holds {files.LAYOUT}, or use split={instead!r}, which needs none."
            )
        return files.load(self._root)

    def find(self, id: str) -> Task:
        if "/" not in id:
            return self._generated.find(id)
        index = self.index()
        if problem := index.problems.get(id):
            raise InputError(f"task {id!r} can't be played: {problem[1]}.")
        return self._listed().find(id)

    @functools.cache  # noqa: B019 (a World lives as long as the process)
    def _listed(self) -> ListedTasks:
        return ListedTasks(self.index().tasks)

    def select(self, split: str | None, types: Collection[str] | None) -> Sequence[Task]:
        return self._select(split, None if types is None else tuple(types))

    def _selected(self, split: str | None, types: tuple[str, ...] | None) -> Sequence[Task]:
        made = self._generated.select(split, types)
        if split in GENERATED or (split is None and self._root is None):
            return made
        listed = tuple(files.select(self.index(split).tasks, split, types))
        return listed if split is not None else _Joined([listed, made])


@functools.cache
def world(root: Path | None) -> World:
    """The one `World` of a root in this process."""
    return World(root)


@functools.lru_cache(maxsize=256)
def _compiled(path: Path | None, type: str, number: int) -> games.Game:
    if path is None:
        return generate.game(type, number)
    return games.parse(path.read_bytes())


class ALFWorldEnv(TextEnv):
    """ALFWorld: household tasks in text (https://arxiv.org/abs/2010.03768).

    A task is a game: `"<split>/<task>/<trial>"`, its folder in the official data, or `"<type>:<n>"`, a game
    made by `metagym.envs.alfworld.generate`. It is the same episode every time: the seed only draws the task
    where none is asked for. The splits are ALFWorld's train, valid_seen and valid_unseen ("validation" and
    "test" stand for the latter two), and generated, generated_validation and generated_test, which are
    disjoint numbers. The types are the six task types, `TYPES`.

    Observation: TextWorld's text, the first one with the banner, the room and "Your task is to: ...".
    Action: one of `info["admissible"]`, exactly; anything else is answered "Nothing happens." and takes a
    turn.
    Reward: 1 when the goal is reached, which terminates; truncates after `max_turns`.

    `info` has, besides `task`, `seed` and `success`: `admissible` (sorted), `goal` (the sentence), `type`,
    `progress` (the share of the goal's conditions that hold, see `Play.progress`), `action` (what the world
    was told), and what published agents look for: `won`, `admissible_commands`, `extra.gamefile`. With
    `expert`, also `expert`, a shortest plan from here; [] once the goal is reached, None if it can't be.

    Args:
        split, types, tasks, max_turns, render_mode: see TextEnv.
        engine: "native", our interpreter, or "textworld", the real one in a worker process (extra
            `alfworld`). Both say the same.
        data: the folder that holds `json_2.1.1`; None: `$ALFWORLD_DATA`, or `~/.cache/alfworld`.
        expert: tell a shortest plan with each observation; costs a search each.
        aliases: understand `put X in/on Y` as `move X to Y` (`ALIASES`).
        timeout_s: of each reset and step of the worker, in seconds.
        recycle_after: episodes after which the worker is replaced: TextWorld leaks.

    Raises InputError if there is no data, MissingExtraError for the engine "textworld" without its packages;
    reset and step raise WorldError if TextWorld crashes or hangs: the next reset starts another.
    """

    def __init__(
        self,
        *,
        split: str | None = "train",
        types: str | Iterable[str] | None = None,
        tasks: str | Iterable[str] | None = None,
        engine: str = "native",
        data: str | PathLike[str] | None = None,
        expert: bool = False,
        aliases: bool = False,
        timeout_s: float = 60.0,
        recycle_after: int = 40,
        max_turns: int | None = HORIZON,
        render_mode: str | None = None,
    ):
        if engine not in ENGINES:
            raise UnknownNameError("engine", engine, ENGINES)
        if not timeout_s > 0 or recycle_after < 1:
            raise InputError(
                "timeout_s must be positive and recycle_after at least 1, "
                f"got {timeout_s} and {recycle_after}."
            )
        self._worker: worker.Worker | None = None
        self.waits = engine == "textworld"
        if engine == "textworld":
            for package in ("textworld", "fast_downward", "alfworld"):
                if importlib.util.find_spec(package) is None:
                    raise MissingExtraError(
                        "engine='textworld'", "alfworld", ModuleNotFoundError(f"no package {package}")
                    )
            self._worker = worker.Worker(_TARGET, {}, label="alfworld", timeout_s=timeout_s)
        super().__init__(
            world(_root(data, split)),
            split=SPLIT_NAMES.get(split, split) if isinstance(split, str) else split,
            types=types,
            tasks=tasks,
            max_turns=max_turns,
            render_mode=render_mode,
        )
        self.engine, self.expert, self.aliases = engine, expert, aliases
        self._recycle_after, self._episodes = recycle_after, 0

    def close(self) -> None:
        """Ends the worker, if there is one. Idempotent; a later reset starts another."""
        if self._worker is not None:
            self._worker.close()
        super().close()

    def _begin(
        self, task: Task, seed: int, rng: np.random.Generator, options: Mapping[str, Any]
    ) -> tuple[str, Mapping[str, Any]]:
        self._play = Play(self._game(task))
        self._file = str(self._path(task) or generate.file_of(self._play.game.goal, _number(task)))
        if self._worker is None:
            text, admissible, won = self._play.reset(), self._play.admissible(), self._play.won()
        else:
            if self._episodes >= self._recycle_after:
                self._worker.close()
                self._episodes = 0
            self._episodes += 1
            text, admissible, won = self._worker.call("reset", self._source(task))
        return text, self._facts(task.type, admissible, won, None)

    def _act(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        command = wrappers.rewrite(action, _ALIASES) if self.aliases else action
        text = self._play.step(command)
        admissible, won = self._play.admissible(), self._play.won()
        if self._worker is not None:
            text, admissible, won = self._worker.call("step", command)
        assert self._episode is not None
        return text, float(won), won, False, self._facts(self._episode[0].type, admissible, won, command)

    def _facts(self, kind: str, admissible: list[str], won: bool, action: str | None) -> Mapping[str, Any]:
        facts = {
            "success": won,
            "admissible": admissible,
            "goal": self._play.game.sentence,
            "type": kind,
            "progress": self._play.progress(),
            "action": action,
            "won": won,
            "admissible_commands": list(admissible),
            "extra.gamefile": self._file,
        }
        if self.expert:
            facts["expert"] = plan.shortest(self._play)
        return facts

    def _path(self, task: Task) -> Path | None:
        return self.world.index().path(task.id) if task.split in files.SPLITS else None  # type: ignore[attr-defined]

    def _game(self, task: Task) -> games.Game:
        path = self._path(task)
        try:
            return _compiled(path, task.type, 0 if path else _number(task))
        except (games.BadGame, OSError) as error:
            raise WorldError(
                f"the file of task {task.id!r} has changed since it was indexed: {error}"
            ) from error

    def _source(self, task: Task) -> Any:
        """What TextWorld loads."""
        path = self._path(task)
        if path is not None:
            return str(path)
        return generate.file_content(task.type, _number(task), *generate.package_texts())


def _root(data: str | PathLike[str] | None, split: Any) -> Path | None:
    """Where the games on disk are. The generated splits need none, wherever $ALFWORLD_DATA points."""
    try:
        return files.find_root(data)
    except InputError:
        if data or split not in list(GENERATED):
            raise
        return None


def _number(task: Task) -> int:
    return int(task.id.rpartition(":")[2])

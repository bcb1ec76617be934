"""What all worlds with text in and text out share: which tasks there are, choosing one, and seeding it.

A world derives from `TextEnv` and says what its tasks are (`NumberedTasks` or `ListedTasks`), how an episode
begins (`_begin`) and what an action does (`_act`). Everything else is here:

* `make(..., split=, types=, tasks=)` selects tasks; `env.unwrapped.tasks` lists them and
  `env.unwrapped.task(id)` finds one.
* `reset(seed=, options={"task": id})`. What is not given, task or seed, is drawn from `np_random`.
  (task, seed) determines an episode: `reset(seed=info["seed"], options={"task": info["task"]})` repeats it.
* `info` carries `task` (str), `seed` (int), `success` (bool), and what the world adds.
"""

import hashlib
import itertools
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, overload

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded

from metagym.errors import InputError, UnknownNameError
from metagym.spaces import Text, clean
from metagym.types import Task


class TaskTable(Protocol):
    """All tasks of a world, in a fixed order."""

    @property
    def types(self) -> Sequence[str]: ...
    @property
    def splits(self) -> Sequence[str]: ...
    def find(self, id: str) -> Task:
        """The task of that id. Raises UnknownNameError."""
        ...

    def select(self, split: str | None, types: Collection[str] | None) -> Sequence[Task]:
        """The tasks of a split (None: of all) and of some types (None: of all), known names given."""
        ...


class _View(Sequence[Task]):
    """A slice of a lazy sequence, itself lazy."""

    def __init__(self, tasks: Sequence[Task], indices: range):
        self._tasks, self._indices = tasks, indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return _View(self._tasks, self._indices[index])
        return self._tasks[self._indices[index]]


def _is_number(digits: str) -> bool:
    """Whether it is how a task's number is written: "7", not "07", "7²" or a thousand digits."""
    return digits.isascii() and digits.isdigit() and str(int(digits[:18])) == digits


class NumberedTasks(Sequence[Task]):
    """Every type with every number: the tasks `"<type>:<n>"`, never held in memory.

    `splits` maps a split's name to its numbers, disjoint ranges. In order: split by split, within a split
    number by number, within a number type by type; so the first `len(types)` tasks hold each type once.

    Raises InputError for a type that occurs twice, and for splits that share numbers or hold negative ones.
    """

    def __init__(self, types: Iterable[str], splits: Mapping[str, range]):
        self.types = tuple(types)
        self._ranges = dict(splits)
        if len(set(self.types)) != len(self.types):
            raise InputError(f"a type occurs twice in {', '.join(self.types)}.")
        if negative := [s for s, r in self._ranges.items() if len(r) and min(r[0], r[-1]) < 0]:
            raise InputError(f"split {negative[0]!r} has negative numbers.")
        for (a, one), (b, other) in itertools.combinations(self._ranges.items(), 2):
            if one.step == other.step == 1 and max(one.start, other.start) < min(one.stop, other.stop):
                raise InputError(f"splits {a!r} and {b!r} share numbers: {one} and {other}.")

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._ranges)

    def __len__(self) -> int:
        return len(self.types) * sum(len(r) for r in self._ranges.values())

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return _View(self, range(len(self))[index])
        at = range(len(self))[operator.index(index)]  # raises IndexError; takes negative indices
        for split, numbers in self._ranges.items():
            size = len(self.types) * len(numbers)
            if at < size:
                number, kind = divmod(at, len(self.types))
                return Task(f"{self.types[kind]}:{numbers[number]}", self.types[kind], split)
            at -= size
        raise AssertionError("unreachable")

    def __contains__(self, value: object) -> bool:
        return isinstance(value, Task) and self._lookup(value.id) == value

    def _lookup(self, id: str) -> Task | None:
        kind, _, digits = id.rpartition(":")
        if kind in self.types and _is_number(digits):
            for split, numbers in self._ranges.items():
                if int(digits) in numbers:
                    return Task(id, kind, split)
        return None

    def find(self, id: str) -> Task:
        task = self._lookup(id)
        if task is None:
            first = next((r[0] for r in self._ranges.values() if len(r)), 0)
            digits = id.rpartition(":")[2]
            exists = _is_number(digits) and any(int(digits) in r for r in self._ranges.values())
            number = digits if exists else first
            where = ", ".join(f"{s} {r[0]} to {r[-1]}" for s, r in self._ranges.items() if len(r))
            raise UnknownNameError(
                "task",
                id,
                [f"{t}:{number}" for t in self.types],
                f'An id is "<type>:<number>", numbers: {where}.',
            )
        return task

    def select(self, split: str | None, types: Collection[str] | None) -> "NumberedTasks":
        return NumberedTasks(
            [t for t in self.types if types is None or t in types],
            {s: r for s, r in self._ranges.items() if split is None or s == split},
        )


class ListedTasks(Sequence[Task]):
    """Tasks that are listed one by one. Raises InputError if an id occurs twice."""

    def __init__(self, tasks: Iterable[Task]):
        self._tasks = tuple(tasks)
        self._by_id = {t.id: t for t in self._tasks}
        if len(self._by_id) != len(self._tasks):
            twice = next(t.id for i, t in enumerate(self._tasks) if t in self._tasks[:i])
            raise InputError(f"task {twice!r} is listed twice.")
        self.types = tuple(dict.fromkeys(t.type for t in self._tasks))
        self.splits = tuple(dict.fromkeys(t.split for t in self._tasks))

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        return self._tasks[index]

    def __contains__(self, value: object) -> bool:
        return isinstance(value, Task) and self._by_id.get(value.id) == value

    def find(self, id: str) -> Task:
        if id not in self._by_id:
            raise UnknownNameError("task", id, self._by_id)
        return self._by_id[id]

    def select(self, split: str | None, types: Collection[str] | None) -> "ListedTasks":
        keep = (
            t
            for t in self._tasks
            if (split is None or t.split == split) and (types is None or t.type in types)
        )
        return ListedTasks(keep)


def names_in(argument: str, asked: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """`asked` as a tuple; a single string is one name, None stays None. Raises InputError for what is neither
    a name nor several."""
    if asked is None or isinstance(asked, str):
        return None if asked is None else (asked,)
    names = tuple(asked) if isinstance(asked, Iterable) else (asked,)
    for name in names:
        if not isinstance(name, str):
            raise InputError(f"{argument}= takes a str or several, got {type(name).__name__}: {name!r:.100}.")
    return names


def _names(kind: str, asked: str | Iterable[str] | None, known: Sequence[str]) -> tuple[str, ...] | None:
    """`asked` as a tuple of known names; a single string is one name, None stays None."""
    names = names_in("types" if kind == "type" else kind, asked)
    if names is None:
        return None
    for name in names:
        if name not in known:
            raise UnknownNameError(kind, name, known)
    if not names:
        raise InputError(f"no {kind} selected: pass None for all, or some of {', '.join(known)}.")
    return names


class TextEnv(gym.Env[str, str]):
    """Base of the text worlds.

    Args:
        world: all tasks of the world.
        split: a split's name; None for every split.
        types: a type's name or several; None for every type.
        tasks: task ids; None for all of the split and types.
        max_turns: after so many steps an episode that has not ended is truncated; None: the world decides.
        max_chars: the longest observation, and the longest action that the spaces declare.
        render_mode: None, or "ansi": `render()` returns the latest observation.

    Raises UnknownNameError for a split, type or task that does not exist, InputError for a task that exists
    but is not in the selected split and types.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012 (gymnasium declares it so)
    options: ClassVar[tuple[str, ...]] = ("task",)  # what `reset(options=)` takes; a world may add to it
    waits: bool = False  # whether steps wait for another process, so that envs side by side gain by threads

    def __init__(
        self,
        world: TaskTable,
        *,
        split: str | None = "train",
        types: str | Iterable[str] | None = None,
        tasks: str | Iterable[str] | None = None,
        max_turns: int | None = None,
        max_chars: int = 100_000,
        render_mode: str | None = None,
    ):
        if split is not None and not isinstance(split, str):
            raise InputError(f"split= takes one name, or None for all, got {split!r:.100}.")
        _names("split", split, world.splits)
        chosen = _names("type", types, world.types)
        whole = isinstance(max_turns, int | np.integer) and not isinstance(max_turns, bool)
        if max_turns is not None and not (whole and max_turns >= 1):
            raise InputError(f"max_turns must be an int of at least 1, or None, got {max_turns!r:.100}.")
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise UnknownNameError("render mode", render_mode, self.metadata["render_modes"])
        self.metadata = dict(self.metadata)  # vector envs write their autoreset mode into it
        self.world = world
        self.split = split
        self.types = tuple(world.types) if chosen is None else chosen
        self.max_turns = max_turns
        self.render_mode = render_mode
        self.observation_space = Text(max_chars)
        self.action_space = Text(max_chars)
        self._listed: frozenset[str] | None = None
        if tasks is None:
            self.tasks: Sequence[Task] = world.select(split, chosen)
        else:
            ids = names_in("tasks", tasks) or ()
            self.tasks = ListedTasks(self.task(id) for id in ids)
            self._listed = frozenset(ids)
        if not len(self.tasks):
            raise InputError(f"no task is of split {split!r} and types {', '.join(self.types)}.")
        self._running = False
        self._turn = 0
        self._episode: tuple[Task, int] | None = None
        self._last = ""

    def task(self, id: str) -> Task:
        """The selected task of that id.

        Raises UnknownNameError if the world has none, InputError if it has one that is not selected or if
        `id` is not a str.
        """
        if not isinstance(id, str):
            raise InputError(f"a task is chosen by its id, a str; got {type(id).__name__}: {id!r:.100}")
        task = self.world.find(id)
        if self.split not in (None, task.split):
            raise InputError(
                f"task {id!r} is in split {task.split!r}, but this env was made with split={self.split!r}: "
                f"make it with split={task.split!r}, or split=None for all."
            )
        if task.type not in self.types:
            raise InputError(
                f"task {id!r} is of type {task.type!r}, but this env was made with types={list(self.types)}."
            )
        if self._listed is not None and id not in self._listed:
            raise InputError(
                f"task {id!r} is not one of the {len(self._listed)} that this env was made with (tasks=)."
            )
        return task

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begins an episode. Options: `task`, the id to play.

        Raises UnknownNameError or InputError for a bad option, WorldError if the world fails.
        """
        if not isinstance(options, Mapping | None):
            raise InputError(f'options= takes a dict, such as {{"task": id}}, got {options!r:.100}.')
        for name in options or {}:
            if name not in self.options:
                raise UnknownNameError("reset option", name, self.options)
        wanted = (options or {}).get("task")
        task = None if wanted is None else self.task(wanted)  # before any state changes
        super().reset(seed=seed)
        self._running = False
        if seed is None:
            seed = int(self.np_random.integers(2**31))
        if task is None:
            task = self.tasks[int(self.np_random.integers(len(self.tasks)))]
        self._episode, self._turn = (task, int(seed)), 0
        observation, info = self._begin(task, int(seed), episode_rng(task, int(seed)), options or {})
        self._running = True
        self._last = clean(observation)
        return self._last, self._info(info)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Acts. Any text is fine: the world answers nonsense in its observation.

        Raises TypeError if the action is not a str, ResetNeeded before the first reset and after the end.
        """
        if not isinstance(action, str):
            raise TypeError(f"an action is a str, got {type(action).__name__}: {action!r:.100}")
        if not self._running:
            raise ResetNeeded(
                "call reset() before step()" + (": the episode is over." if self._episode else ".")
            )
        self._running = False  # stays so if the world fails
        self._turn += 1
        observation, reward, terminated, truncated, info = self._act(clean(action))
        if self.max_turns is not None and self._turn >= self.max_turns and not terminated:
            truncated = True
        self._running = not (terminated or truncated)
        self._last = clean(observation)
        return self._last, float(reward), bool(terminated), bool(truncated), self._info(info)

    def close(self) -> None:
        """Ends the episode. Idempotent; a later reset begins another."""
        self._running = False
        super().close()

    def __deepcopy__(self, memo: dict[int, Any]) -> "TextEnv":
        """Refused: a world may live in a process of its own, which can't be copied. Raises TypeError."""
        raise TypeError(
            f"a {type(self).__name__} can't be copied. To be where it is, reset another to its task and seed "
            "and repeat the actions."
        )

    def render(self) -> str | None:  # type: ignore[override]
        return self._last if self.render_mode == "ansi" else None

    def _info(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        assert self._episode is not None
        task, seed = self._episode
        return {"task": task.id, "seed": seed, "success": False, **extra}

    def _begin(
        self, task: Task, seed: int, rng: np.random.Generator, options: Mapping[str, Any]
    ) -> tuple[str, Mapping[str, Any]]:
        """Starts the task: (observation, info). Takes randomness from `rng` or `seed`, never `np_random`."""
        raise NotImplementedError

    def _act(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """What the action does: (observation, reward, terminated, truncated, info). May raise WorldError."""
        raise NotImplementedError


def episode_rng(task: Task, seed: int) -> np.random.Generator:
    """A generator that (task, seed) determines, the same on every machine."""
    digest = hashlib.sha256(task.id.encode()).digest()
    return np.random.default_rng([int(seed), *np.frombuffer(digest[:16], "<u4").tolist()])

"""The real ALFWorld stack (TextWorld, Fast Downward), to be run in a worker process.

Nothing else here imports it: it leaks with every game that it loads, overwrites `sys.argv`, captures stdout
and is not thread-safe. See `metagym.envs.worker`.
"""

import copy
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import textworld  # pyright: ignore[reportMissingImports]
import textworld.core  # pyright: ignore[reportMissingImports]
from alfworld.agents.utils.misc import Demangler  # pyright: ignore[reportMissingImports]
from textworld.envs.pddl import PddlEnv, logic, textgen  # pyright: ignore[reportMissingImports]

Seen = tuple[str, list[str], bool]  # what it says, the admissible commands, whether the game is won


class _Named(textworld.core.Wrapper):
    """ALFWorld's names, as its own `AlfredDemangler` gives them; importing that one costs seconds."""

    def load(self, *args: Any, **kwargs: Any) -> None:
        super().load(*args, **kwargs)
        demangler = Demangler(game_infos=self._entity_infos, shuffle=False)
        for info in self._entity_infos.values():
            info.name = demangler.demangle_alfred_name(info.id)


def memoise() -> None:
    """Makes TextWorld remember results of its pure functions: the same answers, several times faster.

    What it parses again for each command and translates again for each reset is kept, what it copies deeply
    and never changes is copied shallowly, and the second translation, which only its planner needs, is left
    out. For this process, for good.
    """
    parsed = functools.cache(textgen._parse_and_convert)
    textgen._parse_and_convert = lambda *args, **kwargs: copy.deepcopy(parsed(*args, **kwargs))
    textgen.Rule.parse_conjunctive_query = functools.cache(textgen.Rule.parse_conjunctive_query)
    textgen.deepcopy = lambda value: dict(value) if isinstance(value, dict) else copy.deepcopy(value)
    translate = functools.lru_cache(2)(logic.fast_downward.pddl2sas)

    def pddl2sas(domain: str, problem: str, verbose: bool = False, optimize: bool = False) -> Any:
        return (None, "") if optimize else translate(domain, problem, verbose=verbose)

    logic.fast_downward.pddl2sas = pddl2sas


class RealGame:
    """One game at a time, played by TextWorld. With `fast`, it is sped up by `memoise`."""

    def __init__(self, directory: Path | None = None, *, fast: bool = False):
        if directory is not None:
            os.chdir(directory)
        if fast:
            memoise()
        infos = textworld.EnvInfos(won=True, admissible_commands=True)
        self._env = _Named(PddlEnv(infos))
        self._loaded: Any = None

    def reset(self, game: str | Mapping[str, Any]) -> Seen:
        """Begins a game, given as the path of its file or as that file's content."""
        if game != self._loaded:
            self._env.load(game)
            self._loaded = game
        return _seen(self._env.reset())

    def step(self, command: str) -> Seen:
        return _seen(self._env.step(command)[0])


def _seen(state: Any) -> Seen:
    return state.feedback, list(state["admissible_commands"]), bool(state["won"])

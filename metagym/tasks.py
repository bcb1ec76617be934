"""`metagym tasks list|show|play|build`: which worlds there are, how a task begins, playing one by hand,
making tasks of software engineering.
"""

import argparse
import contextlib
import importlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym

import metagym  # noqa: F401  (registers the worlds)
from metagym import episode
from metagym.errors import AgentError, InputError, MetaGymError, UnknownNameError
from metagym.types import Message

_SHOWN = 12  # types or tasks that a listing shows without --all
_HELP = """\
A world is an id, such as metagym/Toy-v0, or its short form, toy. Other options go to gymnasium.make:
  metagym tasks list                                       every world
  metagym tasks list alfworld --data=DIR                   its splits, types and first tasks
  metagym tasks show minihack Room-5x5:7 --observation=compact
  metagym tasks play toy doors-red:3 --seed=1              "?" shows what can be done, Ctrl-D ends
  metagym tasks build --out=DIR --count=500                makes tasks for swe: `metagym tasks build --help`
"""


def command(arguments: Sequence[str]) -> int:
    """Runs `metagym tasks ...`; the exit code."""
    if arguments and arguments[0] == "build":  # reached by name: it lives above this package
        return importlib.import_module("metagym.envs.swe.build").command(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="metagym tasks",
        description=__doc__,
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("what", choices=("list", "show", "play"))
    parser.add_argument("world", nargs="?", help="an id or its short form")
    parser.add_argument("task", nargs="?", help="a task's id; without it, one is drawn by the seed")
    parser.add_argument("--seed", type=_seed, default=0)
    parser.add_argument("--split", help="default: all of them for list, the world's own for show and play")
    parser.add_argument("--types", help="types, with commas between them")
    parser.add_argument("--all", action="store_true", help="list every type")
    parser.add_argument("--OPTION=VALUE", dest="_", help="an argument of the world; JSON or a text")
    known, rest = parser.parse_known_args(arguments)
    if known.what == "list" and known.world is None:
        return _list_worlds()
    if known.world is None:
        raise InputError(f"`metagym tasks {known.what}` needs a world: {', '.join(worlds())}.")
    kwargs = _kwargs(rest)
    for name in ("split", "types"):
        if (value := getattr(known, name)) is not None:
            kwargs[name] = value.split(",") if name == "types" else value
    if known.what == "list":
        kwargs.setdefault("split", None)
    elif known.task is not None and known.split is None:
        kwargs["split"] = None  # whichever it is in
    try:
        env = gym.make(find(known.world), **kwargs)
    except TypeError as error:  # an argument that the world does not take
        raise InputError(f"{known.world} can't be made with {kwargs}: {error}") from error
    with contextlib.closing(env):
        if known.what == "list":
            return _list(env, known.all)
        if known.what == "show":
            return _show(env, known.task, known.seed)
        return _play(env, known.task, known.seed)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 0")
    return int(text)


def worlds() -> list[str]:
    """The ids of all worlds."""
    return sorted(id for id in gym.registry if id.startswith("metagym/"))


def find(name: str) -> str:
    """The id that a name stands for: itself, or "toy" for "metagym/Toy-v0". Raises UnknownNameError."""
    short = {_short(id): id for id in worlds()}
    id = name if name in worlds() else short.get(_short(name))
    if id is None:
        raise UnknownNameError("world", name, worlds())
    return id


def _short(id: str) -> str:
    return id.removeprefix("metagym/").rpartition("-v")[0].lower() or id.lower()


def _kwargs(rest: Sequence[str]) -> dict[str, Any]:
    """["--rounds=3", "--reward=sparse"] -> {"rounds": 3, "reward": "sparse"}."""
    kwargs: dict[str, Any] = {}
    for argument in rest:
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not equals or not name.isidentifier():
            raise InputError(f"unknown argument {argument!r}: an argument of the world is --NAME=VALUE.")
        try:
            kwargs[name] = json.loads(value)
        except ValueError:
            kwargs[name] = value
    return kwargs


def _list_worlds() -> int:
    for id in worlds():
        try:
            with contextlib.closing(gym.make(id, split=None)) as env:
                table: Any = env.unwrapped
                print(f"{id}: {len(table.tasks):,} tasks of {len(table.types)} types")
                for line in _splits(table):
                    print(f"  {line}")
        except TypeError as error:  # a world of worlds, such as the meta-environments
            needs = re.findall(r"'(\w+)'", str(error).partition(" was raised from")[0])
            print(f"{id}: made of {' and '.join(f'{name}=' for name in needs)}")
        except MetaGymError as error:
            print(f"{id}: {error}")
    return 0


def _splits(env: Any) -> Iterator[str]:
    for split in env.world.splits if env.split is None else [env.split]:
        try:
            yield f"{split}: {len(env.world.select(split, env.types)):,} tasks"
        except InputError as error:
            yield f"{split}: none, since {error}"


def _list(env: gym.Env[Any, Any], whole: bool) -> int:
    table: Any = env.unwrapped
    print(f"{env.spec.id if env.spec else env}: {len(table.tasks):,} tasks of {len(table.types)} types")
    for line in _splits(table):
        print(f"  {line}")
    shown = table.types if whole else table.types[:_SHOWN]
    print("types:")
    for kind in shown:
        print(f"  {kind}: {len(table.world.select(table.split, [kind])):,} tasks")
    if len(shown) < len(table.types):
        print(f"  and {len(table.types) - len(shown)} more (--all)")
    print("tasks:")
    for task in table.tasks[:_SHOWN]:
        print(f"  {task.id} ({task.split})")
    if len(table.tasks) > _SHOWN:
        print("  ...")
    return 0


def _show(env: gym.Env[Any, Any], task: str | None, seed: int) -> int:
    observation, info = env.reset(seed=seed, options=None if task is None else {"task": task})
    print(observation)
    print("\ninfo:")
    for name, value in info.items():
        print(f"  {name}: {value}")
    return 0


def _play(env: gym.Env[Any, Any], task: str | None, seed: int) -> int:
    latest: Mapping[str, Any] = {}
    seen = None

    def prompt(observation: str, info: Mapping[str, Any], turn: int) -> str:
        nonlocal latest
        latest = info
        return observation

    def chat(messages: Sequence[Message]) -> str:
        nonlocal seen
        seen = messages[-1].content
        print(f"\n{seen}\n")
        while True:
            print("> ", end="", flush=True)
            line = sys.stdin.readline()
            if not line:
                print()
                raise AgentError("the player left")
            if line.strip() != "?":
                return line.rstrip("\n")
            actions = latest.get("admissible")
            print("any text" if actions is None else ", ".join(actions))

    played = episode.run(env, chat, task, seed=seed, agent=episode.Agent(prompt=prompt))
    if played.final not in (None, seen):
        print(f"\n{played.final}\n")
    if not played.stop.in_loss:
        print(f"metagym: {played.error}", file=sys.stderr)
        return 1
    stop = str(played.stop) if played.error is None else "left"
    end = f"{stop}, {len(played.turns)} turns, reward {played.reward:g}, outcome {played.outcome:g}"
    print(f"{played.task.id}, seed {played.seed}: {end}")
    return 0

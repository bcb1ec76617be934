"""`metagym/Toy-v0`: a small text world without dependencies, whose optimal returns are known.

An episode has a few rounds. Each round offers things to choose from, and one is right, by a rule that the
world never tells and that every task of a type shares. There are seven themes, and a type is a theme with
one of its secrets: in `doors-red` the red door is right, in `paths-opposite` the way against the pointer. An
agent can learn the rule of a type by trying, or be told it; themes or secrets can be held out.

Per round, right is worth 1 / rounds and wrong 0, and either ends the round; with `boxes`, where the coin lies
in any box but the secret one, a wrong box costs 0.1 / rounds and the round goes on until the coin is found.
"""

import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from metagym.errors import InputError, UnknownNameError
from metagym.text_env import NumberedTasks, TextEnv
from metagym.types import Task

_COLOURS = ("red", "blue", "green", "yellow", "black", "white", "pink", "brown", "grey", "orange")
_FOODS = ("apple", "bread", "cheese", "plum", "honey", "nut", "carrot", "fish", "rice", "melon")
_WORDS = ("ash", "moon", "river", "candle", "harvest", "mountain", "butterfly", "tournament", "cartography")
_METALS = ("iron", "copper", "silver", "gold", "tin", "bronze")
_POINTERS = ("sign", "flag", "arrow", "statue", "shadow", "hand")
_DIRECTIONS = ("north", "east", "south", "west")
_PLACES = ("left", "middle", "right")

THEMES: Mapping[str, tuple[str, ...]] = {
    "doors": _COLOURS,  # the door of this colour
    "food": _FOODS,  # this food
    "scrolls": ("first", "last", "shortest", "longest"),  # first and last in the alphabet
    "levers": _PLACES,  # the lever at this place, whatever its metal
    "paths": ("along", "opposite", "clockwise", "anticlockwise"),  # relative to where something points
    "lamps": ("first", "second", "neither"),  # two lamps glow; the button of which colour
    "boxes": _COLOURS,  # any box but this one, which is always empty
}
TYPES: tuple[str, ...] = tuple(f"{theme}-{secret}" for theme, secrets in THEMES.items() for secret in secrets)
SPLITS: Mapping[str, range] = {
    "train": range(8000),
    "validation": range(8000, 9000),
    "test": range(9000, 10000),
}

_MISS = 0.1  # what a wrong box costs
_PHRASES = {
    "doors": "open {} door",
    "food": "eat {}",
    "scrolls": "read {} scroll",
    "levers": "pull {} lever",
    "paths": "go {}",
    "lamps": "press {} button",
    "boxes": "open {} box",
}


@dataclass(frozen=True)
class Round:
    """What one round shows: a scene, and the things that can be chosen, in the order shown."""

    scene: tuple[str, ...]  # what the rule may look at besides the things
    things: tuple[str, ...]


@functools.cache
def _rounds(theme: str, secret: str) -> tuple[Round, ...]:
    """All rounds of a type that differ in more than the order of what is shown: at least 22."""
    match theme:
        case "doors" | "food":
            others = [x for x in THEMES[theme] if x != secret]
            return tuple(Round((), (secret, *two)) for two in itertools.combinations(others, 2))
        case "boxes":
            others = [x for x in _COLOURS if x != secret]
            return tuple(Round((), (secret, *three)) for three in itertools.combinations(others, 3))
        case "scrolls":
            return tuple(Round((), three) for three in itertools.combinations(_WORDS, 3))
        case "levers":
            return tuple(Round(three, _PLACES) for three in itertools.permutations(_METALS, 3))
        case "paths":
            return tuple(Round(scene, _DIRECTIONS) for scene in itertools.product(_POINTERS, _DIRECTIONS))
        case "lamps":
            return tuple(Round(three[:2], three) for three in itertools.permutations(_COLOURS, 3))
    raise AssertionError(theme)


def _right(theme: str, secret: str, shown: Round) -> str | None:
    """The rule: which thing is right. None for boxes, where that is hidden in the episode."""
    things = shown.things
    match theme:
        case "doors" | "food" | "levers":
            return secret
        case "scrolls":
            return {
                "first": min(things),
                "last": max(things),
                "shortest": min(things, key=len),
                "longest": max(things, key=len),
            }[secret]
        case "paths":
            turn = THEMES["paths"].index(secret)
            return _DIRECTIONS[(_DIRECTIONS.index(shown.scene[1]) + (0, 2, 1, 3)[turn]) % 4]
        case "lamps":
            neither = next(t for t in things if t not in shown.scene)
            return {"first": shown.scene[0], "second": shown.scene[1], "neither": neither}[secret]
    return None


def _scene(theme: str, shown: Round) -> str:
    match theme:
        case "levers":
            return "Levers from left to right: " + ", ".join(shown.scene) + "."
        case "paths":
            return f"The {shown.scene[0]} points {shown.scene[1]}."
        case "lamps":
            return f"Two lamps glow: first {shown.scene[0]}, then {shown.scene[1]}."
    return ""


def _plan(task: Task, rounds: int) -> list[Round]:
    """The rounds of a task. Tasks of a type differ in them if there are at least three."""
    theme, secret = task.type.split("-")
    table = _rounds(theme, secret)
    total = len(table) ** rounds
    # A fixed permutation of [0, total), so that neighbouring tasks differ in every round; its digits in base
    # len(table) are the rounds. 1000003 is a prime that divides no table's length.
    code = (int(task.id.rpartition(":")[2]) * 1000003 + 12345) % total
    return [table[code // len(table) ** i % len(table)] for i in range(rounds)]


def _words(text: str) -> tuple[str, ...]:
    """The words of an action in lower case, without articles and punctuation at the ends."""
    words = (w.strip(".,;:!?\"'`*()[]") for w in text[:1000].casefold().split())
    return tuple(w for w in words if w not in ("", "a", "an", "the"))


def _known(type: str) -> str:
    if type not in TYPES:
        raise UnknownNameError("type", type, TYPES)
    return type.split("-")[0]


def optimal_return(type: str) -> float:
    """The expected return of a type under the best policy that knows its rule, with any number of rounds.

    1, and for boxes 0.9: three boxes are left, so 0, 1 or 2 misses are equally likely, each costing 0.1.
    Holds if the turn limit does not cut in: 3 turns per round with boxes, else 1. Raises UnknownNameError.
    """
    return 1.0 - _MISS if _known(type) == "boxes" else 1.0


def chance_return(type: str, rounds: int = 3, max_turns: int | None = None) -> float:
    """The expected return of a type when every action is drawn uniformly from the admissible ones.

    Raises UnknownNameError.
    """
    theme = _known(type)
    if theme != "boxes":
        return 1 / (4 if theme == "paths" else 3)
    right = 1 / 4

    @functools.cache
    def value(turns: int, left: int) -> float:
        if not turns or not left:
            return 0.0
        return right * (1 + value(turns - 1, left - 1)) + (1 - right) * (value(turns - 1, left) - _MISS)

    return value(4 * rounds if max_turns is None else max_turns, rounds) / rounds


class ToyEnv(TextEnv):
    """The toy world; see the module for its rules.

    Args:
        split, types, tasks, render_mode: as for `TextEnv`. `THEMES` and `TYPES` list what there is.
        rounds: choices per episode. With fewer than three, some tasks look alike.
        max_turns: after which the episode is truncated; None: 4 per round.

    The task determines what each round offers; the seed the order in which things are shown, and where coins
    lie. An action is one of `admissible`, with or without verb; anything else is answered and costs a turn.
    `info["action"]` is what was done, None if nothing was. Success: every round right.
    """

    def __init__(
        self,
        *,
        split: str | None = "train",
        types: str | Iterable[str] | None = None,
        tasks: str | Iterable[str] | None = None,
        rounds: int = 3,
        max_turns: int | None = None,
        render_mode: str | None = None,
    ):
        if rounds < 1:
            raise InputError(f"rounds must be at least 1, got {rounds}.")
        super().__init__(
            NumberedTasks(TYPES, SPLITS),
            split=split,
            types=types,
            tasks=tasks,
            max_turns=4 * rounds if max_turns is None else max_turns,
            max_chars=10_000,
            render_mode=render_mode,
        )
        self.rounds = rounds

    def best_action(self) -> str:
        """What the best policy that knows the rule does next; its expected return is `optimal_return`."""
        shown = self._shown[self._round]
        right = _right(self._theme, self._secret, shown)
        if right is None:
            right = next(t for t in shown.things if t != self._secret and t not in self._missed)
        return self._phrase(right)

    def _begin(
        self, task: Task, seed: int, rng: np.random.Generator, options: Mapping[str, Any]
    ) -> tuple[str, Mapping[str, Any]]:
        self._theme, self._secret = task.type.split("-")
        self._shown: list[Round] = []
        self._answers: list[str] = []
        for shown in _plan(task, self.rounds):
            things = shown.things
            if self._theme not in ("levers", "paths"):
                things = tuple(things[i] for i in rng.permutation(len(things)))
            shown = Round(shown.scene, things)
            answer = _right(self._theme, self._secret, shown)
            if answer is None:
                full = [t for t in things if t != self._secret]
                answer = full[int(rng.integers(len(full)))]
            self._shown.append(shown)
            self._answers.append(answer)
        self._round, self._score = 0, 0
        self._missed: set[str] = set()
        text = f"There are {self.rounds} rounds. In each, one choice is right." if self.rounds > 1 else ""
        return self._look(text), {"admissible": self._admissible(), "action": None}

    def _act(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        said = _words(action)
        things = self._shown[self._round].things
        phrases = {t: _words(self._phrase(t)) for t in things}
        thing = next((t for t, whole in phrases.items() if said in (whole, whole[1:], (t,))), None)
        if thing is None:
            return self._look("That is not possible."), 0.0, False, False, self._outcome(None)
        done = self._phrase(thing)
        reward = 0.0
        if thing == self._answers[self._round]:
            self._score += 1
            reward = 1.0 / self.rounds
            text = "Right!"
        elif self._theme == "boxes":
            self._missed.add(thing)
            return self._look("It is empty."), -_MISS / self.rounds, False, False, self._outcome(done)
        else:
            text = "Wrong."
        self._round += 1
        self._missed.clear()
        if self._round < self.rounds:
            return self._look(text), reward, False, False, self._outcome(done)
        text += f" The end: {self._score} of {self.rounds} right."
        return text, reward, True, False, self._outcome(done)

    def _phrase(self, thing: str) -> str:
        return _PHRASES[self._theme].format(thing)

    def _admissible(self) -> list[str]:
        return [self._phrase(t) for t in self._shown[self._round].things] if self._round < self.rounds else []

    def _look(self, text: str) -> str:
        """The feedback, the scene and what can be done."""
        scene = _scene(self._theme, self._shown[self._round])
        can = "You can: " + ", ".join(self._admissible()) + "."
        return "\n".join(part for part in (text, scene, can) if part)

    def _outcome(self, action: str | None) -> Mapping[str, Any]:
        return {"success": self._score == self.rounds, "admissible": self._admissible(), "action": action}

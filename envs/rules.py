"""`metagym/Rules-v0`: what is right is a secret of the type, and no single task tells it.

A task is a few rounds in one place, each with the same four things to do. One of them is right, in every
round of every task of the type: the world answers each try, and an episode's return is the share of tries
that were right. Who does not know the rule gets a quarter of them on average; who was told it, all.

Rules differ in form: one thing of four (a door's colour, a dish, a word to say), a pair (which key in which
lock, which gift for whom), or an order (what first, what then). A type is a form with one of its secrets,
such as `doors-red`, `keys-iron-oak` or `drums-high-low`, so whole forms can be held out. Half of the tasks
come with a rumour, which names one of the four things at random: it is no better than a guess.
"""

import functools
import hashlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from metagym.errors import InputError, UnknownNameError
from metagym.text_env import NumberedTasks, TextEnv
from metagym.types import Task


@dataclass(frozen=True)
class Form:
    """What the types of one form have in common."""

    kind: Literal["one", "pair", "order"]
    scene: str  # goes before the list of what there is
    phrase: str  # an action, with a place for each word of a secret
    words: tuple[tuple[str, ...], ...]  # what there is; two lists for pairs


_COLOURS = ("red", "blue", "green", "white", "black", "brown", "pink", "grey")
_FOODS = ("apple", "bread", "cheese", "plum", "honey", "fish", "rice", "melon")
_SPELLS = ("moon", "river", "candle", "storm", "shadow", "thunder", "winter", "flame")
_ANIMALS = ("wolf", "owl", "bear", "fox", "lion", "crow", "horse", "snake")
_TOOLS = ("hammer", "rope", "saw", "needle", "shovel", "ladder", "brush", "axe")
_METALS = ("iron", "gold", "silver", "bronze")
_WOODS = ("oak", "pine", "elm", "willow")
_GUESTS = ("Anna", "Peter", "Maria", "David")
_GIFTS = ("ring", "book", "sword", "lamp")
_NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight")

FORMS: Mapping[str, Form] = {
    "doors": Form("one", "Doors", "open the {} door", (_COLOURS,)),
    "food": Form("one", "Food", "eat the {}", (_FOODS,)),
    "spells": Form("one", "Magic words", "say {}", (_SPELLS,)),
    "masks": Form("one", "Masks", "wear the {} mask", (_ANIMALS,)),
    "buttons": Form("one", "Buttons", "press button {}", (_NUMBERS,)),
    "tools": Form("one", "Tools", "use the {}", (_TOOLS,)),
    "paths": Form("one", "Paths", "go {}", (("north", "south", "east", "west"),)),
    "gifts": Form("pair", "Guests and gifts", "give {} the {}", (_GUESTS, _GIFTS)),
    "keys": Form("pair", "Keys and locks", "turn {} in {}", (_METALS, _WOODS)),
    "dances": Form("order", "Steps", "step {} then {}", (("left", "right", "forward", "back"),)),
    "drums": Form("order", "Drums", "beat {} then {}", (("high", "low", "big", "small"),)),
}
_PLACES = (
    *("Cave", "Castle", "Forest", "Harbour", "Island", "Market", "Mill", "Mine", "Palace", "Prison"),
    *("Ruin", "School", "Ship", "Swamp", "Temple", "Tower", "Valley", "Village", "Bridge", "Garden"),
)
_SPEAKERS = ("A stranger", "A child", "A beggar", "A bird")


def _secrets(form: Form) -> tuple[tuple[str, ...], ...]:
    """What can be the secret of a form's types."""
    if form.kind == "one":
        return tuple((word,) for word in form.words[0])
    if form.kind == "pair":
        first, second = form.words
        return tuple((a, second[(i + j) % len(second)]) for j in range(2) for i, a in enumerate(first))
    return tuple(itertools.permutations(form.words[0], 2))


_TYPES = {
    "-".join((name, *secret)).lower(): (name, secret)
    for name, form in FORMS.items()
    for secret in _secrets(form)
}
TYPES: tuple[str, ...] = tuple(_TYPES)
SPLITS: Mapping[str, range] = {
    "train": range(2400),
    "validation": range(2400, 3000),
    "test": range(3000, 3840),
}


def types_of(*forms: str) -> tuple[str, ...]:
    """The types of some forms. Raises UnknownNameError."""
    for form in forms:
        if form not in FORMS:
            raise UnknownNameError("form", form, FORMS)
    return tuple(t for t, (form, _) in _TYPES.items() if form in forms)


@functools.cache
def _choices(type: str) -> tuple[tuple[str, ...], ...]:
    """The four things that can be done in the tasks of a type, as words; the right one first."""
    name, secret = _TYPES[type]
    form = FORMS[name]
    rng = np.random.default_rng(list(hashlib.sha256(type.encode()).digest()[:8]))
    if form.kind == "pair":
        a, b = secret
        c, d = (
            str(rng.choice([w for w in words if w != s])) for words, s in zip(form.words, secret, strict=True)
        )
        return (a, b), (a, d), (c, b), (c, d)
    if form.kind == "order":
        a, b = secret
        c = str(rng.choice([w for w in form.words[0] if w not in secret]))
        return (a, b), (b, a), (a, c), (c, b)
    others = [w for w in form.words[0] if w not in secret]
    return secret, *((str(w),) for w in rng.permutation(others)[:3])


def rule(type: str) -> str:
    """The secret of a type: the action that is right. Raises UnknownNameError."""
    if type not in _TYPES:
        raise UnknownNameError("type", type, TYPES)
    name, secret = _TYPES[type]
    return FORMS[name].phrase.format(*secret)


class RulesEnv(TextEnv):
    """The world of rules; see the module.

    Args:
        split, types, tasks, render_mode: as for `TextEnv`. `FORMS` and `TYPES` list what there is.
        rounds: tries of an episode. The expected return of guessing is 1/4, of the rule 1, whatever it is.

    The task determines everything: the place, the order in which things are shown, and the rumour. An action
    is one of `info["admissible"]`; anything else is answered, uses up the try, and is worth 0.
    `info["action"]` is what was done, None if nothing was. Success: every try right.
    """

    def __init__(
        self,
        *,
        split: str | None = "train",
        types: str | Iterable[str] | None = None,
        tasks: str | Iterable[str] | None = None,
        rounds: int = 3,
        render_mode: str | None = None,
    ):
        if rounds < 1:
            raise InputError(f"rounds must be at least 1, got {rounds}.")
        super().__init__(
            NumberedTasks(TYPES, SPLITS),
            split=split,
            types=types,
            tasks=tasks,
            max_turns=None,
            max_chars=10_000,
            render_mode=render_mode,
        )
        self.rounds = rounds

    def _begin(
        self, task: Task, seed: int, rng: np.random.Generator, options: Mapping[str, Any]
    ) -> tuple[str, Mapping[str, Any]]:
        form = FORMS[_TYPES[task.type][0]]
        choices = _choices(task.type)
        # A fixed permutation of all tasks, so that neighbours differ in everything: 1000003 is a prime.
        code = (int(task.id.rpartition(":")[2]) * 1000003 + 12345) % 3840
        code, place = divmod(code, len(_PLACES))
        rumour, order = divmod(code, 24)
        shown = list(itertools.permutations(range(len(choices))))[order]
        phrases = [form.phrase.format(*words) for words in choices]
        self._right, self._actions = phrases[0], [phrases[i] for i in shown]
        words = dict.fromkeys(w for column in zip(*(choices[i] for i in shown), strict=True) for w in column)
        text = f"{_PLACES[place]}. {form.scene}: {', '.join(words)}."
        if rumour < len(phrases):
            text += f" {_SPEAKERS[int(rng.integers(len(_SPEAKERS)))]} says: {phrases[rumour]}."
        self._done, self._score = 0, 0
        return text, self._told(None)

    def _act(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        said = action.strip(" \t\n.,;:!?\"'`*").casefold()
        done = next((a for a in self._actions if a.casefold() == said), None)
        self._done += 1
        right = done == self._right
        self._score += right
        text = "Right." if right else "Wrong." if done else "That can't be done."
        return text, right / self.rounds, self._done == self.rounds, False, self._told(done)

    def _told(self, action: str | None) -> Mapping[str, Any]:
        over = self._done == self.rounds
        return {
            "success": self._score == self.rounds,
            "admissible": [] if over else list(self._actions),
            "action": action,
        }

"""Makes ALFWorld games: a room, things in it, a goal of one of the six types, and a walkthrough.

`problem(type, number)` is the PDDL problem and the sentence of a task, the same on every machine: a room
with the receptacles, objects and rules of ALFRED's kitchens, bedrooms, bathrooms or living rooms
(https://arxiv.org/abs/1912.01734), laid out by chance. The goal can be reached and isn't reached at the
start; `metagym.envs.alfworld.plan` finds the walkthrough. `write` makes the official files, which TextWorld
plays too.
"""

import functools
import importlib.util
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metagym.envs.alfworld import plan
from metagym.envs.alfworld.game import SENTENCES, TASK_MARK, Game, Goal, compile
from metagym.envs.alfworld.native import Play
from metagym.errors import MissingExtraError


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What goes into or onto what, as the published games have it.
ACCEPTS = {
    receptacle: things.split()
    for receptacle, things in {
        "ArmChair": "Book Box CellPhone Cloth CreditCard KeyChain Laptop Newspaper Pillow RemoteControl",
        "BathtubBasin": "Cloth DishSponge HandTowel SoapBar",
        "Bed": "BaseballBat BasketBall Book CellPhone Laptop Pillow TennisRacket",
        "Cabinet": "Book Bowl Box CD Candle Cloth Cup DishSponge Glassbottle HandTowel Kettle Ladle Mug "
        "Newspaper Pan PepperShaker Plate Plunger Pot SaltShaker SoapBar SoapBottle SprayBottle TissueBox "
        "ToiletPaper Vase WateringCan WineBottle",
        "Cart": "Candle Cloth DishSponge HandTowel Plunger SoapBar SoapBottle SprayBottle TissueBox "
        "ToiletPaper",
        "CoffeeMachine": "Mug",
        "CoffeeTable": "Book Bowl Box Candle CellPhone CreditCard KeyChain Laptop Newspaper Pen Pencil Plate "
        "RemoteControl Statue TissueBox Vase Watch WateringCan",
        "CounterTop": "AlarmClock Apple Book Bowl Bread ButterKnife CD Candle CellPhone Cloth CreditCard Cup "
        "DishSponge Egg Fork Glassbottle HandTowel Kettle KeyChain Knife Ladle Laptop Lettuce Mug Pan Pen "
        "Pencil PepperShaker Plate Pot Potato RemoteControl SaltShaker SoapBar SoapBottle Spatula Spoon "
        "SprayBottle Statue TissueBox ToiletPaper Tomato Vase WineBottle",
        "Desk": "AlarmClock BasketBall Book Bowl Box CD CellPhone Cloth CreditCard KeyChain Laptop Mug Pen "
        "Pencil RemoteControl Statue TennisRacket TissueBox Vase Watch WateringCan",
        "DiningTable": "AlarmClock Apple BaseballBat BasketBall Book Bowl Box Bread ButterKnife CD Candle "
        "CellPhone Cloth CreditCard Cup DishSponge Egg Fork Glassbottle Kettle KeyChain Knife Ladle Laptop "
        "Lettuce Mug Newspaper Pan Pen Pencil PepperShaker Plate Pot Potato RemoteControl SaltShaker "
        "SoapBottle Spatula Spoon SprayBottle Statue TennisRacket TissueBox Tomato Vase Watch WateringCan "
        "WineBottle",
        "Drawer": "Book ButterKnife CD Candle CellPhone Cloth CreditCard DishSponge Fork HandTowel KeyChain "
        "Knife Ladle Newspaper Pen Pencil PepperShaker RemoteControl SaltShaker SoapBar SoapBottle Spatula "
        "Spoon SprayBottle TissueBox ToiletPaper Watch WateringCan",
        "Dresser": "AlarmClock BasketBall Book Bowl Box CD Candle CellPhone Cloth CreditCard KeyChain Laptop "
        "Mug Newspaper Pen Pencil Plate RemoteControl SprayBottle Statue TennisRacket TissueBox ToiletPaper "
        "Vase Watch WateringCan",
        "Fridge": "Apple Bowl Bread Cup Egg Glassbottle Lettuce Mug Pan Plate Pot Potato Tomato WineBottle",
        "GarbageCan": "Apple Bread CD Cloth DishSponge Egg HandTowel Lettuce Newspaper Pen Pencil Potato "
        "SoapBar SoapBottle SprayBottle TissueBox ToiletPaper Tomato WineBottle",
        "HandTowelHolder": "HandTowel",
        "Microwave": "Apple Bowl Bread Cup Egg Glassbottle Mug Plate Potato Tomato",
        "Ottoman": "Book Box CellPhone CreditCard KeyChain Laptop Newspaper Pillow RemoteControl",
        "Safe": "CD CellPhone CreditCard KeyChain Statue Vase Watch",
        "Shelf": "AlarmClock Book Bowl Box CD Candle CellPhone Cloth CreditCard Cup DishSponge Glassbottle "
        "HandTowel Kettle KeyChain Mug Newspaper Pen Pencil PepperShaker Plate Pot RemoteControl SaltShaker "
        "SoapBar SoapBottle SprayBottle Statue TissueBox ToiletPaper Vase Watch WateringCan WineBottle",
        "SideTable": "AlarmClock Apple BaseballBat BasketBall Book Bowl Box Bread ButterKnife CD Candle "
        "CellPhone Cloth CreditCard Cup DishSponge Egg Fork HandTowel Kettle KeyChain Knife Laptop Lettuce "
        "Mug Newspaper Pan Pen Pencil PepperShaker Plate Pot Potato RemoteControl SaltShaker SoapBar "
        "SoapBottle Spatula Spoon SprayBottle Statue TennisRacket TissueBox ToiletPaper Tomato Vase Watch "
        "WateringCan WineBottle",
        "SinkBasin": "Apple Bowl ButterKnife Cloth Cup DishSponge Egg Fork Glassbottle HandTowel Kettle "
        "Knife Ladle Lettuce Mug Pan Plate Pot Potato SoapBar Spatula Spoon Tomato",
        "Sofa": "Book Box CellPhone CreditCard KeyChain Laptop Newspaper Pillow RemoteControl",
        "StoveBurner": "Kettle Pan Pot",
        "Toaster": "",
        "Toilet": "Candle Cloth DishSponge HandTowel SoapBar SoapBottle SprayBottle TissueBox ToiletPaper",
        "ToiletPaperHanger": "ToiletPaper",
        "TowelHolder": "Towel",
    }.items()
}
_OPENABLE = {"Cabinet", "Drawer", "Fridge", "Microwave", "Safe"}
_CLEANABLE = _words(
    "Apple Bowl ButterKnife Cloth Cup DishSponge Egg Fork Kettle Knife Ladle Lettuce Mug Pan Plate Pot "
    "Potato SoapBar Spatula Spoon Tomato"
)
_HEATABLE = _words("Apple Bread Cup Egg Mug Plate Potato Tomato")
_COOLABLE = _words("Apple Bowl Bread Cup Egg Lettuce Mug Pan Plate Pot Potato Tomato WineBottle")
_SLICEABLE = _words("Apple Bread Egg Lettuce Potato Tomato")
_HOLLOW = _words("Bowl Box Cup Mug Pan Plate Pot")
_SMALL = _words("Apple ButterKnife CreditCard Egg Fork KeyChain Knife Ladle Pen Pencil Spatula Spoon Watch")
_FLAGS = {"cleanable": _CLEANABLE, "heatable": _HEATABLE, "coolable": _COOLABLE, "sliceable": _SLICEABLE}
_LAMPS = ("DeskLamp", "FloorLamp")
_FIXED = {"Window", "LightSwitch", "HousePlant", "Chair", "Painting", "Television", "Mirror", *_LAMPS}

# Room -> (receptacle types with the least and the most of each, things that lie about, things that stay).
ROOMS = {
    "kitchen": (
        "Cabinet 3 9, CoffeeMachine 1 1, CounterTop 1 3, DiningTable 0 1, Drawer 2 5, Fridge 1 1, "
        "GarbageCan 1 1, Microwave 1 1, Shelf 0 2, SideTable 0 1, SinkBasin 1 1, StoveBurner 2 4, "
        "Toaster 1 1",
        "Apple Bowl Bread ButterKnife Cup DishSponge Egg Fork Glassbottle Kettle Knife Ladle Lettuce Mug Pan "
        "PepperShaker Plate Pot Potato SaltShaker SoapBottle Spatula Spoon Statue Tomato Vase WineBottle",
        "Chair LightSwitch Window HousePlant",
    ),
    "bedroom": (
        "ArmChair 0 1, Bed 1 1, Cabinet 0 2, Desk 1 2, Drawer 2 7, Dresser 0 1, GarbageCan 1 1, Safe 0 1, "
        "Shelf 1 4, SideTable 1 2",
        "AlarmClock BaseballBat BasketBall Book Bowl Box CD CellPhone CreditCard KeyChain Laptop Mug Pen "
        "Pencil Pillow Statue TennisRacket TissueBox Vase Watch",
        "Chair LightSwitch Mirror Window DeskLamp",
    ),
    "bathroom": (
        "BathtubBasin 0 1, Cabinet 2 4, Cart 0 1, CounterTop 1 2, Drawer 0 4, GarbageCan 1 1, "
        "HandTowelHolder 1 2, Shelf 0 1, SinkBasin 1 2, Toilet 1 1, ToiletPaperHanger 1 1, TowelHolder 1 1",
        "Candle Cloth DishSponge HandTowel Plunger SoapBar SoapBottle SprayBottle TissueBox "
        "ToiletPaper Towel",
        "LightSwitch Mirror Window",
    ),
    "living": (
        "ArmChair 1 2, Cabinet 0 2, CoffeeTable 1 1, DiningTable 0 1, Drawer 1 5, Dresser 0 1, "
        "GarbageCan 1 1, Ottoman 0 1, Safe 0 1, Shelf 0 3, SideTable 1 2, Sofa 1 1",
        "Book Box CellPhone CreditCard KeyChain Laptop Newspaper Pillow Plate RemoteControl Statue TissueBox "
        "Vase Watch WateringCan",
        "Chair LightSwitch Painting Television Window FloorLamp",
    ),
}
_LAMP_STANDS = ("Desk", "SideTable", "Dresser", "Shelf", "CoffeeTable")
_APPLIANCE = {
    "pick_clean_then_place_in_recep": ("SinkBasin", _CLEANABLE),
    "pick_heat_then_place_in_recep": ("Microwave", _HEATABLE),
    "pick_cool_then_place_in_recep": ("Fridge", _COOLABLE),
}
_ROOMS_OF = {
    "pick_and_place_simple": ("kitchen", "bedroom", "bathroom", "living"),
    "pick_two_obj_and_place": ("kitchen", "bedroom", "bathroom", "living"),
    "look_at_obj_in_light": ("bedroom", "living"),
    "pick_clean_then_place_in_recep": ("kitchen", "kitchen", "bathroom"),
    "pick_heat_then_place_in_recep": ("kitchen",),
    "pick_cool_then_place_in_recep": ("kitchen",),
}


class _Dice:
    """Choices that are the same on every machine: Python promises that of `random()` alone."""

    def __init__(self, seed: str):
        self._random = random.Random(seed).random

    def below(self, n: int) -> int:
        return int(self._random() * n)

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def choice(self, options: Sequence[Any]) -> Any:
        return options[self.below(len(options))]

    def chance(self, p: float) -> bool:
        return self._random() < p

    def position(self) -> str:
        """Like `_bar__plus_01_dot_23_bar__minus_00_dot_45_bar__plus_02_dot_67`."""
        parts = []
        for _ in range(3):
            sign, cents = self.choice(("plus", "minus")), self.below(350)
            parts.append(f"_bar__{sign}_{cents // 100:02d}_dot_{cents % 100:02d}")
        return "".join(parts)


def problem(type: str, number: int) -> tuple[str, str]:
    """(the PDDL problem, the sentence) of a generated task."""
    dice = _Dice(f"ALFWorld {type} {number}")
    room = dice.choice(_ROOMS_OF[type])
    listed, about, fixed = ROOMS[room]
    counts = {}
    for entry in listed.split(", "):
        kind, least, most = entry.split()
        counts[kind] = dice.between(int(least), int(most))

    used: set[str] = set()

    def new(kind: str) -> str:
        while True:
            id = kind + dice.position() + ("_bar_SinkBasin" if kind == "Sink" else "")
            if id not in used:
                used.add(id)
                return id

    # receptacles and where they are
    receptacles: dict[str, str] = {}
    for kind, count in counts.items():
        for _ in range(count):
            receptacles[new("Sink" if kind == "SinkBasin" else kind)] = kind
    locations: list[str] = []
    place: dict[str, str] = {}
    for id in receptacles:
        if locations and dice.chance(0.08):
            place[id] = dice.choice(locations)
        else:
            locations.append(_location(dice, locations))
            place[id] = locations[-1]
    start = _location(dice, locations)
    openable = [r for r, kind in receptacles.items() if kind in _OPENABLE and dice.chance(0.9)]

    # the goal
    kinds = sorted(set(receptacles.values()))
    lamp = next((f for f in fixed.split() if f in _LAMPS), "")
    able = _APPLIANCE.get(type, ("", _words(about)))[1]
    if type == "look_at_obj_in_light":
        target, goal_place = (
            dice.choice([t for t in about.split() if any(t in ACCEPTS[k] for k in kinds)]),
            lamp,
        )
    else:
        pairs = [
            (thing, kind)
            for thing in about.split()
            for kind in kinds
            if thing in able and thing in ACCEPTS[kind] and _elsewhere(thing, kind, kinds)
        ]
        target, goal_place = dice.choice(pairs)

    # objects and where they lie
    types: dict[str, str] = {}
    inside: list[tuple[str, str]] = []
    held_in: list[tuple[str, str]] = []

    def lay(kind: str, avoid: str = "") -> str:
        id = new(kind)
        types[id] = kind
        options = [r for r, k in receptacles.items() if kind in ACCEPTS[k] and k != avoid]
        if options:
            inside.append((id, dice.choice(options)))
        return id

    needed = 2 if type == "pick_two_obj_and_place" else 1
    for _ in range(needed + dice.below(2)):
        lay(target, avoid=goal_place)
    for kind in about.split():
        if kind != target:
            for _ in range(dice.choice((0, 1, 1, 1, 2, 3))):
                lay(kind)
    stands = [r for r, k in receptacles.items() if k in _LAMP_STANDS]
    for kind in fixed.split():
        id = new(kind)
        types[id] = kind
        if kind in _LAMPS:
            inside.append((id, dice.choice(stands)))
    movable = [id for id, _ in inside if types[id] not in (*_FIXED, target)]
    for id in movable:
        where = dict(inside)[id]
        if dice.chance(0.03):  # as in the published games, some things are in two receptacles
            other = [r for r, k in receptacles.items() if types[id] in ACCEPTS[k] and r != where]
            if other:
                inside.append((id, dice.choice(other)))
        hollow = [o for o, r in inside if r == where and types[o] in _HOLLOW and o != id]
        if types[id] in _SMALL and hollow and dice.chance(0.15):
            held_in.append((id, dice.choice(hollow)))

    facts = [f"receptacleType {r} {kind}Type" for r, kind in receptacles.items()]
    facts += [f"objectType {o} {kind}Type" for o, kind in types.items()]
    present = sorted(set(types.values()))
    facts += [f"canContain {k}Type {t}Type" for k in kinds for t in ACCEPTS[k] if t in present]
    facts += [f"pickupable {o}" for o, kind in types.items() if kind not in _FIXED]
    for name, flagged in _FLAGS.items():
        facts += [f"{name} {o}" for o, kind in types.items() if kind in flagged]
    facts += [f"isReceptacleObject {o}" for o, kind in types.items() if kind in _HOLLOW]
    facts += [f"toggleable {o}" for o, kind in types.items() if kind in _LAMPS]
    facts += [f"openable {r}" for r in openable]
    facts.append(f"atLocation agent1 {start}")
    facts += [f"inReceptacle {o} {r}" for o, r in inside]
    facts += [f"inReceptacleObject {o} {outer}" for o, outer in held_in]
    facts += [f"receptacleAtLocation {r} {l}" for r, l in place.items()]
    lying = dict(reversed(inside))
    facts += [f"objectAtLocation {o} {place[lying[o]] if o in lying else start}" for o in types]
    cold = [
        o for o, r in inside if receptacles[r] == "Fridge" and types[o] in _COOLABLE and types[o] != target
    ]
    facts += [f"isCool {o}" for o in cold if dice.chance(0.3)]

    all_types = sorted({t for things in ACCEPTS.values() for t in things} | set(present) | {"Sink"})
    objects = ["agent1 - agent"]
    objects += [f"{t}Type - otype" for t in all_types] + [f"{k}Type - rtype" for k in ACCEPTS]
    objects += [f"{o} - object" for o in types] + [f"{r} - receptacle" for r in receptacles]
    objects += [f"{l} - location" for l in [*locations, start]]
    lines = [f"(define (problem generated_{type}_{number})", "(:domain alfred)", "(:objects", *objects, ")"]
    lines += ["(:init", *(f"({fact})" for fact in facts), ")", f"(:goal\n{_GOAL[type]}\n)", ")", ""]
    text = "\n".join(lines).replace("{target}", target).replace("{place}", goal_place)
    sentence = dice.choice(SENTENCES[type]).format(target=target.lower(), place=goal_place.lower())
    return text, sentence


def _elsewhere(thing: str, kind: str, kinds: Sequence[str]) -> bool:
    """Whether the thing can lie anywhere but where it is to go."""
    return any(thing in ACCEPTS[k] for k in kinds if k != kind)


def _location(dice: _Dice, used: Sequence[str]) -> str:
    while True:
        numbers = (
            dice.between(-8, 8),
            dice.between(-8, 8),
            dice.below(4),
            dice.choice((-30, 0, 15, 30, 45, 60)),
        )
        id = "loc" + "".join(f"_bar_{'_minus_' if n < 0 else ''}{abs(n)}" for n in numbers)
        if id not in used:
            return id


def _placed(state: str, done: str) -> str:
    parts = [
        state,
        "(objectType ?o {target}Type)",
        "(receptacleType ?r {place}Type)",
        done,
        "(inReceptacle ?o ?r)",
    ]
    inner = "\n".join(part for part in parts if part)
    return f"(and\n(exists (?r - receptacle)\n(exists (?o - object)\n(and\n{inner}\n)\n)\n)\n)"


_GOAL = {
    "pick_and_place_simple": (
        "(and\n(exists (?r - receptacle)\n(exists (?o - object)\n(and\n(inReceptacle ?o ?r)\n"
        "(objectType ?o {target}Type)\n(receptacleType ?r {place}Type)\n)\n)\n)\n)"
    ),
    "look_at_obj_in_light": (
        "(and\n(exists (?ot - object\n?r - receptacle\n?a - agent\n?l - location)\n(and\n"
        "(objectType ?ot {place}Type)\n(toggleable ?ot)\n(isToggled ?ot)\n(receptacleAtLocation ?r ?l)\n"
        "(atLocation ?a ?l)\n(inReceptacle ?ot ?r)\n)\n)\n(exists (?o - object\n?a - agent)\n(and\n"
        "(objectType ?o {target}Type)\n(holds ?a ?o)\n)\n)\n)"
    ),
    "pick_clean_then_place_in_recep": _placed("(cleanable ?o)", "(isClean ?o)"),
    "pick_heat_then_place_in_recep": _placed("(heatable ?o)", "(isHot ?o)"),
    "pick_cool_then_place_in_recep": _placed("(coolable ?o)", "(isCool ?o)"),
    "pick_two_obj_and_place": (
        "(and\n(exists (?r - receptacle)\n(exists (?o1 - object)\n(and\n(objectType ?o1 {target}Type)\n"
        "(receptacleType ?r {place}Type)\n(inReceptacle ?o1 ?r)\n(exists (?o2 - object)\n(and\n"
        "(not (= ?o1 ?o2))\n(objectType ?o2 {target}Type)\n(receptacleType ?r {place}Type)\n"
        "(inReceptacle ?o2 ?r)\n)\n)\n)\n)\n)\n)"
    ),
}


def game(type: str, number: int) -> Game:
    """A generated task, compiled."""
    return compile(*problem(type, number))


def walkthrough(type: str, number: int) -> list[str]:
    """The fewest commands that solve a generated task."""
    commands = plan.shortest(Play(game(type, number)))
    assert commands, f"{type}:{number} can't be solved"
    return commands


@functools.cache
def package_texts() -> tuple[str, str]:
    """The PDDL domain and the text grammar that the `alfworld` package holds. Raises MissingExtraError."""
    spec = importlib.util.find_spec("alfworld")
    if spec is None or spec.origin is None:
        raise MissingExtraError(
            "writing game files", "alfworld", ModuleNotFoundError("no package alfworld, which has the domain")
        )
    data = Path(spec.origin).parent / "data"
    return (data / "alfred.pddl").read_text(), (data / "alfred.twl2").read_text()


def file_content(type: str, number: int, domain: str, grammar: str) -> dict[str, Any]:
    """What a `game.tw-pddl` file of a generated task holds, as JSON."""
    text, sentence = problem(type, number)
    return {
        "pddl_domain": domain,
        "grammar": grammar.replace(f"{TASK_MARK}UNKNOWN GOAL.", f"{TASK_MARK}{sentence}"),
        "pddl_problem": text,
        "solvable": True,
        "walkthrough": walkthrough(type, number),
    }


def file_of(goal: Goal, number: int, split: str = "generated") -> Path:
    """Where the file of a generated task is in the official layout."""
    folder = f"{goal.type}-{goal.target}-None-{goal.place}-{number}"
    return Path("json_2.1.1", split, folder, f"trial_G{number:09d}", "game.tw-pddl")


def write(root: Path, split: str, type: str, number: int, domain: str, grammar: str) -> Path:
    """Writes a generated task in the official layout under `root`; returns its `game.tw-pddl`."""
    goal = game(type, number).goal
    lamp = goal.type == "look_at_obj_in_light"
    path = root / file_of(goal, number, split)
    path.parent.mkdir(parents=True, exist_ok=True)
    params = {
        "object_target": goal.target,
        "parent_target": "" if lamp else goal.place,
        "mrecep_target": "",
        "toggle_target": goal.place if lamp else "",
        "object_sliced": False,
    }
    traj = {"task_id": path.parent.name, "task_type": type, "pddl_params": params}
    path.with_name("traj_data.json").write_text(json.dumps(traj))
    path.write_text(json.dumps(file_content(type, number, domain, grammar)))
    return path

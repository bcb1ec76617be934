"""One ALFWorld game: its text, checked and compiled.

A game file (`game.tw-pddl`) is JSON: the PDDL domain and the text grammar, which are the same in all files
but for the task's sentence; the PDDL problem, which is the room and the goal; and a walkthrough. `compile`
turns a problem and a sentence into a `Game`, or says by a `BadGame` what is wrong with them. Whatever it lets
through, `metagym.envs.alfworld.native` plays exactly as TextWorld does.

Domain, grammar, task types and sentences are those of ALFWorld (https://arxiv.org/abs/2010.03768), versions
0.4 and later, where an object is put down with "move X to Y".
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
TASK_MARK = "Your task is to: "

# SHA-256 of the texts that this interpreter is an interpreter of. The second of each pair comes with the
# `alfworld` package; the first with the published games.
DOMAINS = {
    "0af55e7f92d12b09d28515aa730e4d03fddd17228ef1fd7b18a3ee8ba49b27b9": "published games",
    "f1473041ed01da514de1f87adfd7ef0804862361f83ccf63c75e43633b0eb280": "alfworld 0.4",
}
GRAMMARS = {  # with the task's sentence taken out
    "10da93e13b58e1a6039723f5d4a59ceae7c60772515bfab9fc603bafa7f8ee06": "published games",
    "c294eb280206a4428664cdb4e2037e267e86de5b7fa862212718a961513a7de4": "alfworld 0.4",
}


class BadGame(ValueError):
    """A game that can't be played as it is; says why. `kind` is one word for counting."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Goal:
    """What is to be done: `target` and `place` are types in lower case; `place` of a look is the lamp's."""

    type: str
    target: str
    place: str

    def __str__(self) -> str:
        return f"{self.type}({self.target}, {self.place})"


@dataclass(frozen=True, slots=True)
class Game:
    """A compiled game; immutable. Objects and receptacles are numbers, in the order of their ids.

    Locations are numbers too. `*_objects` are sets of objects.
    """

    goal: Goal
    sentence: str  # "put a mug in cabinet."
    # objects, [O]
    objects: tuple[str, ...]  # "mug 1"
    object_types: tuple[str, ...]  # "mug"; "" where the problem says none
    contents: Mapping[int, tuple[int, ...]]  # of objects that hold objects
    flags: Mapping[str, frozenset[int]]  # "pickupable" ... -> objects
    # receptacles, [R]
    receptacles: tuple[str, ...]
    receptacle_types: tuple[str, ...]
    places: tuple[int, ...]  # location of each receptacle
    openable: frozenset[int]
    accepts: Mapping[str, frozenset[str]]  # receptacle type -> object types
    # the beginning
    start: int  # location of the agent
    inside: tuple[tuple[int, ...], ...]  # [R] objects in each receptacle, ascending
    lying: frozenset[tuple[int, int]]  # (object, location)
    begun: Mapping[str, frozenset[int]]  # "opened" -> receptacles, "isclean" ... -> objects
    held: int | None
    # look-up tables, made from the above
    ways: tuple[str, ...] = field(repr=False)  # [R] "go to cabinet 3"
    object_of: Mapping[str, int] = field(repr=False)
    receptacle_of: Mapping[str, int] = field(repr=False)
    at: Mapping[int, tuple[int, ...]] = field(repr=False)  # location -> receptacles, ascending


OBJECT_FLAGS = (
    "pickupable",
    "cleanable",
    "heatable",
    "coolable",
    "toggleable",
    "sliceable",
    "isreceptacleobject",
)
OBJECT_STATES = ("isclean", "ishot", "iscool", "issliced", "istoggled")
_IGNORED = frozenset({"ison", "moveable", "checked", "full", "examined", "wasinreceptacle"})  # never read
_SIGNATURES: dict[str, tuple[str, ...]] = {
    "atlocation": ("agent", "location"),
    "receptacleatlocation": ("receptacle", "location"),
    "objectatlocation": ("object", "location"),
    "inreceptacle": ("object", "receptacle"),
    "inreceptacleobject": ("object", "object"),
    "openable": ("receptacle",),
    "opened": ("receptacle",),
    "receptacletype": ("receptacle", "rtype"),
    "objecttype": ("object", "otype"),
    "cancontain": ("rtype", "otype"),
    "holds": ("agent", "object"),
    "holdsany": ("agent",),
    **dict.fromkeys((*OBJECT_FLAGS, *OBJECT_STATES), ("object",)),
}
_HEAD = re.compile(r"\s*\(define\s*\(problem\s+[^\s()]+\s*\)\s*\(:domain\s+alfred\s*\)\s*")
_GOAL_TAIL = re.compile(r"([^:]*)\)\s*(?:\(:metric\s+minimize\s*\(\s*total-cost\s*\)\s*\)\s*)?\)\s*")
_PLACED = (
    "(and(exists(?r - receptacle)(exists(?o - object)(and{state}(objecttype ?o {target}type)"
    "(receptacletype ?r {place}type){done}(inreceptacle ?o ?r)))))"
)
_GOALS = {
    "pick_and_place_simple": (
        "(and(exists(?r - receptacle)(exists(?o - object)(and(inreceptacle ?o ?r)(objecttype ?o {target}type)"
        "(receptacletype ?r {place}type)))))"
    ),
    "look_at_obj_in_light": (
        "(and(exists(?ot - object ?r - receptacle ?a - agent ?l - location)(and(objecttype ?ot {place}type)"
        "(toggleable ?ot)(istoggled ?ot)(receptacleatlocation ?r ?l)(atlocation ?a ?l)(inreceptacle ?ot ?r)))"
        "(exists(?o - object ?a - agent)(and(objecttype ?o {target}type)(holds ?a ?o))))"
    ),
    "pick_clean_then_place_in_recep": _PLACED.replace("{state}", "(cleanable ?o)").replace(
        "{done}", "(isclean ?o)"
    ),
    "pick_heat_then_place_in_recep": _PLACED.replace("{state}", "(heatable ?o)").replace(
        "{done}", "(ishot ?o)"
    ),
    "pick_cool_then_place_in_recep": _PLACED.replace("{state}", "(coolable ?o)").replace(
        "{done}", "(iscool ?o)"
    ),
    "pick_two_obj_and_place": (
        "(and(exists(?r - receptacle)(exists(?o1 - object)(and(objecttype ?o1 {target}type)"
        "(receptacletype ?r {place}type)(inreceptacle ?o1 ?r)(exists(?o2 - object)(and(not(= ?o1 ?o2))"
        "(objecttype ?o2 {target}type)(receptacletype ?r {place}type)(inreceptacle ?o2 ?r)))))))"
    ),
}
SENTENCES = {
    "pick_and_place_simple": ("put a {target} in {place}.", "put some {target} on {place}."),
    "look_at_obj_in_light": ("look at {target} under the {place}.", "examine the {target} with the {place}."),
    "pick_clean_then_place_in_recep": (
        "put a clean {target} in {place}.",
        "clean some {target} and put it in {place}.",
    ),
    "pick_heat_then_place_in_recep": (
        "put a hot {target} in {place}.",
        "heat some {target} and put it in {place}.",
    ),
    "pick_cool_then_place_in_recep": (
        "put a cool {target} in {place}.",
        "cool some {target} and put it in {place}.",
    ),
    "pick_two_obj_and_place": (
        "put two {target} in {place}.",
        "find two {target} and put them in {place}.",
    ),
}


def _pattern(template: str) -> re.Pattern[str]:
    """A template as a pattern; a name that occurs again must be the same."""
    pattern = re.escape(template)
    for name in ("target", "place"):
        pattern = pattern.replace(re.escape("{" + name + "}"), f"(?P<{name}>[a-z0-9]+)", 1)
        pattern = pattern.replace(re.escape("{" + name + "}"), f"(?P={name})")
    return re.compile(pattern)


_GOAL_PATTERNS = [(kind, _pattern(text)) for kind, text in _GOALS.items()]
_SENTENCE_PATTERNS = [(kind, _pattern(text)) for kind, texts in SENTENCES.items() for text in texts]
_GRAMMAR_TASK = re.compile(r'"rhs": "Your task is to: ([^"\\]*)"')


def read_sentence(sentence: str) -> Goal | None:
    """What a task's sentence asks for; None if it isn't one of ALFWorld's."""
    for kind, pattern in _SENTENCE_PATTERNS:
        if match := pattern.fullmatch(sentence):
            return Goal(kind, match["target"], match["place"])
    return None


def read_goal(text: str) -> Goal:
    """What a PDDL goal (its formula, in lower case) asks for. Raises BadGame."""
    formula = re.sub(r"\s*([()])\s*", r"\1", " ".join(text.split()))
    for kind, pattern in _GOAL_PATTERNS:
        if match := pattern.fullmatch(formula):
            return Goal(kind, match["target"], match["place"])
    raise BadGame("broken", f"its PDDL goal is none of the six types': {formula[:200]!r}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def check_domain(domain: str) -> None:
    """Raises BadGame if the PDDL domain isn't the one that this interpreter knows."""
    if _digest(domain) not in DOMAINS:
        raise BadGame("version", "its PDDL domain is of another version of ALFWorld")


def read_grammar(grammar: str) -> str:
    """The task's sentence in a text grammar. Raises BadGame."""
    match = _GRAMMAR_TASK.search(grammar)
    if not match:
        raise BadGame("broken", f'its grammar has no sentence "{TASK_MARK}..."')
    rest = grammar[: match.start(1)] + grammar[match.end(1) :]
    if _digest(rest) not in GRAMMARS:
        old = ': there, objects are "put in/on"' if "in/on {r}" in grammar else ""
        raise BadGame("version", f"its text grammar is of another version of ALFWorld{old}")
    return match[1]


def parse(text: str | bytes) -> Game:
    """The game in a `game.tw-pddl` file's text. Raises BadGame."""
    try:
        data = json.loads(text)
    except (ValueError, UnicodeDecodeError, RecursionError) as error:
        raise BadGame("broken", f"it is not JSON: {error}") from error
    return build(data)


def build(data: Any) -> Game:
    """The game in a file's JSON. Raises BadGame."""
    wanted = {"pddl_domain": str, "grammar": str, "pddl_problem": str}
    for name, kind in wanted.items():
        if not isinstance(data, dict) or not isinstance(data.get(name), kind):
            raise BadGame("broken", f"it has no text {name!r}")
    if not data.get("solvable", False):
        raise BadGame("unsolvable", "it is not marked as solvable")
    check_domain(data["pddl_domain"])
    game = compile(data["pddl_problem"], read_grammar(data["grammar"]))
    _check_walkthrough(game, data.get("walkthrough"))
    return game


def _check_walkthrough(game: Game, walkthrough: Any) -> None:
    """Its commands must be of the grammar's version. Raises BadGame."""
    if walkthrough is None:
        return
    if not isinstance(walkthrough, list) or not all(isinstance(c, str) for c in walkthrough):
        raise BadGame("broken", "its walkthrough is not a list of commands")
    for command in walkthrough:
        if command.partition(" ")[0] == "put":
            raise BadGame("version", f"its walkthrough is of another version of ALFWorld: {command!r}")


def compile(problem: str, sentence: str) -> Game:
    """A game from its PDDL problem and its sentence ("put a mug in cabinet."). Raises BadGame."""
    head, declared, init, goal_text = _sections(problem.lower())
    if not _HEAD.fullmatch(head):
        raise BadGame("broken", "its PDDL problem is not one of the domain alfred")
    kinds = _read_objects(declared)
    if list(kinds.values()).count("agent") != 1:
        raise BadGame("broken", "its PDDL problem does not have exactly one agent")
    facts, mentioned = _read_facts(init, kinds)
    goal = read_goal(goal_text)
    asked = read_sentence(sentence)
    if asked is None:
        raise BadGame(
            "mismatch", f"its sentence is none of ALFWorld's: {sentence!r}, its PDDL goal is {goal}"
        )
    if asked != goal:
        raise BadGame("mismatch", f"its sentence {sentence!r} asks for {asked}, its PDDL goal for {goal}")

    ids = sorted(mentioned)
    names = _names(ids)
    objects = [id for id in ids if kinds[id] == "object"]
    receptacles = [id for id in ids if kinds[id] == "receptacle"]
    locations = {id: i for i, id in enumerate(id for id in ids if kinds[id] == "location")}
    number = {id: i for i, id in enumerate(objects)} | {id: i for i, id in enumerate(receptacles)}

    agents = facts["atlocation"]
    if len(agents) != 1:
        raise BadGame("broken", f"its PDDL problem has the agent at {len(agents)} locations")
    held = facts["holds"]
    if len(held) > 1 or len(facts["holdsany"]) != len(held):
        raise BadGame("broken", "its PDDL problem contradicts itself about what is held")
    places = _function(facts["receptacleatlocation"], receptacles, "location")
    types = _function(facts["receptacletype"], receptacles, "type")
    if "sinktype" in types:  # the versions of the domain disagree on whether one can clean there
        raise BadGame(
            "version", "its PDDL problem has a receptacle of type Sink, which no published game has"
        )
    object_types = _function(facts["objecttype"], objects, "type", partial=True)

    inside: list[list[int]] = [[] for _ in receptacles]
    for thing, receptacle in facts["inreceptacle"]:
        inside[number[receptacle]].append(number[thing])
    contents: dict[int, list[int]] = {}
    for inner, outer in facts["inreceptacleobject"]:
        contents.setdefault(number[outer], []).append(number[inner])
    accepts: dict[str, set[str]] = {}
    for receptacle, thing in facts["cancontain"]:
        accepts.setdefault(_type(receptacle), set()).add(_type(thing))
    where = tuple(locations[id] for id in places)
    at: dict[int, list[int]] = {}
    for receptacle, place in enumerate(where):
        at.setdefault(place, []).append(receptacle)
    object_names = tuple(names[id] for id in objects)
    receptacle_names = tuple(names[id] for id in receptacles)
    return Game(
        goal=goal,
        sentence=sentence,
        objects=object_names,
        object_types=tuple(_type(id) if id else "" for id in object_types),
        contents={outer: tuple(sorted(inner)) for outer, inner in contents.items()},
        flags={name: frozenset(number[id] for (id,) in facts[name]) for name in OBJECT_FLAGS},
        receptacles=receptacle_names,
        receptacle_types=tuple(_type(id) for id in types),
        places=where,
        openable=frozenset(number[id] for (id,) in facts["openable"]),
        accepts={key: frozenset(values) for key, values in accepts.items()},
        start=locations[next(iter(agents))[1]],
        inside=tuple(tuple(sorted(things)) for things in inside),
        lying=frozenset((number[id], locations[place]) for id, place in facts["objectatlocation"]),
        begun={name: frozenset(number[id] for (id,) in facts[name]) for name in ("opened", *OBJECT_STATES)},
        held=number[next(iter(held))[1]] if held else None,
        ways=tuple(f"go to {name}" for name in receptacle_names),
        object_of={name: i for i, name in enumerate(object_names)},
        receptacle_of={name: i for i, name in enumerate(receptacle_names)},
        at={place: tuple(found) for place, found in at.items()},
    )


def _sections(problem: str) -> tuple[str, str, str, str]:
    """What stands before and in (:objects ...), (:init ...) and (:goal ...). Raises BadGame."""
    head, objects, rest = problem.partition("(:objects")
    declared, init, rest = rest.partition("(:init")
    atoms, goal, rest = rest.partition("(:goal")
    tail = _GOAL_TAIL.fullmatch(rest)
    declared, atoms = declared.rstrip(), atoms.rstrip()
    if not (objects and init and goal and tail and declared.endswith(")") and atoms.endswith(")")):
        raise BadGame("broken", "its PDDL problem is not of the form (define ... (:objects) (:init) (:goal))")
    return head, declared[:-1], atoms[:-1], tail[1]


def _type(id: str) -> str:
    if not id.endswith("type"):
        raise BadGame("broken", f"its PDDL problem has the type {id!r}, which does not end in Type")
    return id.removesuffix("type")


def _read_objects(text: str) -> dict[str, str]:
    """id -> kind, from `id id - kind`. Raises BadGame."""
    kinds: dict[str, str] = {}
    pending: list[str] = []
    if "(" in text or ")" in text:
        raise BadGame("broken", "its PDDL problem has something odd in (:objects ...)")
    words = iter(text.split())
    for word in words:
        if word != "-":
            pending.append(word)
            continue
        kind = next(words, "")
        if kind not in ("agent", "location", "receptacle", "object", "rtype", "otype"):
            raise BadGame("broken", f"its PDDL problem has an object of the unknown kind {kind!r}")
        for id in pending:
            if kinds.setdefault(id, kind) != kind:
                raise BadGame("broken", f"its PDDL problem declares {id!r} as {kinds[id]} and as {kind}")
        pending.clear()
    if pending:
        raise BadGame("broken", f"its PDDL problem declares {pending[0]!r} without a kind")
    return kinds


def _read_facts(text: str, kinds: Mapping[str, str]) -> tuple[dict[str, set[tuple[str, ...]]], set[str]]:
    """(predicate -> arguments of its atoms, all ids that any atom mentions). Raises BadGame."""
    facts: dict[str, set[tuple[str, ...]]] = {name: set() for name in _SIGNATURES}
    mentioned: set[str] = set()
    *atoms, rest = text.split(")")
    if rest.strip():
        raise BadGame("broken", f"its PDDL problem has something odd in (:init ...): {rest.strip()[:100]!r}")
    for atom in set(atoms):
        before, _, inner = atom.partition("(")
        name, *words = inner.split() or [""]
        arguments = tuple(words)
        if before.strip() or "(" in inner:
            raise BadGame("broken", f"its PDDL problem has something odd in (:init ...): {atom[:100]!r}")
        signature = _SIGNATURES.get(name)
        found = tuple(map(kinds.get, arguments))
        if signature is None and name not in _IGNORED:
            raise BadGame("broken", f"its PDDL problem has the unknown predicate {name!r}")
        if found != signature if signature else None in found:
            raise BadGame("broken", f"its PDDL problem has {name!r} of {', '.join(arguments) or 'nothing'}")
        mentioned.update(arguments)
        if signature:
            facts[name].add(arguments)
    return facts, mentioned


def _function(atoms: set[tuple[str, ...]], ids: list[str], what: str, partial: bool = False) -> list[str]:
    """The second argument for each of `ids`; "" where there is none. Raises BadGame."""
    found: dict[str, str] = dict(atoms)  # type: ignore[arg-type]
    if len(found) != len(atoms) or (not partial and len(found) != len(ids)):
        odd = [id for id, count in Counter(a[0] for a in atoms).items() if count > 1]
        odd += [id for id in ids if id not in found]
        raise BadGame("broken", f"its PDDL problem has no {what}, or several, for {odd[0]!r}")
    return [found.get(id, "") for id in ids]


def _names(ids: list[str]) -> dict[str, str]:
    """id -> what it is called: "cabinet_bar__plus_01..." -> "cabinet 3". `ids` is sorted.

    Of n things of one name the first gets the number n, the last 1. Types and the agent have no number; their
    ids hold no position. Raises BadGame for an object, receptacle or location without one.
    """
    stems = {}
    for id in ids:
        stem, position, _ = id.partition("_bar_")
        if position:
            if not stem.isalnum() or not id.isascii():
                raise BadGame("broken", f"its PDDL problem has the odd id {id!r}")
            stems[id] = stem + "basin" if "basin" in id else stem
    left = Counter(stems.values())
    names = {}
    for id in ids:
        if id in stems:
            names[id] = f"{stems[id]} {left[stems[id]]}"
            left[stems[id]] -= 1
    return names

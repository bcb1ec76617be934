"""Plays a compiled game: the text, the admissible commands and the win of ALFWorld, character by character.

The rules are those of ALFWorld's one PDDL domain as TextWorld runs it (with Fast Downward), the text that of
its one grammar. What may surprise is theirs:

* Only what is held can be examined: a comma in the domain makes the other case void.
* "go to" a receptacle at the agent's own location does nothing, an object may lie in several receptacles,
  heating, cooling and cleaning need no open door, and whatever is used is turned on.
* "Next to it" lists what was once taken from here, and lies in another receptacle of the same location now.
* "look" before the first step sees nothing at all.
"""

import bisect
from collections.abc import Iterable

from metagym.envs.alfworld.game import OBJECT_STATES, TASK_MARK, Game

WELCOME = "-= Welcome to TextWorld, ALFRED! =-"
NOTHING = "Nothing happens."
HELP = """\
Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""


def _listed(names: list[str]) -> str:
    if not names:
        return "nothing"
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])}, and {names[-1]}"


class Play:
    """One game being played. Holds a few kilobytes; a `Game` is shared by all that play it."""

    __slots__ = ("game", "held", "inside", "left", "location", "lying", "opened", "state")

    def __init__(self, game: Game):
        self.game = game
        self.reset()

    def reset(self) -> str:
        """Begins again: the first observation."""
        game = self.game
        self.location = game.start
        self.held = game.held
        self.inside: list[tuple[int, ...] | list[int]] = list(game.inside)  # ascending; lists once changed
        self.lying = set(game.lying)
        self.left: set[tuple[int, int]] = set()  # (object, receptacle) that it was taken from
        self.opened = set(game.begun["opened"])
        self.state = {name: set(game.begun[name]) for name in OBJECT_STATES}
        scene = self._scene() if game.at.get(game.start) else self._room(range(len(game.receptacles)))
        return f"{WELCOME}\n\n{scene}\n\n{TASK_MARK}{game.sentence}"

    def step(self, command: str) -> str:
        """Does what a command says and tells it; `NOTHING` for anything that isn't admissible."""
        answer = self._step(command.strip())
        return NOTHING if answer is None else answer

    def _step(self, command: str) -> str | None:
        verb, _, rest = command.partition(" ")
        match verb:
            case "go":
                return self._go(rest.removeprefix("to ")) if rest.startswith("to ") else None
            case "take":
                return self._take(*_two(rest, " from "))
            case "move":
                return self._move(*_two(rest, " to "))
            case "open":
                return self._open(rest)
            case "close":
                return self._close(rest)
            case "examine":
                return self._examine(rest)
            case "use":
                return self._use(rest)
            case "heat":
                return self._treat(rest, "heatable", ("microwave",), "ishot", "iscool", "heat")
            case "cool":
                return self._treat(rest, "coolable", ("fridge",), "iscool", "ishot", "cool")
            case "clean":
                return self._treat(rest, "cleanable", ("sinkbasin",), "isclean", None, "clean")
            case "slice":
                return self._slice(*_two(rest, " with "))
        match command:
            case "look":
                return self._scene() if self.game.at.get(self.location) else self._room(())
            case "inventory":
                if self.held is None:
                    return "You are not carrying anything."
                return f"You are carrying: a {self.game.objects[self.held]}."
            case "help":
                return HELP
        return None

    # --- what is where ---------------------------------------------------------------------------------

    def here(self) -> tuple[int, ...]:
        """The receptacles at the agent's location."""
        return self.game.at.get(self.location, ())

    def accessible(self, receptacle: int) -> bool:
        """Open, or nothing that can be."""
        return receptacle not in self.game.openable or receptacle in self.opened

    def accepts(self, receptacle: int, thing: int) -> bool:
        game = self.game
        return game.object_types[thing] in game.accepts.get(game.receptacle_types[receptacle], ())

    def _receptacle_here(self, name: str) -> int | None:
        receptacle = self.game.receptacle_of.get(name)
        return None if receptacle is None or self.game.places[receptacle] != self.location else receptacle

    # --- commands: each answers, or None if it isn't admissible -----------------------------------------

    def _go(self, name: str) -> str | None:
        receptacle = self.game.receptacle_of.get(name)
        if receptacle is None or self.game.places[receptacle] == self.location:
            return None
        self.location = self.game.places[receptacle]
        return f"You arrive at {name}. {self._contents(receptacle)}"

    def _open(self, name: str) -> str | None:
        receptacle = self._receptacle_here(name)
        if receptacle is None or self.accessible(receptacle):
            return None
        self.opened.add(receptacle)
        return f"You open the {name}. {self._contents(receptacle)}"

    def _close(self, name: str) -> str | None:
        receptacle = self._receptacle_here(name)
        if receptacle is None or receptacle not in self.game.openable or receptacle not in self.opened:
            return None
        self.opened.remove(receptacle)
        return f"You close the {name}."

    def _take(self, name: str, place: str) -> str | None:
        thing, receptacle = self.game.object_of.get(name), self._receptacle_here(place)
        if thing is None or receptacle is None or self.held is not None:
            return None
        if thing not in self.game.flags["pickupable"] or not self.accessible(receptacle):
            return None
        if thing not in self.inside[receptacle]:
            return None
        self.inside[receptacle] = [t for t in self.inside[receptacle] if t != thing]
        self.left.add((thing, receptacle))
        self.lying.discard((thing, self.location))
        self.held = thing
        return f"You pick up the {name} from the {place}."

    def _move(self, name: str, place: str) -> str | None:
        thing, receptacle = self.game.object_of.get(name), self._receptacle_here(place)
        if thing is None or receptacle is None or thing != self.held:
            return None
        if not self.accessible(receptacle) or not self.accepts(receptacle, thing):
            return None
        content = list(self.inside[receptacle])
        if thing not in content:
            bisect.insort(content, thing)
        self.inside[receptacle] = content
        self.left.discard((thing, receptacle))
        self.lying.add((thing, self.location))
        self.held = None
        return f"You move the {name} to the {place}."

    def _treat(
        self, rest: str, flag: str, kinds: tuple[str, ...], gained: str, lost: str | None, verb: str
    ) -> str | None:
        name, place = _two(rest, " with ")
        thing, receptacle = self.game.object_of.get(name), self._receptacle_here(place)
        if thing is None or receptacle is None or thing != self.held or thing not in self.game.flags[flag]:
            return None
        if self.game.receptacle_types[receptacle] not in kinds:
            return None
        self.state[gained].add(thing)
        if lost:
            self.state[lost].discard(thing)
        return f"You {verb} the {name} using the {place}."

    def _use(self, name: str) -> str | None:
        thing = self.game.object_of.get(name)
        if thing is None or thing not in self.game.flags["toggleable"]:
            return None
        if not any(thing in self.inside[r] for r in self.here()):
            return None
        self.state["istoggled"].add(thing)
        return f"You turn on the {name}."

    def _slice(self, name: str, tool: str) -> str | None:
        thing, knife = self.game.object_of.get(name), self.game.object_of.get(tool)
        if thing is None or knife is None or knife != self.held or not self._is_knife(knife):
            return None
        if thing not in self.game.flags["sliceable"] or (thing, self.location) not in self.lying:
            return None
        self.state["issliced"].add(thing)
        return f"You sliced the {name} with the {tool}."

    def _is_knife(self, thing: int) -> bool:
        return self.game.object_types[thing] in ("knife", "butterknife")

    def _examine(self, name: str) -> str | None:
        receptacle = self._receptacle_here(name)
        if receptacle is not None:
            return self._contents(receptacle)
        thing = self.game.object_of.get(name)
        return None if thing is None or thing != self.held else self._describe(thing)

    # --- text ------------------------------------------------------------------------------------------

    def _things(self, things: Iterable[int]) -> str:
        return _listed([f"a {self.game.objects[t]}" for t in things])

    def _contents(self, receptacle: int) -> str:
        name = self.game.receptacles[receptacle]
        if receptacle not in self.game.openable:
            return f"On the {name}, you see {self._things(self.inside[receptacle])}."
        if receptacle in self.opened:
            return f"The {name} is open. In it, you see {self._things(self.inside[receptacle])}."
        return f"The {name} is closed."

    def _room(self, receptacles: Iterable[int]) -> str:
        seen = _listed([f"a {self.game.receptacles[r]}" for r in receptacles])
        return f"You are in the middle of a room. Looking quickly around you, you see {seen}."

    def _scene(self) -> str:
        here = self.here()
        facing = _listed([self.game.receptacles[r] for r in here])
        beside = sorted((t, r) for t, r in self.left if r in here and (t, self.location) in self.lying)
        return f"You are facing the {facing}. Next to it, you see {self._things(t for t, _ in beside)}."

    def _describe(self, thing: int) -> str:
        game, state, name = self.game, self.state, self.game.objects[thing]
        if thing in game.flags["isreceptacleobject"]:
            return f"This is a normal {name}. In it, you see {self._things(game.contents.get(thing, ()))}."
        clean, hot, cool = (thing in state[key] for key in ("isclean", "ishot", "iscool"))
        words = [word for word, true in (("hot", hot), ("cool", cool and not hot), ("clean", clean)) if true]
        if words:
            if thing in state["issliced"]:
                return f"This is a {' and '.join(words)} sliced {name}."
            return f"This is a {'cold' if words == ['cool'] else ' and '.join(words)} {name}."
        if thing in game.flags["toggleable"] and thing in state["istoggled"]:
            return f"This {name} is on."
        if thing in game.flags["sliceable"] and thing in state["issliced"]:
            return f"This is a sliced {name}."
        return f"There's nothing special about {name}."

    # --- what can be done, and what was ------------------------------------------------------------------

    def admissible(self) -> list[str]:
        """All commands that do something, in alphabetical order."""
        game, held, flags = self.game, self.held, self.game.flags
        here, commands = self.here(), {"help", "inventory", "look"}
        commands.update(w for w, place in zip(game.ways, game.places, strict=True) if place != self.location)
        holding = None if held is None else game.objects[held]
        if held is not None:
            commands.add(f"examine {holding}")
            if self._is_knife(held):
                cut = (t for t in flags["sliceable"] if (t, self.location) in self.lying)
                commands.update(f"slice {game.objects[t]} with {holding}" for t in cut)
        for receptacle in here:
            name, kind = game.receptacles[receptacle], game.receptacle_types[receptacle]
            commands.add(f"examine {name}")
            content = self.inside[receptacle]
            commands.update(f"use {game.objects[t]}" for t in content if t in flags["toggleable"])
            if receptacle in game.openable:
                commands.add(f"close {name}" if receptacle in self.opened else f"open {name}")
            if self.accessible(receptacle):
                if held is None:
                    free = (t for t in content if t in flags["pickupable"])
                    commands.update(f"take {game.objects[t]} from {name}" for t in free)
                elif self.accepts(receptacle, held):
                    commands.add(f"move {holding} to {name}")
            if held is not None:
                if kind == "microwave" and held in flags["heatable"]:
                    commands.add(f"heat {holding} with {name}")
                elif kind == "fridge" and held in flags["coolable"]:
                    commands.add(f"cool {holding} with {name}")
                elif kind == "sinkbasin" and held in flags["cleanable"]:
                    commands.add(f"clean {holding} with {name}")
        return sorted(commands)

    def won(self) -> bool:
        return self.progress() == 1.0

    def progress(self) -> float:
        """The share of the goal's conditions that hold, those of one object (and one receptacle) together.

        A simple task has one condition, the object in place; heating, cooling and cleaning add one, the
        object treated; two objects are one condition each, in the same receptacle; a look has three: the
        object is held, a lamp is on, and a lamp that is on is here.
        """
        game, goal = self.game, self.game.goal
        targets = [t for t, kind in enumerate(game.object_types) if kind == goal.target]
        if goal.type == "look_at_obj_in_light":
            lamps = self.state["istoggled"] & game.flags["toggleable"]
            lit = {t for t in lamps if game.object_types[t] == goal.place}
            beside = any(t in self.inside[r] for r in self.here() for t in lit)
            return (bool(self.held in targets) + bool(lit) + beside) / 3
        right = [r for r, kind in enumerate(game.receptacle_types) if kind == goal.place]
        placed = [sum(t in self.inside[r] for t in targets) for r in right]
        if goal.type == "pick_and_place_simple":
            return float(any(placed))
        if goal.type == "pick_two_obj_and_place":
            return min(max(placed, default=0), 2) / 2
        flag, gained = {
            "pick_clean_then_place_in_recep": ("cleanable", "isclean"),
            "pick_heat_then_place_in_recep": ("heatable", "ishot"),
            "pick_cool_then_place_in_recep": ("coolable", "iscool"),
        }[goal.type]
        able = [t for t in targets if t in game.flags[flag]]
        done = [(t in self.state[gained]) + any(t in self.inside[r] for r in right) for t in able]
        return max(done, default=0) / 2


def _two(text: str, word: str) -> tuple[str, str]:
    """What stands before and after a word."""
    before, _, after = text.partition(word)
    return before, after

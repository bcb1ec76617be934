"""Every id that minihack 1.0.2 registers, by family, without importing it; a test compares.

A type is an environment id, "MiniHack-Room-Random-5x5-v0"; "Room-Random-5x5" is taken for it too.
"""

import functools
import importlib.util
from dataclasses import dataclass

_STAIRS = "Reach the staircase down."
_NO_MAPS = "its levels are not part of minihack; it needs a download by minihack's own script"
_NO_DES = "it is a base for custom levels and has none of its own"
_BROKEN = "minihack 1.0.2 asks minigrid for a size that its crossings refuse"


@dataclass(frozen=True)
class Family:
    """Types that share a goal. `why_not`: why its types can't run, whatever is installed."""

    goal: str
    types: tuple[str, ...]
    stairs: bool = False  # the goal is to reach the staircase down
    needs: str = ""  # a package beyond minihack
    why_not: str = ""


def _family(goal: str, names: str, *, version: int = 0, **kwargs) -> Family:
    """`names` may hold one group in braces: "Wear-{Fixed,Distr}"."""
    types = []
    for name in names.split():
        head, _, rest = name.partition("{")
        group, _, tail = rest.partition("}")
        types += [f"MiniHack-{head}{part}{tail}-v{version}" for part in group.split(",")]
    return Family(goal, tuple(types), **kwargs)


FAMILIES = {
    "Room": _family(
        _STAIRS,
        "Room-{,Random-,Dark-,Monster-,Trap-,Ultimate-}5x5 "
        "Room-{,Random-,Dark-,Monster-,Trap-,Ultimate-}15x15",
        stairs=True,
    ),
    "Corridor": _family(_STAIRS, "Corridor-R{2,3,5}", stairs=True),
    "CorridorBattle": _family(
        "Fight your way to the staircase down and reach it.", "CorridorBattle{,-Dark}", stairs=True
    ),
    "KeyRoom": _family(
        "Take the key, unlock the door with it, and reach the staircase down.",
        "KeyRoom-{Fixed-S5,S5,S15,Dark-S5,Dark-S15}",
        stairs=True,
    ),
    "MazeWalk": _family(_STAIRS, "MazeWalk-{9x9,15x15,45x19} MazeWalk-Mapped-{9x9,15x15,45x19}", stairs=True),
    "River": _family(
        "Cross the river, by pushing boulders into it, and reach the staircase down.",
        "River{,-Narrow,-Monster,-Lava,-MonsterLava}",
        stairs=True,
    ),
    "HideNSeek": _family(
        "Reach the staircase down and stay away from the monster.",
        "HideNSeek{,-Mapped,-Lava,-Big}",
        stairs=True,
    ),
    "Labyrinth": _family(_STAIRS, "Labyrinth-{Big,Small}", stairs=True),
    "ExploreMaze": _family(
        "Eat the apples, then reach the staircase down.",
        "ExploreMaze-{Easy,Easy-Mapped,Hard,Hard-Mapped}",
        stairs=True,
    ),
    "Memento": _family(
        "Remember what you see at the start: it tells which way to turn at the fork. Kill the grid bug; "
        "a squeaky board ends the episode.",
        "Memento-{Short-F2,F2,F4}",
    ),
    "MultiRoom": _family(
        _STAIRS,
        "MultiRoom-N2{,-Extreme,-Lava,-LavaMonsters,-Locked,-Monster} "
        "MultiRoom-N4{,-Extreme,-Lava,-LavaMonsters,-Locked,-Monster} "
        "MultiRoom-N6{,-Extreme,-Lava,-LavaMonsters,-Locked,-Monster,-OpenDoor,-Lava-OpenDoor} "
        "MultiRoom-N10{,-Lava,-OpenDoor,-Lava-OpenDoor}",
        stairs=True,
        needs="minigrid",
    ),
    "Sokoban": _family(
        "Push the boulders into all the pits, then reach the staircase down.",
        "Sokoban{1a,1b,2a,2b,3a,3b,4a,4b}",
        version=1,
        stairs=True,
    ),
    "ClosedDoor": _family("Open the door and reach the staircase down.", "ClosedDoor", stairs=True),
    "LockedDoor": _family(
        "Get through the locked door, by kicking it open, and reach the staircase down.",
        "LockedDoor{,-Fixed}",
        stairs=True,
    ),
    "LavaCross": _family(
        "Cross the lava and reach the staircase down.",
        "LavaCross-{Full,Restricted} LavaCross-Levitate-{Full,Restricted} "
        "LavaCross-Levitate-Potion-{Inv-Full,Inv-Restricted,Pickup-Full,Pickup-Restricted} "
        "LavaCross-Levitate-Ring-{Inv-Full,Inv-Restricted,Pickup-Full,Pickup-Restricted} "
        "Freeze-Lava-{Full,Restricted}",
        stairs=True,
    ),
    "Freeze": _family(
        "Use the item to shoot a bolt of cold.",
        "Freeze-Horn-{Full,Restricted} Freeze-Wand-{Full,Restricted} Freeze-Random-{Full,Restricted}",
    ),
    "Levitate": _family(
        "Use the item to levitate.",
        "Levitate-Boots-{Fixed,Full,Restricted} Levitate-Potion-{Fixed,Full,Restricted} "
        "Levitate-Ring-{Fixed,Full,Restricted} Levitate-Random-Full",
    ),
    "Eat": _family("Eat the apple.", "Eat{,-Fixed,-Distr}"),
    "Pray": _family("Pray on the altar.", "Pray{,-Fixed,-Distr}"),
    "PutOn": _family("Put on the amulet.", "PutOn{,-Fixed,-Distr}"),
    "Read": _family("Read the scroll.", "Read{,-Fixed,-Distr}"),
    "Sink": _family("Drink from the sink.", "Sink{,-Fixed,-Distr}"),
    "Wear": _family("Wear the robe.", "Wear{,-Fixed,-Distr}"),
    "Wield": _family("Wield the dagger.", "Wield{,-Fixed,-Distr}"),
    "Zap": _family("Zap the wand.", "Zap{,-Fixed,-Distr}"),
    "WoD-Easy": _family("Kill the minotaur with the wand of death.", "WoD-Easy-{Full,Restricted}"),
    "WoD": _family(
        "Kill the minotaur with the wand of death and reach the staircase down.",
        "WoD-Medium-{Full,Restricted} WoD-Hard-{Full,Restricted} WoD-Pro-{Full,Restricted}",
        stairs=True,
    ),
    "Quest": _family(
        "Cross the lava with what you find, get past the monsters, and reach the staircase down.",
        "Quest-{Easy,Medium,Hard}",
        stairs=True,
    ),
    "Boxoban": _family(
        "Push the boulders into all the pits.", "Boxoban-{Hard,Medium,Unfiltered}", why_not=_NO_MAPS
    ),
    "Crossing": _family(
        _STAIRS,
        "LavaCrossing{S9N1,S9N2,S9N3,S11N5,S19N13,S19N17} SimpleCrossing{S9N1,S9N2,S9N3,S11N5}",
        stairs=True,
        why_not=_BROKEN,
    ),
    "Custom": _family("", "{Navigation,Skill}-Custom", why_not=_NO_DES),
}

CUSTOM = Family(_STAIRS, (), stairs=True)  # levels of one's own

FAMILY_OF = {kind: family for family in FAMILIES.values() for kind in family.types}
_SHORT = {kind.removeprefix("MiniHack-").rpartition("-v")[0].lower(): kind for kind in FAMILY_OF}


def full_name(kind: str) -> str:
    """The id that a short name stands for, in any case; other names as they are."""
    return _SHORT.get(kind.lower(), kind)


@functools.cache
def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def why_not(kind: str) -> str | None:
    """Why a known type can't run here; None if it can."""
    family = FAMILY_OF[kind]
    if family.why_not:
        return family.why_not
    if family.needs and not installed(family.needs):
        return f"it needs the package {family.needs}, which is not installed (the extra [minihack] has it)"
    return None


def runnable() -> tuple[str, ...]:
    """The types that can run here."""
    return tuple(kind for kind in FAMILY_OF if why_not(kind) is None)

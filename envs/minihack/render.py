"""NetHack's arrays to text. Pure functions of arrays; every array is only read.

Coordinates are map rows (0 to 20, downwards) and columns (0 to 78). Directions are counted in steps along
the axes: "2 steps north and 1 step east".
"""

import importlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

nethack: Any = importlib.import_module("nle.nethack")  # most of its names are made at run time

# Map symbols (NetHack 3.6 defsym.h), as offsets from GLYPH_CMAP_OFF.
_WALLS = range(0, 12)  # solid stone and the eleven kinds of wall
_DOORWAY, _OPEN_DOORS, _CLOSED_DOORS = 12, (13, 14), (15, 16)
_BARS, _TREE = 17, 18
_FLOORS = range(19, 23)  # lit and dark room, lit and dark corridor
_LIQUIDS = (32, 34, 41)  # pool, lava, water
_MASSES = (_BARS, _TREE, 32, 33, 34, 39, 40, 41, 77)  # and ice, air, clouds: rather areas than things
_LAST_THING = 64  # dungeon features and traps; above are rays and flashes

NOTHING, THING, MASS = 0, 1, 2


def _classes() -> tuple[np.ndarray, bytes]:
    """Per glyph: whether it is worth a word, and whether a step onto it looks possible."""
    glyphs = np.arange(nethack.MAX_GLYPH)
    cmap = np.where(nethack.glyph_is_cmap(glyphs), glyphs - nethack.GLYPH_CMAP_OFF, -1)
    kind = np.full(nethack.MAX_GLYPH, THING, np.uint8)
    kind[(cmap >= 0) & (np.isin(cmap, [*_WALLS, *_FLOORS]) | (cmap > _LAST_THING))] = NOTHING
    kind[np.isin(cmap, _MASSES)] = MASS
    kind[nethack.GLYPH_EXPLODE_OFF : nethack.GLYPH_WARNING_OFF] = NOTHING
    open_ = ~np.isin(cmap, [*_WALLS, *_CLOSED_DOORS, _BARS, _TREE, *_LIQUIDS])
    open_[_boulders()] = False
    open_[nethack.glyph_is_monster(glyphs)] = False
    return kind, open_.tobytes()


def _boulders() -> list[int]:
    named = (i for i in range(nethack.NUM_OBJECTS) if nethack.OBJ_NAME(nethack.objclass(i)) == "boulder")
    return [nethack.GLYPH_OBJ_OFF + i for i in named]


_KIND, _OPEN = _classes()
_OPEN_DOOR_GLYPHS = frozenset(nethack.GLYPH_CMAP_OFF + i for i in _OPEN_DOORS)
_AROUND = (
    ("north", -1, 0),
    ("northeast", -1, 1),
    ("east", 0, 1),
    ("southeast", 1, 1),
    ("south", 1, 0),
    ("southwest", 1, -1),
    ("west", 0, -1),
    ("northwest", -1, -1),
)


def text_of(array: np.ndarray) -> str:
    """The text in a NUL-terminated array of bytes."""
    return array.tobytes().split(b"\0", 1)[0].decode("latin-1")


def where(rows: int, columns: int) -> str:
    """An offset in words: (-2, 1) is "2 steps north and 1 step east"."""
    parts = []
    if rows:
        parts.append(f"{abs(rows)} step{'s' * (abs(rows) > 1)} {'north' if rows < 0 else 'south'}")
    if columns:
        parts.append(f"{abs(columns)} step{'s' * (abs(columns) > 1)} {'west' if columns < 0 else 'east'}")
    return " and ".join(parts) or "here"


def things(
    glyphs: np.ndarray, descriptions: np.ndarray, row: int, column: int, most: int = 24
) -> tuple[list[tuple[str, int, int]], int]:
    """What can be seen, nearest first, as (name, rows away, columns away), and how many more there are.

    `glyphs` i16[21, 79], `descriptions` u8[21, 79, 80]. Of an area (water, lava, ice, trees, bars) only the
    nearest square stands, with the number of squares in its name.
    """
    width = glyphs.shape[1]
    kinds = _KIND.take(glyphs.ravel())
    kinds[row * width + column] = NOTHING
    seen = []
    for at in (kinds == THING).nonzero()[0].tolist():
        r, c = divmod(at, width)
        seen.append((max(abs(r - row), abs(c - column)), r, c, 1))
    seen.sort()
    more = max(0, len(seen) - most)
    del seen[most:]
    masses = (kinds == MASS).nonzero()[0]
    if len(masses):
        rows, columns = np.divmod(masses, width)
        far = np.maximum(abs(rows - row), abs(columns - column))
        which = glyphs[rows, columns]
        for glyph in sorted(set(which.tolist())):
            squares = (which == glyph).nonzero()[0]
            i = squares[far[squares].argmin()]
            seen.append((int(far[i]), int(rows[i]), int(columns[i]), len(squares)))
        seen.sort()
    named = []
    for _, r, c, count in seen:
        name = text_of(descriptions[r, c])
        if name:
            area = f" ({count} squares, the nearest)" if count > 1 else ""
            named.append((name + area, r - row, c - column))
    return named, more


def ways(glyphs: np.ndarray, row: int, column: int) -> list[str]:
    """Directions in which a step looks possible: no wall, closed door, boulder, monster or liquid there."""
    found = []
    top, left = max(row - 1, 0), max(column - 1, 0)
    near = glyphs[top : row + 2, left : column + 2].tolist()
    for name, dr, dc in _AROUND:
        r, c = row + dr - top, column + dc - left
        if 0 <= r < len(near) and 0 <= c < len(near[0]):
            glyph = near[r][c]
            if _OPEN[glyph] and not (dr and dc and glyph in _OPEN_DOOR_GLYPHS):  # no diagonals through doors
                found.append(name)
    return found


def map_of(chars: np.ndarray) -> str:
    """The map, u8[21, 79], cut to what is drawn."""
    text, width = chars.tobytes().decode("latin-1"), chars.shape[1]
    lines = [text[at : at + width].rstrip() for at in range(0, len(text), width)]
    drawn = [i for i, line in enumerate(lines) if line]
    if not drawn:
        return ""
    left = min(len(lines[i]) - len(lines[i].lstrip()) for i in drawn)
    return "\n".join(line[left:] for line in lines[drawn[0] : drawn[-1] + 1])


def inventory_of(letters: np.ndarray, names: np.ndarray) -> list[str]:
    """ "a: a +0 dagger (weapon in hand)"; `letters` u8[55], `names` u8[55, 80]."""
    held = letters.tobytes().split(b"\0", 1)[0].decode("latin-1")
    return [f"{letter}: {text_of(names[i])}" for i, letter in enumerate(held)]


_HUNGER = ("satiated", "", "hungry", "weak from hunger", "fainting", "fainted", "starved")
_LOAD = ("", "burdened", "stressed", "strained", "overtaxed", "overloaded")
_CONDITIONS = (  # bits of NLE_BL_CONDITION
    "turning to stone", "slimed", "strangled", "food poisoned", "terminally ill", "blind", "deaf", "stunned",
    "confused", "hallucinating", "levitating", "flying", "riding",
)  # fmt: skip
_ALIGNMENT = {-1: "chaotic", 0: "neutral", 1: "lawful"}


def statistics_of(blstats: np.ndarray) -> str:
    """One line of the bottom-line statistics, i64[27]."""
    b = blstats.tolist()
    parts = [
        f"HP {b[10]}/{b[11]}", f"energy {b[14]}/{b[15]}", f"armor class {b[16]}",
        f"experience level {b[18]}", f"strength {_strength(b[3])}", f"dexterity {b[4]}",
        f"constitution {b[5]}", f"intelligence {b[6]}", f"wisdom {b[7]}", f"charisma {b[8]}",
        f"gold {b[13]}", f"dungeon level {b[12]}", f"turn {b[20]}",
    ]  # fmt: skip
    states = [_HUNGER[b[21]] if 0 <= b[21] < len(_HUNGER) else ""]
    states.append(_LOAD[b[22]] if 0 <= b[22] < len(_LOAD) else "")
    states += [name for bit, name in enumerate(_CONDITIONS) if b[25] >> bit & 1]
    if len(b) > 26 and b[26] in _ALIGNMENT:
        parts.insert(3, _ALIGNMENT[b[26]])
    return ", ".join(parts + [s for s in states if s])


def _strength(value: int) -> str:
    """3 to 18, 18/01 to 18/100 (19 to 118), 19 to 25 (119 to 125)."""
    return f"18/{value - 18:02}" if 18 < value <= 118 else str(value - 100 if value > 118 else value)


def window_of(screen: np.ndarray) -> list[str]:
    """The lines of the menu or text window that covers the screen, u8[24, 80]; none if there is none.

    A window ends with a line "(end)", "(1 of 2)" or "--More--"; its left edge is where that begins.
    """
    lines = [line.tobytes().decode("latin-1").rstrip() for line in screen]
    for last, line in enumerate(lines):
        left = len(line) - len(line.lstrip())
        if line.endswith("(end)"):
            left, text = line.rindex("(end)"), ""
        elif line.endswith("--More--"):
            text = line[: -len("--More--")]
            left = line.rindex("--More--") if not text.strip() else 0
        elif line.endswith(")") and " of " in line and line.rfind("(") >= 0:
            page = line[line.rindex("(") + 1 : -1].split(" of ")
            if len(page) != 2 or not all(p.isdigit() for p in page):
                continue
            left, text = line.rindex("("), ""
        else:
            continue
        body = [row[left:].rstrip() for row in lines[:last]] + [text[left:].rstrip()]
        return [row.strip() if left else row for row in body if row.strip()]
    return []


def page_of(screen: np.ndarray) -> tuple[int, int]:
    """Which page of how many a menu on the screen is at; (0, 0) if there is no menu, u8[24, 80]."""
    for line in screen:
        text = line.tobytes().decode("latin-1").rstrip()
        if text.endswith("(end)"):
            return 1, 1
        if match := re.search(r"\((\d+) of (\d+)\)$", text):
            return int(match[1]), int(match[2])
    return 0, 0


def tokens(text: str) -> int:
    """A cautious estimate of a text's tokens in a small vocabulary that splits numbers into digits."""
    count = 0
    for word in text.split():
        core = word.strip(".,;:!?\"'()")
        count += len(word) - len(core)
        count += 1 + len(core) if core.isdigit() else core.count("'") + max(1, -(-len(core) // 5))
    return count


def _named(name: str) -> str:
    """With an article, for the beginning of a sentence: "An apple", "The minotaur"."""
    return name[0].upper() + name[1:] if name.split()[0] in ("a", "an", "the") else f"The {name}"


def compact(
    stairs_wanted: bool, seen: Sequence[tuple[str, int, int]], open_ways: Sequence[str], said: str, limit: int
) -> str:
    """As much as `limit` tokens hold, in this order: the staircase down, the nearest things, what the game
    says, and where a step looks possible. With the staircase in sight only things that fit follow it."""
    stairs = [(r, c) for name, r, c in seen if name == "staircase down"]
    others = [
        f"{_named(n.partition(' (')[0])} is {where(r, c)}."
        for n, r, c in seen
        if n not in ("staircase down", "staircase up")
    ]
    free = f"Free: {', '.join(open_ways) or 'nowhere'}." if len(open_ways) < 8 else "Free: all ways."
    if stairs:
        sentences = [f"The staircase is {where(*stairs[0])}.", *others[:1]]
    elif stairs_wanted:
        sentences = ["No staircase in sight.", *others[:1], said, free]
    else:
        sentences = [*others[:1], said, *others[1:2], free]
    text = ""
    for sentence in filter(None, sentences):
        if not text or tokens(text) + tokens(sentence) <= limit:
            text = f"{text} {sentence}".strip()
    return text


# --- BALROG's layout (https://arxiv.org/abs/2411.13543), in the words of NLE's language wrapper -----------

_RENAMED = {"staircase down": "stairs down", "staircase up": "stairs up"}
_SIDES = (("", "north", "south"), ("", "east", "west"))  # by sign: 0, more, less


def _bearing(rows: int, columns: int) -> tuple[str, str]:
    """An offset as words for distance and direction: (-5, 2) is ("near", "northnortheast")."""
    far = max(abs(rows), abs(columns))
    distance = next(w for w, most in _DISTANCES if far <= most)
    diagonal = min(abs(rows), abs(columns))
    up, right = -rows, columns
    corner = _SIDES[0][(up > 0) - (up < 0)] + _SIDES[1][(right > 0) - (right < 0)] if diagonal else ""
    straight = ""
    if abs(up) > diagonal:
        straight = _SIDES[0][1 if up > 0 else 2]
    elif abs(right) > diagonal:
        straight = _SIDES[1][1 if right > 0 else 2]
    return distance, straight + corner


_DISTANCES = (("adjacent", 1), ("very near", 2), ("near", 5), ("far", 19), ("very far", 1000))
_ROSE: tuple[str, ...] = (
    *("north", "northnortheast", "northeast", "eastnortheast", "east", "eastsoutheast", "southeast"),
    *("southsoutheast", "south", "southsouthwest", "southwest", "westsouthwest", "west", "westnorthwest"),
    *("northwest", "northnorthwest"),
)


def balrog_seen(glyphs: np.ndarray, descriptions: np.ndarray, row: int, column: int) -> str:
    """Everything in sight, and walls and doorways along the eight directions, the farthest first."""
    kinds = _KIND.take(glyphs)
    kinds[row, column] = NOTHING
    spots = [(int(r), int(c)) for r, c in zip(*(kinds != NOTHING).nonzero(), strict=True)]
    for _, dr, dc in _AROUND:
        for step in range(1, 10):
            r, c = row + step * dr, column + step * dc
            if not (0 <= r < glyphs.shape[0] and 0 <= c < glyphs.shape[1]):
                break
            if kinds[r, c] == NOTHING and not _OPEN[glyphs[r, c]] and text_of(descriptions[r, c]):
                spots.append((r, c))
                break
    ways: dict[tuple[str, str], list[str]] = {}
    order = [word for word, _ in reversed(_DISTANCES)]
    placed = [(*_bearing(r - row, c - column), r, c) for r, c in spots]
    placed.sort(key=lambda p: (order.index(p[0]), _ROSE.index(p[1])))
    for distance, direction, r, c in placed:
        if name := text_of(descriptions[r, c]):
            ways.setdefault((_RENAMED.get(name, name), distance), []).append(direction)
    lines = []
    for (name, distance), directions in ways.items():
        once = [d for d in dict.fromkeys(directions) if directions.count(d) == 1]
        more = [d for d in dict.fromkeys(directions) if directions.count(d) > 1]
        lines += [f"{n} {distance} {_and(d)}" for n, d in ((name, once), (f"{name}s", more)) if d]
    return "\n".join(lines)


def _and(words: Sequence[str]) -> str:
    if len(words) < 3:
        return " and ".join(words)
    return f"{', '.join(words[:-1])}, and {words[-1]}"


def balrog_cursor(descriptions: np.ndarray, row: int, column: int, cursor: Sequence[int]) -> str:
    """Where the cursor is, i64[2] of the terminal, in words and in the terminal's coordinates."""
    at, x = int(cursor[0]) - 1, int(cursor[1])
    inside = 0 <= at < descriptions.shape[0] and 0 <= x < descriptions.shape[1]
    name = text_of(descriptions[at, x]) if inside else ""
    where_to = "Yourself a" if (at, x) == (row, column) else " ".join(_bearing(at - row, x - column))
    return f"{where_to} {name}".strip() + f"\n(x={x}, y={int(cursor[0])})"


def balrog_map(screen: np.ndarray) -> str:
    """The terminal without its first line, u8[24, 80]."""
    return "\n".join(line.tobytes().decode("latin-1") for line in screen[1:])

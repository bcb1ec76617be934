"""Action text to NetHack key. Pure; a test compares the table with NLE's own.

Outside a question an action is a word ("north", "go north", "pick up"), a compass abbreviation ("n", "ne"), a
name of NLE's enums ("CompassDirection.N", "Command.KICK", "KICK"), or "key" and the key itself ("key k",
"key ^d"). While the game asks something, it is an answer to that, or "escape":

* a letter that it offers, "yes", "no", "all", "quit"; a direction; any one key where it offers none;
* a line of text ("What do you want to write in the dust here?");
* letters of a menu's page, together: "a", "a c", "a, b and c"; then "next page", "previous page", "done";
* where something is to be pointed out, what moves the cursor ("north", "far west", "staircase down",
  "object"), and "here" to choose its place.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

ESCAPE = 27
_COMPASS = {
    "N": ("north", "k"),
    "E": ("east", "l"),
    "S": ("south", "j"),
    "W": ("west", "h"),
    "NE": ("northeast", "u"),
    "SE": ("southeast", "n"),
    "SW": ("southwest", "b"),
    "NW": ("northwest", "y"),
}
# Words of commands whose names alone would not do, the canonical one first. Others: the name in lower case.
_WORDS = {
    "EXTCMD": "extended command",
    "EXTLIST": "extended list",
    "CAST": "cast, zap spell, cast spell",
    "CHAT": "chat, talk",
    "DROPTYPE": "drop type",
    "ESC": "escape, cancel",
    "FIGHT": "fight, attack",
    "INVENTORY": "inventory, show inventory",
    "INVENTTYPE": "inventory type",
    "KNOWNCLASS": "known class",
    "LOOK": "look, look here",
    "MOVE": "move",
    "MOVEFAR": "move far",
    "PICKUP": "pick up, pickup, take, get, grab",
    "PUTON": "put on",
    "QUAFF": "quaff, drink",
    "RUSH2": "rush 2",
    "SEARCH": "search",
    "SEEALL": "see all",
    "SEEAMULET": "see amulet",
    "SEEARMOR": "see armor",
    "SEEGOLD": "see gold",
    "SEERINGS": "see rings",
    "SEESPELLS": "see spells",
    "SEETOOLS": "see tools",
    "SEETRAP": "see trap",
    "SEEWEAPON": "see weapon",
    "SHELL": "shell",
    "SWAP": "swap, swap weapons",
    "TAKEOFF": "take off",
    "TAKEOFFALL": "take off all",
    "TURN": "turn undead",
    "TWOWEAPON": "two weapon",
    "VERSIONSHORT": "version short",
    "WHATDOES": "what does",
    "WHATIS": "what is",
    "WIELD": "wield, equip",
    "WAIT": "wait, rest",
    "UP": "up, go up, upstairs, ascend",
    "DOWN": "down, go down, downstairs, descend",
    "MORE": "more, continue",
    "PREVMSG": "previous message",
}
# Keys as NetHack's documentation writes them: ^x is Control, M-x is Meta.
_KEYS = {
    "MiscDirection": "UP < DOWN > WAIT .",
    "MiscAction": "MORE ^m",
    "Command": """
        EXTCMD # EXTLIST M-? ADJUST M-a ANNOTATE M-A APPLY a ATTRIBUTES ^x AUTOPICKUP @ CALL C CAST Z CHAT
        M-c CLOSE c CONDUCT M-C DIP M-d DROP d DROPTYPE D EAT e ENGRAVE E ENHANCE M-e ESC ^[ FIGHT F FIRE f
        FORCE M-f GLANCE ; HISTORY V INVENTORY i INVENTTYPE I INVOKE M-i JUMP M-j KICK ^d KNOWN \\
        KNOWNCLASS ` LOOK : LOOT M-l MONSTER M-m MOVE m MOVEFAR M OFFER M-o OPEN o OPTIONS O OVERVIEW ^o PAY
        p PICKUP , PRAY M-p PUTON P QUAFF q QUIT M-q QUIVER Q READ r REDRAW ^r REMOVE R RIDE M-R RUB M-r
        RUSH g RUSH2 G SAVE S SEARCH s SEEALL * SEEAMULET " SEEARMOR [ SEEGOLD $ SEERINGS = SEESPELLS +
        SEETOOLS ( SEETRAP ^ SEEWEAPON ) SHELL ! SIT M-s SWAP x TAKEOFF T TAKEOFFALL A TELEPORT ^t THROW t
        TIP M-T TRAVEL _ TURN M-t TWOWEAPON X UNTRAP M-u VERSION M-v VERSIONSHORT v WEAR W WHATDOES & WHATIS
        / WIELD w WIPE M-w ZAP z""",
    "UnsafeActions": "HELP ? PREVMSG ^p",
    "TextCharacters": """PLUS + MINUS - APOS ' QUOTE " NUM_0 0 NUM_1 1 NUM_2 2 NUM_3 3 NUM_4 4 NUM_5 5 NUM_6 6
        NUM_7 7 NUM_8 8 NUM_9 9 DOLLAR $""",
}


def key(name: str) -> int:
    """The code of a key written as "k", "^d" or "M-p"."""
    if len(name) == 2 and name[0] == "^":
        return ord(name[1]) & 0x1F
    if len(name) == 3 and name[:2] == "M-":
        return ord(name[2]) | 0x80
    return ord(name)


@dataclass(frozen=True)
class Action:
    """One key of NetHack: its code, NLE's enum and name for it, and words for it, the canonical one first."""

    code: int
    enum: str
    name: str
    words: tuple[str, ...]


def _table() -> list[Action]:
    rows = []
    for name, (word, letter) in _COMPASS.items():
        ways = (word, f"go {word}", f"move {word}", f"walk {word}", f"step {word}", name.lower())
        rows.append(Action(key(letter), "CompassDirection", name, ways))
    for name, (word, letter) in _COMPASS.items():
        ways = (f"far {word}", f"run {word}", f"go far {word}", f"move far {word}")
        rows.append(Action(key(letter.upper()), "CompassDirectionLonger", name, ways))
    for enum, text in _KEYS.items():
        fields = text.split()
        for name, letter in zip(fields[::2], fields[1::2], strict=True):
            words = _WORDS.get(name, name.lower().replace("_", " "))
            rows.append(Action(key(letter), enum, name, tuple(w.strip() for w in words.split(","))))
    rows.append(Action(32, "TextCharacters", "SPACE", ("space",)))
    return rows


TABLE = _table()
_BY_CODE = {row.code: row for row in reversed(TABLE)}  # a key of several names goes by the first
CANONICAL = {code: row.words[0] for code, row in _BY_CODE.items()}
COMPASS = {word: key(letter) for word, letter in _COMPASS.values()}
_BY_TEXT: dict[str, int] = {}
for _row in TABLE:
    for _text in (*_row.words, f"{_row.enum}.{_row.name}".lower(), _row.name.lower().replace("_", " ")):
        _BY_TEXT.setdefault(_text, _row.code)
for _row in TABLE:  # the narrower enums that NLE merges into CompassDirection
    if _row.enum.startswith("CompassDirection"):
        _part = "Cardinal" if len(_row.name) == 1 else "Intercardinal"
        _enum = _row.enum.replace("Compass", "Compass" + _part)
        _BY_TEXT.setdefault(f"{_enum}.{_row.name}".lower(), _row.code)


def _tidy(text: str) -> str:
    """Lower case, blanks for "_" and "-", single blanks, without quotes around it or a final period."""
    text = text.strip().strip("`\"'").strip().rstrip(".!").lower()
    return " ".join(re.split(r"[\s_-]+", text)).strip()


def find(text: str) -> int | None:
    """The key of an action, whether or not it is allowed anywhere; None if the text is none."""
    if match := re.fullmatch(r"\s*key\s+(\^?\S|[Mm]-\S)\s*", text):
        name = match[1]
        code = key("M-" + name[2] if len(name) == 3 else name)
        return code if code in CANONICAL else None
    tidy = _tidy(text)
    if tidy in _BY_TEXT:
        return _BY_TEXT[tidy]
    return _BY_TEXT.get(text.strip().lower())  # names with "_" and "."


WIZARD = {"wish": 23, "identify": 9, "map level": 6, "create monster": 7, "level teleport": 22, "detect": 5}
"""Keys of NetHack's wizard mode, for custom levels that are played in it."""
for _text, _code in WIZARD.items():
    _BY_TEXT.setdefault(_text, _code)
    CANONICAL.setdefault(_code, _text)

# Commands whose menus are only to be read. (Those of others are answered.)
_READ = (
    *(
        "INVENTORY",
        "ATTRIBUTES",
        "CONDUCT",
        "KNOWN",
        "OVERVIEW",
        "VERSION",
        "VERSIONSHORT",
        "HISTORY",
        "EXTLIST",
    ),
    *("SEEALL", "SEEAMULET", "SEEARMOR", "SEEGOLD", "SEERINGS", "SEESPELLS", "SEETOOLS", "SEEWEAPON"),
)
READING = frozenset(row.code for row in TABLE if row.name in _READ)
PREFIXES = frozenset(map(ord, "FmMgG"))  # fight, move, move far, rush, rush 2: a direction follows
ENTER = 13
_CURSOR = (
    *((word, ord(letter)) for word, letter in _COMPASS.values()),
    *((f"far {word}", ord(letter.upper())) for word, letter in _COMPASS.values()),
    *(("staircase down", ord(">")), ("staircase up", ord("<")), ("monster", ord("m")), ("object", ord("o"))),
    *(("door", ord("d")), ("altar", ord("_")), ("self", ord("@")), ("here", ord("."))),
)
CHOOSES = frozenset(map(ord, ".,;:")) | {ESCAPE}  # keys that end the pointing out of something


@dataclass(frozen=True)
class Question:
    """What the game waits for: its text, and the answers it takes, as (word, key code); none: any action.

    `kind` is "choice", "key" (any one key), "line", "menu" or "position".
    """

    text: str
    answers: tuple[tuple[str, int], ...]
    kind: str = "choice"

    @property
    def words(self) -> list[str]:
        return [word for word, _ in self.answers]


_CHOICES = re.compile(r"\[([^\]]+)\]")


ANY = range(256)  # every key


def menu(lines: Sequence[str], page: int, pages: int) -> Question | None:
    """The question that a menu's page is; None if nothing in it can be chosen."""
    letters = [m[1] for m in (re.match(r"([a-zA-Z]) [-+#] ", line) for line in lines) if m]
    if not letters:
        return None
    answers = [(letter, ord(letter)) for letter in letters]
    answers += [("next page", ord(">"))] if page < pages else []
    answers += [("previous page", ord("<"))] if page > 1 else []
    return Question("\n".join(lines), (*answers, ("done", ENTER), ("escape", ESCAPE)), "menu")


def position(text: str, own: Collection[int]) -> Question:
    """The question where something is; `own` are the keys that may be used."""
    answers = [(word, code) for word, code in _CURSOR if code in own]
    return Question(text, (*answers, ("escape", ESCAPE)), "position")


def line(text: str) -> Question:
    """The question for a line of text."""
    return Question(text.strip(), (("escape", ESCAPE),), "line")


def question(text: str, own: Collection[int]) -> Question:
    """The answers to a question that can be given with a type's own keys; "escape" always can.

    `text` is the game's line: "In what direction?", "What do you want to zap? [f or ?*]",
    "Really attack? [yn] (n)".
    """
    text = text.strip()
    if re.search(r"in what direction|direction\?", text, re.IGNORECASE):
        answers = [(word, code) for word, code in COMPASS.items() if code in own]
        answers += [(w, key(k)) for w, k in (("up", "<"), ("down", ">"), ("here", ".")) if key(k) in own]
    elif match := _CHOICES.search(text):
        letters = _expand(match[1].removesuffix(" or ?*").removesuffix("or ?*"))
        if match[1] in ("yn", "ynq", "ynaq", "yn#aq"):
            names = {"y": "yes", "n": "no", "q": "quit", "a": "all", "#": "#"}
            answers = [(names[c], ord(c)) for c in letters if ord(c) in own]
        else:
            answers = [(c, ord(c)) for c in letters if ord(c) in own]
    elif own is ANY:
        return Question(text, (("escape", ESCAPE),), "key")
    else:
        return Question(text, ())
    return Question(text, (*answers, ("escape", ESCAPE)))


def _expand(choices: str) -> Sequence[str]:
    """ "- a-d" -> - a b c d."""
    letters: list[str] = []
    for part in choices.split():
        while match := re.search(r"(\w)-(\w)", part):
            run = "".join(map(chr, range(ord(match[1]), ord(match[2]) + 1)))
            part = part[: match.start()] + run + part[match.end() :]
        letters += part
    return list(dict.fromkeys(letters))


def answer(text: str, asked: Question) -> tuple[str, tuple[int, ...]] | None:
    """Which of a question's answers the text is, as (words, key codes); None if it is none of them."""
    if _tidy(text) == "escape":
        return "escape", (ESCAPE,)
    if asked.kind == "line":
        said = text.strip()
        if not said or len(said) > 200 or not said.isascii() or not said.isprintable():
            return None
        return said, (*map(ord, said), ENTER)
    if asked.kind == "menu":
        return _choice(text, dict(asked.answers))
    if (found := _one(text, asked)) is not None:
        return found[0], (found[1],)
    if asked.kind == "key":
        said = text.strip()
        if len(said) == 1 and said.isascii() and said.isprintable():
            return said, (ord(said),)
        code = find(text)
        return None if code is None else (CANONICAL[code], (code,))
    return None


def _choice(text: str, codes: Mapping[str, int]) -> tuple[str, tuple[int, ...]] | None:
    """Letters of a menu, and what is to follow: by default, that nothing more is chosen."""
    rest = re.sub(
        r"\b(next|previous) page\b", lambda m: {"n": ">", "p": "<"}[m[1][0]], text.strip().rstrip(".")
    )
    words = [w for w in re.split(r"[\s,]+", rest) if w not in ("", "and", "select", "choose")]
    names = {">": "next page", "<": "previous page"}
    said = [names.get(word, word) for word in words]
    if not said or any(word not in codes for word in said):
        return None
    turns = said[-1] in ("next page", "previous page", "done")
    return ", ".join(said), (*(codes[word] for word in said), *(() if turns else (ENTER,)))


def _one(text: str, asked: Question) -> tuple[str, int] | None:
    exact = text.strip().strip("`\"'")
    tidy = _tidy(text)
    codes = {code: word for word, code in asked.answers}
    if len(exact) == 1 and ord(exact) in codes and not any(word in COMPASS for word in asked.words):
        return codes[ord(exact)], ord(exact)  # a letter as it is: "a" is not "A"
    for word, code in asked.answers:
        if tidy == word.lower() and (len(word) > 1 or len(exact) > 1):
            return word, code
    code = find(text)
    if code is not None and code in codes and len(codes[code]) > 1:
        return codes[code], code
    return None

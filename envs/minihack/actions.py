"""Action text to NetHack key. Pure; a test compares the table with NLE's own.

Outside a question an action is a word ("north", "go north", "pick up"), a compass abbreviation ("n", "ne"), a
name of NLE's enums ("CompassDirection.N", "Command.KICK", "KICK"), or "key" and the key itself ("key k",
"key ^d"). While the game asks for a letter or yes/no, it is one of the letters it offers, "yes", "no" or
"escape"; while it asks for a direction, a direction or "escape".
"""

import re
from collections.abc import Collection, Sequence
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


@dataclass(frozen=True)
class Question:
    """What the game waits for: its text, and the answers it takes, as (word, key code); none: any action."""

    text: str
    answers: tuple[tuple[str, int], ...]

    @property
    def words(self) -> list[str]:
        return [word for word, _ in self.answers]


_CHOICES = re.compile(r"\[([^\]]+)\]")


def question(text: str, own: Collection[int]) -> Question:
    """The answers to a question that can be given with a type's own keys; "escape" always can.

    `text` is the game's line: "In what direction?", "What do you want to zap? [f or ?*]",
    "Really attack? [yn] (n)".
    """
    text = text.strip()
    if "direction?" in text:
        answers = [(word, code) for word, code in COMPASS.items() if code in own]
        answers += [(w, key(k)) for w, k in (("up", "<"), ("down", ">"), ("here", ".")) if key(k) in own]
    elif match := _CHOICES.search(text):
        letters = _expand(match[1].removesuffix(" or ?*").removesuffix("or ?*"))
        if match[1] in ("yn", "ynq", "ynaq", "yn#aq"):
            names = {"y": "yes", "n": "no", "q": "quit", "a": "all", "#": "#"}
            answers = [(names[c], ord(c)) for c in letters if ord(c) in own]
        else:
            answers = [(c, ord(c)) for c in letters if ord(c) in own]
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


def answer(text: str, asked: Question) -> tuple[str, int] | None:
    """Which of a question's answers the text is, as (word, key code); None if it is none of them."""
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

"""JSON bodies that go on from each other: of each, only what is new is parsed.

A program sends its whole conversation with every request. A `Reader` keeps the last body as text, with the
places where its messages end; of a body that begins with the same characters it parses what follows them. It
returns what `json.loads` does, with the very objects of last time for the messages that came again. Where a
body is not written as programs write it, `json.loads` reads it.
"""

import json
import re
from dataclasses import dataclass, replace
from typing import Any

_LISTS = ("messages", "input")  # what grows from request to request
_OPEN = re.compile(r"[ \t\n\r]*\{")
_KEY = re.compile(r'[ \t\n\r]*"([^"\\\x00-\x1f]*)"[ \t\n\r]*:[ \t\n\r]*')
_NEXT = re.compile(r"[ \t\n\r]*([,\]}])[ \t\n\r]*")
_value = json.JSONDecoder().raw_decode


@dataclass(frozen=True)
class _Body:
    text: str  # up to the end of the last item
    values: dict[str, Any]  # what stands before the list
    name: str  # of the list
    items: list[Any]  # objects: they end where they end, whatever follows
    ends: list[int]  # of the items


class Reader:
    """Reads the bodies of one conversation after the other."""

    def __init__(self):
        self._last: _Body | None = None

    def read(self, raw: bytes) -> Any:
        """What `json.loads` makes of it. Raises ValueError or RecursionError as it does."""
        text = raw.decode(json.detect_encoding(raw), "surrogatepass")
        try:
            return self._read(text)
        except ValueError:  # it is written in another way, or no JSON at all
            return json.loads(text)

    def _read(self, text: str) -> dict[str, Any]:
        last, more = self._last, True
        same = 0 if last is None else _same(text, last)
        if last is not None and same:
            body = _Body("", last.values, last.name, last.items[:same], last.ends[:same])
            values = {**body.values, body.name: body.items}
            at, more = _behind(text, _items(text, body.ends[-1], body), "}")
        else:
            body, values = None, {}
            if (opened := _OPEN.match(text)) is None:
                raise ValueError("no object")
            at = opened.end()
        while more:
            if (key := _KEY.match(text, at)) is None:
                raise ValueError("no plain key")
            name, at = key[1], key.end()
            if body is None and name in _LISTS and text.startswith("[{", at):
                body = _Body("", dict(values), name, [], [])
                values[name] = body.items
                at = _items(text, at + 1, body)
            else:
                values[name], at = _value(text, at)
            at, more = _behind(text, at, "}")
        if at != len(text):
            raise ValueError("more than an object")
        self._last = None if body is None else replace(body, text=text[: body.ends[-1]])
        return values


def _items(text: str, at: int, body: _Body) -> int:
    """Reads the list's objects from `at` on; returns the place behind the list."""
    more = True
    if body.items:
        at, more = _behind(text, at, "]")
    while more:
        if not text.startswith("{", at):
            raise ValueError("not an object")
        item, at = _value(text, at)
        body.items.append(item)
        body.ends.append(at)
        at, more = _behind(text, at, "]")
    return at


def _behind(text: str, at: int, end: str) -> tuple[int, bool]:
    """(the place behind what follows a value, whether that is a comma)."""
    found = _NEXT.match(text, at)
    if found is None or found[1] not in (",", end):
        raise ValueError(f"neither a comma nor {end}")
    return found.end(), found[1] == ","


def _same(text: str, last: _Body) -> int:
    """How many of the last items this text has too, in the same place, with all before them the same."""
    if text.startswith(last.text):  # most often it has all of them
        return len(last.ends)
    low, high, at = 0, len(last.ends) - 1, 0
    while low < high:
        middle = (low + high + 1) // 2
        end = last.ends[middle - 1]
        if text[at:end] == last.text[at:end]:
            low, at = middle, end
        else:
            high = middle - 1
    return low

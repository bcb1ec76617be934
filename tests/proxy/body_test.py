"""Bodies that go on from each other are read as `json.loads` reads them, and what came before is the same."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from metagym.proxy.body import Reader

LEAVES = (
    st.none() | st.booleans() | st.integers(-9, 10**20) | st.floats(allow_nan=False) | st.text(max_size=9)
)
VALUES = st.recursive(
    LEAVES, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=3), v, max_size=3)
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.sampled_from("ab"), "content": VALUES}), max_size=5)
MOVES = st.tuples(st.sampled_from(["go on", "edit", "drop", "turn", "other"]), st.integers(0, 9), MESSAGES)
STYLES = st.fixed_dictionaries(
    {
        "ensure_ascii": st.booleans(),
        "separators": st.sampled_from([None, (",", ":"), (" , ", " : ")]),
        "indent": st.sampled_from([None, None, None, 1]),
    }
)


def same(a, b):
    """Equal, 1 and 1.0 and True told apart."""
    return json.dumps(a) == json.dumps(b)


@settings(max_examples=300, deadline=None)
@given(
    moves=st.lists(MOVES, max_size=6), before=VALUES, behind=VALUES,
    name=st.sampled_from(["messages", "input"]), style=STYLES,
)  # fmt: skip
def test_any_conversation_is_read_as_json_reads_it(moves, before, behind, name, style):
    reader, talk = Reader(), [{"role": "a", "content": "first"}]
    for move, which, new in moves:
        if move == "go on":
            talk = [*talk, *new]
        elif move == "edit" and talk:
            talk = [*talk[: which % len(talk)], *new, *talk[which % len(talk) + 1 :]]
        elif move == "drop":
            talk = talk[: which % (len(talk) + 1)]
        elif move == "turn":
            talk = talk[::-1]
        elif move == "other":
            before, behind = behind, new
        raw = json.dumps({"model": before, name: talk, "tools": behind}, **style).encode()
        assert same(reader.read(raw), json.loads(raw))
        assert same(reader.read(raw), json.loads(raw)), "the same again"


ONE = b'{"model": "m", "messages": [{"role": "user", "content": "\xc3\xa9"}, {"n": 1}], "stream": true}'


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, len(ONE)), cut=st.integers(0, 4), put=st.binary(max_size=3), known=st.booleans())
@example(at=len(ONE) - 1, cut=0, put=b",", known=True)  # a comma before the end
@example(at=len(ONE), cut=0, put=b"{}", known=True)  # something after it
@example(at=ONE.index(b', {"n'), cut=1, put=b"", known=True)  # no comma between two items
@example(at=2, cut=5, put=b"input", known=False)
@example(at=2, cut=5, put=b"messages", known=True)  # the same key twice: the last one counts
def test_what_json_refuses_is_refused(at, cut, put, known):
    raw = ONE[:at] + put + ONE[at + cut :]
    reader = Reader()
    if known:
        reader.read(ONE)
    try:
        expected = json.loads(raw)
    except ValueError as error:
        with pytest.raises(type(error)):
            reader.read(raw)
    else:
        assert same(reader.read(raw), expected)
    assert same(reader.read(ONE), json.loads(ONE)), "and nothing of it stays"


def test_known_messages_are_the_same_objects():
    reader, talk = Reader(), [{"n": i} for i in range(9)]
    first = reader.read(json.dumps({"tools": [1], "messages": talk[:6]}).encode())
    longer = reader.read(json.dumps({"tools": [1], "messages": talk, "stream": True}).encode())
    assert all(a is b for a, b in zip(first["messages"], longer["messages"], strict=False))
    assert longer["tools"] is first["tools"]
    assert (len(first["messages"]), len(longer["messages"])) == (6, 9)
    edited = reader.read(json.dumps({"tools": [1], "messages": [*talk[:4], {"n": 44}, *talk[5:]]}).encode())
    assert [a is b for a, b in zip(longer["messages"], edited["messages"], strict=True)].count(True) == 4
    for deep in (b"[" * 10**5, b'{"messages":[{"a":' + b"[" * 10**5):
        with pytest.raises((RecursionError, ValueError)):
            reader.read(deep)

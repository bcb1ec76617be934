"""Action text to keys: pure, apart from the comparison with NLE's own names."""

import warnings

import pytest

from metagym.envs.minihack import actions

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from nle.nethack import actions as nle_actions

MOVES = frozenset(actions.COMPASS.values())


def test_every_name_of_nle_is_an_action_with_nles_key():
    enums = ("CompassDirection", "CompassDirectionLonger", "CompassCardinalDirection", "UnsafeActions")
    enums += (
        "CompassIntercardinalDirectionLonger",
        "MiscDirection",
        "MiscAction",
        "Command",
        "TextCharacters",
    )
    for enum in enums:
        for member in getattr(nle_actions, enum):
            assert actions.find(f"{enum}.{member.name}") == member.value, member


def test_canonical_words_are_unique_and_found():
    assert len(set(actions.CANONICAL.values())) == len(actions.CANONICAL)
    assert {code: actions.find(word) for code, word in actions.CANONICAL.items()} == {
        code: code for code in actions.CANONICAL
    }


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("north", "k"),
        ("  NORTH. ", "k"),
        ("go north", "k"),
        ("`move North`", "k"),
        ("n", "k"),
        ("N", "k"),
        ("s", "j"),
        ("nw", "y"),
        ("far east", "L"),
        ("search", "s"),
        ("pick up", ","),
        ("pick_up", ","),
        ("PICKUP", ","),
        ("Command.KICK", "^d"),
        ("command.pray", "M-p"),
        ("drink", "q"),
        ("key k", "k"),
        ("key K", "K"),
        ("key ^d", "^d"),
        ("key M-p", "M-p"),
        ("wait", "."),
    ],
)
def test_find(text, key):
    assert actions.find(text) == actions.key(key)


@pytest.mark.parametrize("text", ["", " ", "k", "north east", "fly", "key", "key §", "n\x00", "0x6b", "北"])
def test_find_refuses_what_is_no_action(text):
    assert actions.find(text) is None


def test_questions_offer_the_answers_that_own_keys_can_give():
    asked = actions.question("What do you want to zap? [f or ?*] ", [*MOVES, ord("f"), ord("z")])
    assert asked.words == ["f", "escape"]
    assert actions.answer("f", asked) == ("f", (ord("f"),))
    assert actions.answer("escape", asked) == actions.answer("Command.ESC", asked) == ("escape", (27,))
    assert actions.answer("fire", asked) is None
    assert actions.answer("z", asked) is None
    asked = actions.question("What do you want to drop? [$a-cG or ?*]", [ord(c) for c in "abGcd"])
    assert asked.words == ["a", "b", "c", "G", "escape"]
    assert actions.answer("g", asked) is None


def test_yes_and_no():
    asked = actions.question("Really attack the peaceful gnome? [yn] (n) ", MOVES)
    assert asked.words == ["yes", "no", "escape"]
    assert actions.answer("Yes", asked) == actions.answer("y", asked) == ("yes", (ord("y"),))
    assert actions.answer("n", asked) == ("no", (ord("n"),))  # not north
    assert actions.answer("north", asked) is None


def test_directions():
    asked = actions.question("In what direction? ", MOVES)
    assert actions.answer("n", asked) == actions.answer("go north", asked) == ("north", (ord("k"),))
    assert actions.answer("key n", asked) == ("southeast", (ord("n"),))
    assert actions.answer("kick", asked) is None
    assert "escape" in asked.words
    asked = actions.question("Talk to whom? (in what direction)", actions.ANY)
    assert actions.answer("up", asked) == ("up", (ord("<"),))


def test_a_question_without_answers_takes_any_key():
    asked = actions.question("What command?", actions.ANY)
    assert asked.kind == "key"
    assert actions.answer("x", asked) == ("x", (ord("x"),))
    assert actions.answer("kick", asked) == ("kick", (4,))
    assert actions.answer("xy", asked) is None
    assert actions.question("What command?", MOVES).answers == ()


def test_a_line_of_text():
    asked = actions.line("For what do you wish? ")
    assert actions.answer(" 2 apples ", asked) == ("2 apples", (*map(ord, "2 apples"), 13))
    assert actions.answer("escape", asked) == ("escape", (27,))
    for bad in ("", " ", "x" * 201, "ä", "a\nb"):
        assert actions.answer(bad, asked) is None


def test_menus():
    lines = ["Pick up what?", "Food", "a - an apple", "B + 2 pears", "not - one"]
    asked = actions.menu(lines, 1, 2)
    assert asked is not None
    assert asked.words == ["a", "B", "next page", "done", "escape"]
    codes = {
        "a": (97, 13),
        "a B": (97, 66, 13),
        "a, B and a.": (97, 66, 97, 13),
        "done": (13,),
        "a done": (97, 13),
    }
    codes |= {"next page": (62,), "a, next page": (97, 62), "escape": (27,)}
    for text, keys in codes.items():
        found = actions.answer(text, asked)
        assert found is not None
        assert found[1] == keys
    for bad in ("", "b", "aB", "previous page", "pick up a"):
        assert actions.answer(bad, asked) is None
    second = actions.menu(lines, 2, 2)
    assert second is not None
    assert "previous page" in second.words
    assert actions.menu(["Weapons", "nothing here"], 1, 1) is None


def test_places():
    asked = actions.position("Where?", actions.ANY)
    for text, letter in (
        ("north", "k"),
        ("far west", "H"),
        ("staircase down", ">"),
        ("here", "."),
        ("self", "@"),
    ):
        assert actions.answer(text, asked) == (text, (ord(letter),))
    assert actions.position("Where?", MOVES).words[-2:] == ["northwest", "escape"]

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
    assert actions.answer("f", asked) == ("f", ord("f"))
    assert actions.answer("escape", asked) == actions.answer("Command.ESC", asked) == ("escape", 27)
    assert actions.answer("fire", asked) is None
    assert actions.answer("z", asked) is None
    asked = actions.question("What do you want to drop? [$a-cG or ?*]", [ord(c) for c in "abGcd"])
    assert asked.words == ["a", "b", "c", "G", "escape"]
    assert actions.answer("g", asked) is None


def test_yes_and_no():
    asked = actions.question("Really attack the peaceful gnome? [yn] (n) ", MOVES)
    assert asked.words == ["yes", "no", "escape"]
    assert actions.answer("Yes", asked) == actions.answer("y", asked) == ("yes", ord("y"))
    assert actions.answer("n", asked) == ("no", ord("n"))  # not north
    assert actions.answer("north", asked) is None


def test_directions():
    asked = actions.question("In what direction? ", MOVES)
    assert actions.answer("n", asked) == actions.answer("go north", asked) == ("north", ord("k"))
    assert actions.answer("key n", asked) == ("southeast", ord("n"))
    assert actions.answer("kick", asked) is None
    assert "escape" in asked.words

import numpy as np
import pytest

from metagym.agents import reflector
from metagym.agents.follower import follow, possible, support
from metagym.agents.reflector import parse
from metagym.types import Message

DOORS = ["open the red door", "open the blue door", "open the green door"]


@pytest.mark.parametrize(
    ("advice", "scores"),
    [
        ("", [0, 0, 0]),
        ("Open the red door.", [1, 0, 0]),
        ("The one that is RED!", [1, 0, 0]),
        ("I would try green, since all the others lie", [0, 0, 1]),
        ("red or blue", [1, 1, 0]),
        ("Do not open the red door.", [-1, 0, 0]),
        ("Avoid blue. Take green.", [0, -1, 1]),
        ("Never red, but green.", [-1, 0, 1]),
        ("red. red. blue", [2, 1, 0]),
        ("Open the door.", [0, 0, 0]),
    ],
)
def test_what_advice_speaks_for(advice, scores):
    assert support(advice, DOORS) == scores


def test_pairs_and_orders():
    keys = ["turn iron in oak", "turn iron in elm", "turn gold in oak", "turn gold in elm"]
    assert support("the iron key, and the oaken... I mean oak lock", keys) == [1.0, 0.5, 0.5, 0.0]
    drums = ["beat high then low", "beat low then high"]
    assert support("first high, after that low", drums) == [1.0, 0.5]


def asked(*said, system=None):
    start = [Message("system", system)] if system else []
    turns = [Message("user" if i % 2 == 0 else "assistant", text) for i, text in enumerate(said)]
    return (*start, *turns)


SEEN = "Three doors.\n\nPossible actions: " + ", ".join(DOORS)
WRONG = "Wrong.\n\nPossible actions: " + ", ".join(DOORS)


def test_it_does_what_it_is_told_and_guesses_otherwise():
    assert {follow(asked(SEEN, system="green, please"), seed) for seed in range(20)} == {DOORS[2]}
    counts = np.bincount([DOORS.index(follow(asked(SEEN), seed)) for seed in range(600)])
    assert counts.min() > 150  # 200 each, give or take
    assert {follow(asked(SEEN, system="not the red one"), s) for s in range(40)} == set(DOORS[1:])


def test_advice_that_was_refused_is_dropped():
    after = asked(SEEN, DOORS[2], WRONG, system="green, please")
    assert {follow(after, seed) for seed in range(40)} == set(DOORS[:2])
    right = asked(SEEN, DOORS[2], WRONG.replace("Wrong", "Right"), system="green, please")
    assert {follow(right, seed) for seed in range(20)} == {DOORS[2]}


def test_useless_prompts_have_the_same_luck():
    one, other = asked(SEEN, system="Good luck."), asked(SEEN, system="Be yourself.")
    assert [follow(one, s) for s in range(30)] == [follow(other, s) for s in range(30)]


def test_actions_must_be_listed():
    with pytest.raises(ValueError, match="lists no actions"):
        possible("Three doors.")


def test_the_reflector_reads_and_writes():
    agent = reflector("It plays games.", prefix="Advice:")
    text = agent.prompt("System prompt: (none)\n\nEpisode 1 ...", {}, 3)
    assert text.startswith("It plays games.\n\nSystem prompt: (none)")
    assert "<prompt>" in text
    assert agent.parse("Advice: <prompt>Be good.</prompt> ") == "<prompt>Be good.</prompt>"
    assert parse("\n  Be good.\nReally.", one_line=True) == "Be good."
    assert parse("  ", one_line=True) == ""
    assert reflector(format="").prompt("seen", {}, 0) == "seen"

"""The interpreter against recorded transcripts of TextWorld and rule by rule in a small room; the planner."""

import gzip
import hashlib
import itertools
import json
import os
from collections import deque
from pathlib import Path

import pytest

from metagym.envs.alfworld import game as games
from metagym.envs.alfworld import generate, plan
from metagym.envs.alfworld.game import BadGame, Goal
from metagym.envs.alfworld.native import NOTHING, Play
from metagym.testing import BAD_ACTIONS

TRANSCRIPTS = Path(__file__).with_name("data") / "alfworld_transcripts.jsonl.gz"
SHARED = Path(os.environ.get("METAGYM_SHARED", Path(__file__).parents[3] / "shared"))

# --- recorded transcripts ------------------------------------------------------------------------------


def transcripts():
    with gzip.open(TRANSCRIPTS, "rt") as lines:
        return [json.loads(line) for line in lines]


def test_the_transcripts_cover_all_types_and_commands():
    rows = transcripts()
    kinds = [row["task"].partition(":")[0] for row in rows]
    assert {k: kinds.count(k) >= 20 for k in games.TYPES} == dict.fromkeys(games.TYPES, True)
    done = [
        command.split()[0]
        for row in rows
        for command, (text, _, _) in zip(row["commands"], row["answers"][1:], strict=True)
        if text != NOTHING
    ]
    verbs = {"go", "take", "move", "open", "close", "examine", "use", "heat", "cool", "clean", "slice"}
    assert {v for v in verbs | {"look", "inventory", "help"} if done.count(v) < 5} == set()
    texts = " ".join(text for row in rows for text, _, _ in row["answers"])
    for phrase in ("Next to it, you see a ", "sliced", "This is a normal", "cold", "hot", "clean"):
        assert phrase in texts
    assert TRANSCRIPTS.stat().st_size < 300_000


def test_the_interpreter_says_what_textworld_said():
    steps = 0
    for row in transcripts():
        kind, _, number = row["task"].partition(":")
        play = Play(generate.game(kind, int(number)))
        for command, answer in zip([None, *row["commands"]], row["answers"], strict=True):
            text = play.reset() if command is None else play.step(command)
            assert [text, play.admissible(), play.won()] == answer, (row["task"], command)
            steps += 1
    assert steps > 3000


def test_what_is_admissible_does_something_and_nothing_else_does():
    for kind in games.TYPES:
        play = Play(generate.game(kind, 77))
        play.reset()
        names = (*play.game.objects, *play.game.receptacles)
        for turn in range(25):
            admissible = play.admissible()
            assert admissible == sorted(set(admissible))
            for verb in ("go to", "open", "close", "examine", "use"):
                for name in names:
                    command = f"{verb} {name}"
                    if command not in admissible:
                        assert play.step(command) == NOTHING, command
            assert play.step(admissible[turn * 7 % len(admissible)]) != NOTHING


@pytest.mark.parametrize("command", [*BAD_ACTIONS, "go to", "take", "look ", "Look", "go to  shelf 1", "inv"])
def test_nonsense_is_answered_and_changes_nothing(command):
    play = Play(generate.game(games.TYPES[0], 0))
    play.reset()
    before = play.admissible()
    expected = "You are in the middle of a room." if command.strip() == "look" else NOTHING
    assert play.step(command).startswith(expected)
    assert play.admissible() == before


# --- a room of our own ---------------------------------------------------------------------------------


def room(goal="pick_and_place_simple", target="mug", place="shelf", facts=(), objects=()):
    """Shelves 1 and 2 at one place, fridge, microwave, sink basin, desk; mugs, an apple, a knife, a lamp."""
    receptacles = {
        "shelf_bar_b": ("shelf", "a"),
        "shelf_bar_a": ("shelf", "a"),
        "fridge_bar_a": ("fridge", "b"),
        "microwave_bar_a": ("microwave", "c"),
        "sink_bar_a_bar_sinkbasin": ("sinkbasin", "d"),
        "desk_bar_a": ("desk", "e"),
    }
    things = {
        "mug_bar_a": ("mug", "fridge_bar_a"),
        "mug_bar_b": ("mug", "desk_bar_a"),
        "apple_bar_a": ("apple", "desk_bar_a"),
        "knife_bar_a": ("knife", "shelf_bar_a"),
        "desklamp_bar_a": ("desklamp", "desk_bar_a"),
    }
    declared = ["agent1 - agent", "loc_bar_start - location"]
    declared += [f"loc_bar_{c} - location" for c in "abcde"] + [f"{r} - receptacle" for r in receptacles]
    declared += [f"{o} - object" for o in things] + [
        f"{kind}Type - rtype" for kind, _ in receptacles.values()
    ]
    declared += [f"{kind}Type - otype" for kind, _ in things.values()] + list(objects)
    atoms = ["atLocation agent1 loc_bar_start", "openable fridge_bar_a", "toggleable desklamp_bar_a"]
    for r, (kind, where) in receptacles.items():
        atoms += [f"receptacleType {r} {kind}Type", f"receptacleAtLocation {r} loc_bar_{where}"]
        atoms += [f"canContain {kind}Type {t}Type" for t in ("mug", "apple", "knife")]
    for o, (kind, r) in things.items():
        atoms += [f"objectType {o} {kind}Type", f"inReceptacle {o} {r}"]
        atoms += [f"objectAtLocation {o} loc_bar_{receptacles[r][1]}"]
        atoms += [f"pickupable {o}"] if kind != "desklamp" else []
    for flag in ("cleanable", "heatable", "coolable", "sliceable"):
        atoms += [f"{flag} {o}" for o in ("mug_bar_a", "mug_bar_b", "apple_bar_a")]
    atoms += facts
    formula = generate._GOAL[goal].replace("{target}", target).replace("{place}", place)
    return (
        "(define (problem room)\n(:domain alfred)\n(:objects\n"
        + "\n".join(declared)
        + "\n)\n(:init\n"
        + "\n".join(f"({a})" for a in atoms)
        + f"\n)\n(:goal\n{formula}\n)\n)\n"
    )


def play(goal="pick_and_place_simple", target="mug", place="shelf", **kwargs):
    sentence = games.SENTENCES[goal][0].format(target=target, place=place)
    game = Play(games.compile(room(goal, target, place, **kwargs), sentence))
    game.reset()
    return game


def said(game, *commands):
    return [game.step(command) for command in commands][-1]


def test_the_first_observation_and_the_numbers_of_names():
    game = Play(games.compile(room(), "put a mug in shelf."))
    assert game.reset() == (
        "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, "
        "you see a desk 1, a fridge 1, a microwave 1, a shelf 2, a shelf 1, and a sinkbasin 1.\n\n"
        "Your task is to: put a mug in shelf."
    )
    assert (
        game.step("look") == "You are in the middle of a room. Looking quickly around you, you see nothing."
    )


def test_places_that_are_one():
    game = play()
    assert said(game, "go to shelf 1") == "You arrive at shelf 1. On the shelf 1, you see nothing."
    assert said(game, "go to shelf 2") == NOTHING
    assert said(game, "look") == "You are facing the shelf 2, and shelf 1. Next to it, you see nothing."
    said(game, "take knife 1 from shelf 2", "move knife 1 to shelf 1")
    assert said(game, "look") == "You are facing the shelf 2, and shelf 1. Next to it, you see a knife 1."
    said(game, "take knife 1 from shelf 1", "move knife 1 to shelf 2")
    assert said(game, "examine shelf 2") == "On the shelf 2, you see a knife 1."
    assert said(game, "look") == "You are facing the shelf 2, and shelf 1. Next to it, you see a knife 1."


def test_doors():
    game = play()
    assert said(game, "go to fridge 1") == "You arrive at fridge 1. The fridge 1 is closed."
    assert said(game, "take mug 2 from fridge 1") == NOTHING
    assert (
        said(game, "open fridge 1") == "You open the fridge 1. The fridge 1 is open. In it, you see a mug 2."
    )
    assert said(game, "open fridge 1") == NOTHING
    assert said(game, "take mug 2 from fridge 1") == "You pick up the mug 2 from the fridge 1."
    assert said(game, "close fridge 1") == "You close the fridge 1."
    assert said(game, "move mug 2 to fridge 1") == NOTHING
    assert said(game, "cool mug 2 with fridge 1") == "You cool the mug 2 using the fridge 1."
    assert said(game, "examine mug 2") == "This is a cold mug 2."


def test_states_and_their_words():
    game = play()
    said(game, "go to desk 1", "take apple 1 from desk 1")
    assert said(game, "inventory") == "You are carrying: a apple 1."
    assert said(game, "examine apple 1") == "There's nothing special about apple 1."
    assert said(game, "go to microwave 1", "heat apple 1 with microwave 1", "examine apple 1") == (
        "This is a hot apple 1."
    )
    assert said(game, "go to sinkbasin 1", "clean apple 1 with sinkbasin 1", "examine apple 1") == (
        "This is a hot and clean apple 1."
    )
    assert said(game, "go to fridge 1", "cool apple 1 with fridge 1", "examine apple 1") == (
        "This is a cool and clean apple 1."
    )
    said(game, "go to shelf 2", "move apple 1 to shelf 2", "take knife 1 from shelf 2")
    assert said(game, "slice apple 1 with knife 1") == "You sliced the apple 1 with the knife 1."
    said(game, "move knife 1 to shelf 1", "take apple 1 from shelf 2")
    assert said(game, "examine apple 1") == "This is a cool and clean sliced apple 1."
    assert said(game, "examine knife 1") == NOTHING  # not held


def test_whatever_is_used_is_turned_on():
    game = play()
    said(game, "go to desk 1")
    assert said(game, "use desklamp 1") == said(game, "use desklamp 1") == "You turn on the desklamp 1."
    assert said(game, "use mug 1") == NOTHING


def test_progress():
    game = play("pick_heat_then_place_in_recep")
    steps = ["go to desk 1", "take mug 1 from desk 1", "go to microwave 1", "heat mug 1 with microwave 1"]
    steps += ["go to shelf 1", "move mug 1 to shelf 1"]
    assert [(game.step(s), game.progress())[1] for s in steps] == [0, 0, 0, 0.5, 0.5, 1]
    assert game.won()
    game = play("pick_heat_then_place_in_recep")
    said(game, "go to desk 1", "take mug 1 from desk 1", "go to shelf 1", "move mug 1 to shelf 1")
    assert game.progress() == 0.5
    said(game, "go to fridge 1", "open fridge 1", "take mug 2 from fridge 1", "go to microwave 1")
    said(game, "heat mug 2 with microwave 1")
    assert game.progress() == 0.5  # one is in place, the other is hot
    game = play("look_at_obj_in_light", place="desklamp")
    steps = ["go to desk 1", "use desklamp 1", "go to shelf 1", "go to desk 1", "take mug 1 from desk 1"]
    assert [(game.step(s), round(3 * game.progress()))[1] for s in steps] == [0, 2, 1, 2, 3]
    game = play("pick_two_obj_and_place")
    said(game, "go to desk 1", "take mug 1 from desk 1", "go to shelf 1", "move mug 1 to shelf 1")
    said(game, "go to fridge 1", "open fridge 1", "take mug 2 from fridge 1", "go to shelf 1")
    assert (game.step("move mug 2 to shelf 2"), game.progress())[1] == 0.5  # not in the same one
    said(game, "take mug 2 from shelf 2", "move mug 2 to shelf 1")
    assert game.won()


# --- plans ---------------------------------------------------------------------------------------------


def brute(start):
    """The length of a shortest plan, by breadth-first search in all commands."""

    def key(game):
        return (game.location, game.held, tuple(map(tuple, game.inside)), frozenset(game.opened)), frozenset(
            (k, t) for k, things in game.state.items() for t in things
        )

    def copy(game):
        other = Play(game.game)
        for name in ("location", "held"):
            setattr(other, name, getattr(game, name))
        other.inside = [tuple(c) for c in game.inside]
        other.lying, other.left, other.opened = set(game.lying), set(game.left), set(game.opened)
        other.state = {k: set(v) for k, v in game.state.items()}
        return other

    queue, seen = deque([(0, start)]), {key(start)}
    while queue:
        depth, game = queue.popleft()
        if game.won():
            return depth
        for command in game.admissible():
            if command.split()[0] in ("look", "inventory", "help", "examine", "slice"):
                continue
            after = copy(game)
            after.step(command)
            if key(after) not in seen:
                seen.add(key(after))
                queue.append((depth + 1, after))
    return None


@pytest.mark.parametrize(
    ("goal", "place", "before"),
    [
        ("pick_and_place_simple", "shelf", []),
        ("pick_and_place_simple", "fridge", ["go to desk 1", "take apple 1 from desk 1"]),
        ("pick_heat_then_place_in_recep", "shelf", ["go to shelf 1", "take knife 1 from shelf 2"]),
        ("pick_cool_then_place_in_recep", "fridge", []),
        ("pick_clean_then_place_in_recep", "desk", ["go to fridge 1", "open fridge 1"]),
        ("look_at_obj_in_light", "desklamp", ["go to desk 1", "take apple 1 from desk 1"]),
        ("look_at_obj_in_light", "desklamp", ["go to desk 1", "use desklamp 1", "go to shelf 1"]),
        ("pick_two_obj_and_place", "fridge", ["go to shelf 1", "take knife 1 from shelf 2"]),
    ],
)
def test_no_plan_is_shorter(goal, place, before):
    game = play(goal, place=place)
    said(game, "look", *before)
    found = plan.shortest(game)
    assert found is not None
    assert len(found) == brute(game)
    for command in found:
        assert not game.won()
        assert game.step(command) != NOTHING
    assert game.won()
    assert plan.shortest(game) == []


def test_there_may_be_no_plan():
    problem = room(target="apple").replace("(pickupable apple_bar_a)\n", "")
    assert plan.shortest(Play(games.compile(problem, "put a apple in shelf."))) is None


# --- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (lambda p: p.replace("(define (problem room)", "(define (problem)"), "broken", "domain alfred"),
        (lambda p: p[: len(p) // 2], "broken", "form"),
        (lambda p: p.replace("alfred", "other"), "broken", "alfred"),
        (lambda p: p.replace("(openable fridge_bar_a)", "(openable mug_bar_a)"), "broken", "openable"),
        (lambda p: p.replace("(openable fridge_bar_a)", "(flies fridge_bar_a)"), "broken", "flies"),
        (lambda p: p.replace("(openable fridge_bar_a)", "((openable fridge_bar_a)"), "broken", "odd"),
        (lambda p: p.replace("(openable fridge_bar_a)", "(= (distance a b) 1)"), "broken", "odd"),
        (lambda p: p.replace("(openable fridge_bar_a)", "(holds agent1 mug_bar_a)"), "broken", "held"),
        (lambda p: p.replace("(openable fridge_bar_a)", "(atlocation agent1 loc_bar_a)"), "broken", "2 loc"),
        (lambda p: p.replace("agent1 - agent", "agent1 agent2 - agent"), "broken", "one agent"),
        (lambda p: p.replace("fridge_bar_a loc_bar_b", "fridge_bar_a loc_bar_q"), "broken", "loc_bar_q"),
        (
            lambda p: p.replace("(receptacleAtLocation fridge_bar_a loc_bar_b)\n", ""),
            "broken",
            "fridge_bar_a",
        ),
        (lambda p: p.replace("sinkbasinType", "sinkType"), "version", "Sink"),
        (lambda p: p.replace("(isClean ?o)", ""), "broken", "six types"),
    ],
)
def test_a_bad_problem_says_what_is_bad(change, kind, says):
    problem = room("pick_clean_then_place_in_recep")
    sentence = "put a clean mug in shelf."
    assert games.compile(problem, sentence).goal == Goal("pick_clean_then_place_in_recep", "mug", "shelf")
    with pytest.raises(BadGame, match=says) as caught:
        games.compile(change(problem), sentence)
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    "sentence", ["put a mug in shelf.", "put a clean cup in shelf.", "put a clean mug in fridge.", "tidy up."]
)
def test_a_sentence_that_asks_for_something_else_is_a_mismatch(sentence):
    with pytest.raises(BadGame, match=r"clean.*mug, shelf") as caught:
        games.compile(room("pick_clean_then_place_in_recep"), sentence)
    assert caught.value.kind == "mismatch"


# --- the generator -------------------------------------------------------------------------------------


def test_generated_games_are_the_same_everywhere():
    text = "".join("".join(generate.problem(kind, n)) for kind in games.TYPES for n in range(5))
    assert (
        hashlib.sha256(text.encode()).hexdigest()
        == "6eb5859bbca0da7a65291f05d49fbb0eea449ff070b86916cb6c7c800d547b2b"
    )


@pytest.mark.parametrize("kind", games.TYPES)
def test_generated_games_can_be_won_and_differ(kind):
    first = set()
    for number in range(15):
        game = Play(generate.game(kind, number))
        first.add(game.reset())
        assert game.game.goal.type == kind
        assert not game.won()
        for command in generate.walkthrough(kind, number):
            assert command in game.admissible()
            game.step(command)
        assert game.won()
    assert len(first) == 15


# --- real games, where there are some ------------------------------------------------------------------


@pytest.mark.skipif(not (SHARED / "data" / "alfworld").is_dir(), reason="no ALFWorld games here")
def test_real_games_can_be_won_as_their_walkthrough_says():
    data = SHARED / "data" / "alfworld"
    domain, grammar = ((data / name).read_text() for name in ("domain.pddl", "grammar_template.twl2"))
    games.check_domain(domain)
    assert games.read_grammar(grammar) == "UNKNOWN GOAL."
    with gzip.open(data / "games.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in itertools.islice(lines, 0, None, 100)]
    for row in rows:
        game = Play(games.compile(row["problem"], row["goal"].removeprefix(games.TASK_MARK)))
        game.reset()
        best = plan.shortest(game)
        assert best is not None
        assert len(best) <= len(row["walkthrough"])
        for command in row["walkthrough"]:
            assert game.step(command) != NOTHING
        assert game.won()

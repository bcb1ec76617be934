"""MiniHack through real NLE, in this process and in workers."""

import concurrent.futures
import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from metagym import testing
from metagym.envs import worker
from metagym.envs.minihack import MiniHackEnv, catalog
from metagym.envs.minihack.env import PARTS, SPLITS
from metagym.errors import InputError, MissingExtraError, UnknownNameError, WorldError

MOVES = ("north", "east", "south", "west")
ROOM = "MiniHack-Room-Random-5x5-v0"


def make(**kwargs):
    return contextlib.closing(MiniHackEnv(**{"types": ROOM, "observation": "compact", **kwargs}))


def here(**kwargs):
    return make(isolate=False, **kwargs)


def play(env, task, moves):
    """The stream of an episode: everything that comes back."""
    stream = [env.reset(seed=1, options={"task": task})]
    for move in moves:
        stream.append(env.step(move))
        if stream[-1][2] or stream[-1][3]:
            break
    return stream


# --- tasks ---------------------------------------------------------------------------------------------


def test_the_catalog_is_what_minihack_registers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import minihack  # noqa: F401
    assert {i for i in gym.registry if i.startswith("MiniHack-")} == set(catalog.FAMILY_OF)
    assert len(catalog.FAMILY_OF) == 161
    assert len(catalog.runnable()) == 146
    assert all(f.goal for f in catalog.FAMILIES.values() if not f.why_not)


def test_without_minigrid_122_types_run(monkeypatch):
    monkeypatch.setattr(catalog, "installed", lambda package: package != "minigrid")
    assert len(catalog.runnable()) == 122
    with pytest.raises(InputError, match=r"MultiRoom-N2-v0.*minigrid.*\[minihack\]"):
        MiniHackEnv(types="MultiRoom-N2")


def test_without_minihack_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(catalog, "installed", lambda package: package != "nle")
    with pytest.raises(MissingExtraError, match=r"nle.*metagym-rl\[minihack\]"):
        MiniHackEnv()


@pytest.mark.parametrize(
    ("name", "reason"),
    [("Boxoban-Hard", "download"), ("LavaCrossingS9N1", "minigrid"), ("Skill-Custom", "custom levels")],
)
def test_types_that_cannot_run_say_why(name, reason):
    with pytest.raises(InputError, match=f"MiniHack-{name}-v0.*{reason}"):
        MiniHackEnv(types=name)
    with make(types=None) as env, pytest.raises(InputError, match=reason):
        env.task(f"MiniHack-{name}-v0:0")


def test_unknown_names():
    with pytest.raises(UnknownNameError, match="Room-Random-5x5"):
        MiniHackEnv(types="Room-Randm-5x5")
    for kwargs in (
        *({"observation": "short"}, {"reward": "dense"}, {"actions": ["fly"]}, {"split": "dev"}),
        *({"prompts": "some"}, {"levels": {"a": DES}, "level_options": {"kind": "quest"}}),
    ):
        with pytest.raises(UnknownNameError):
            MiniHackEnv(**kwargs)
    for kwargs in ({"actions": ()}, {"actions": [5]}, {"observation": None}):
        with pytest.raises(InputError):
            MiniHackEnv(**kwargs)
    for timeout_s in (0, float("nan")):
        with pytest.raises(InputError, match="timeout_s"):
            MiniHackEnv(timeout_s=timeout_s)
    for id in (5, ["Room-5x5:1"]):
        with pytest.raises(InputError, match="by its id, a str"):
            MiniHackEnv().reset(options={"task": id})


def test_seed_pools_are_disjoint_and_fixed():
    expected = {
        "train": range(1_000_000),
        "validation": range(1_000_000, 1_100_000),
        "test": range(1_100_000, 1_200_000),
    }
    assert expected == SPLITS
    sets = []
    for split in SPLITS:
        with make(split=split) as env:
            sets.append({env.tasks[i].id for i in range(1000)} | {env.tasks[-1].id})
            assert env.tasks[0].split == split
    assert len(set.union(*sets)) == 3 * 1001


def test_short_names_are_taken_for_types_and_tasks():
    with here(types="room-random-5x5", tasks="Room-Random-5x5:7") as env:
        assert [t.id for t in env.tasks] == [f"{ROOM}:7"]
        assert env.reset(options={"task": "Room-Random-5x5:7"})[1]["task"] == f"{ROOM}:7"


# --- levels --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [name for name, f in catalog.FAMILIES.items() if not f.why_not])
def test_every_type_resets_and_steps(family):
    for kind in catalog.FAMILIES[family].types:
        with here(types=kind, observation="full") as env:
            observation, info = env.reset(seed=0)
            assert observation.startswith(f"Goal: {info['goal']}\n\n")
            assert "Map (you are @):" in observation
            assert {"north", "south", "northwest"} <= set(info["admissible"])
            for action in ("north", "southeast", "fly"):
                _, _, terminated, truncated, info = env.step(action)
                if terminated or truncated:
                    break


def test_golden_observations():
    """Levels and text stay what they are. (NLE 1.3.0, MiniHack 1.0.2)"""
    with here() as env:
        seen = [env.reset(options={"task": f"{ROOM}:{n}"})[0] for n in range(4)]
    assert seen == GOLDEN


def test_same_task_same_stream_in_every_process():
    rng = np.random.default_rng(0)
    moves = ("north", "south", "east", "west", "southeast", "northwest", "nonsense")
    for kind in ("Room-Ultimate-15x15", "MultiRoom-N4-Monster", "HideNSeek"):
        actions = [moves[i] for i in rng.integers(len(moves), size=25)]
        with here(types=kind, observation="full") as one, make(types=kind, observation="full") as other:
            task = one.tasks[12345].id
            first = play(one, task, actions)
            one.reset(seed=9)  # another level in between
            assert play(one, task, actions) == first
            assert play(other, task, actions) == first
            assert np.array_equal(one._game.screen(), other._worker.call("screen"))
            assert play(one, one.tasks[12346].id, actions) != first


def test_seeding_is_real():
    with here(types="Room-Random-15x15") as one, here(types="Room-Random-15x15") as other:
        assert one.reset(seed=5) == other.reset(seed=5)
        assert one.reset()[1]["task"] == other.reset()[1]["task"]
        screens = set()
        for n in range(10):
            one.reset(options={"task": f"Room-Random-15x15:{n}"})
            screens.add(one._game.screen().tobytes())
        assert len(screens) == 10


def test_a_task_is_one_level():
    """Reported of KeyRoom: maps differed in spite of the seed."""
    with here(types="KeyRoom-S5") as env:
        screens = set()
        for _ in range(20):
            env.reset(options={"task": "KeyRoom-S5:11"})
            screens.add(env._game.screen().tobytes())
    assert len(screens) == 1


def test_two_games_take_turns_in_one_process():
    """NetHack keeps its state in globals: games of two envs, reset and stepped by turns, don't mix."""
    with here(types="Room-Random-15x15") as one, here(types="Room-Ultimate-15x15") as other:
        alone = [play(env, env.tasks[n].id, MOVES) for n in range(3) for env in (one, other)]
        for n in range(3):
            streams = [[env.reset(seed=1, options={"task": env.tasks[n].id})] for env in (one, other)]
            for move in MOVES:
                for env, stream in zip((one, other), streams, strict=True):
                    if not (len(stream[-1]) == 5 and (stream[-1][2] or stream[-1][3])):
                        stream.append(env.step(move))
            assert streams == alone[2 * n : 2 * n + 2]


@pytest.mark.parametrize("kind", ["Room-Ultimate-15x15", "Sokoban1a", "KeyRoom-S5", "River"])
def test_rewards_and_ends_are_minihacks_own(kind):
    kind = catalog.full_name(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        raw = gym.make(kind, disable_env_checker=True, fix_moon_phase=True).unwrapped
    words = ("north", "east", "south", "west", "northeast", "southeast", "southwest", "northwest")
    rng = np.random.default_rng(3)
    with here(types=kind) as env:
        for n in range(3):
            raw.seed(n, n, reseed=False)  # type: ignore[attr-defined]
            raw.reset()
            env.reset(options={"task": f"{kind}:{n}"})
            for move in rng.integers(8, size=40):
                observation, reward, done, *_ = raw.step(int(move))
                _, ours, terminated, _, _ = env.step(words[move])
                assert (ours, terminated) == (reward, done)
                if done:
                    break
                assert bytes(observation["chars"]) == bytes(env._game._array("chars"))
    raw.close()


# --- observations --------------------------------------------------------------------------------------


def test_parts_can_be_switched():
    marks = {
        "goal": "Goal: ",
        "message": "Hello Agent",
        "seen": "You see:",
        "map": "Map (you are @):",
        "inventory": "Inventory:",
        "statistics": "Status: HP ",
    }
    assert tuple(marks) == PARTS
    with here(observation="full") as env:
        whole = env.reset(seed=0)[0]
    at = [whole.index(mark) for mark in marks.values()]
    assert at == sorted(at)
    for part, mark in marks.items():
        with here(observation=[part]) as env:
            alone = env.reset(seed=0)[0]
            assert alone in whole
            assert [m in alone for m in marks.values()] == [m == mark for m in marks.values()]
    with here(observation=()) as env:
        observation, info = env.reset(seed=0)
        assert observation == ""
        assert "Hello Agent" in info["message"]


def test_what_is_seen_agrees_with_the_map():
    with here(types="Room-Random-15x15", observation=("seen", "map")) as env:
        for n in range(20):
            seen, _, drawn = env.reset(options={"task": f"Room-Random-15x15:{n}"})[0].partition(
                "\n\nMap (you are @):\n"
            )
            rows = drawn.split("\n")
            (row, column), (r, c) = (
                next((y, x) for y, line in enumerate(rows) for x, char in enumerate(line) if char == mark)
                for mark in "@>"
            )
            words = re.search(r"- staircase down: (.*)", seen)
            assert words
            down = sum(
                int(k) * (1 if d == "south" else -1)
                for k, d in re.findall(r"(\d+) steps? (north|south)", words[1])
            )
            right = sum(
                int(k) * (1 if d == "east" else -1)
                for k, d in re.findall(r"(\d+) steps? (east|west)", words[1])
            )
            assert (row + down, column + right) == (r, c)


@pytest.mark.parametrize(
    "kind", ["Room-Random-15x15", "Room-Ultimate-5x5", "KeyRoom-S15", "Eat-Distr", "Memento-F4"]
)
def test_compact_is_short(kind):
    rng = np.random.default_rng(0)
    with here(types=kind) as env:
        for n in range(5):
            texts = [env.reset(options={"task": f"{kind}:{n}"})[0]]
            for move in rng.integers(5, size=10):
                observation, _, terminated, _, _ = env.step((*MOVES, "nonsense")[move])
                texts.append(observation)
                if terminated:
                    break
            # Words, digits and punctuation marks: what a vocabulary like SmolLM2's makes one token of.
            assert all(0 < len(re.findall(r"[^\W\d]+|\d|[^\w\s]", t)) < 20 for t in texts), texts


def test_every_message_behind_more_is_kept():
    with here(types="Eat", observation=["message"]) as env:
        env.reset(options={"task": "Eat:3"})
        env.step("pray")
        observation, *_, info = env.step("yes")
        expected = [
            "You begin praying to Ishtar.  You finish your prayer.",
            "You feel that Ishtar is displeased.",
        ]
        assert observation.split("\n") == info["message"].split("\n") == expected
        observation = env.step("inventory")[0]  # a window, not a message
        assert observation.startswith("Weapons\na - a +1 club (weapon in hand)\n")
        attributes = env.step("attributes")[0]  # two pages
        assert "Background:" in attributes
        assert "You have basic skill with club." in attributes


def test_questions_are_answered_by_text():
    with here(types="WoD-Easy-Restricted", observation=["message"]) as env:
        env.reset(options={"task": "WoD-Easy-Restricted:0"})
        observation, *_, info = env.step("zap")
        assert info["admissible"] == ["f", "escape"]
        assert observation.endswith("Answer with one of: f, escape.")
        observation, reward, *_, info = env.step("north")
        assert observation.startswith('"north" is no answer to that. Possible: f, escape.')
        assert (info["action"], reward) == (None, 0.0)
        *_, info = env.step("f")
        assert info["admissible"][-1] == "escape"
        assert env.step("escape")[4]["admissible"][:2] == ["north", "east"]


def test_a_question_that_the_type_does_not_ask_is_told():
    with here(types="KeyRoom-S5", observation=["message"], prompts="minihack") as env:
        env.reset(options={"task": "KeyRoom-S5:3"})
        observation = env.step("apply")[0]
        assert observation == "What do you want to use or apply? [efg or ?*] (not answered)\nNever mind."


# --- every kind of question, in levels of our own --------------------------------------------------------

DES = """MAZE: "mylevel", ' '
GEOMETRY: center,center
MAP
-------------
|...........|
|...........|
|...........|
-------------
ENDMAP
REGION: (0,0,12,4), lit, "ordinary"
BRANCH:(2,2,2,2),(0,0,0,0)
STAIR:(11,2),down
OBJECT:('%',"apple"),(3,2)
OBJECT:('%',"pear"),(3,2)
"""
FOOD = ("orange", "melon", "banana", "carrot", "pancake", "lembas wafer", "cram ration", "food ration", "egg")
TOOLS = (
    "saddle",
    "expensive camera",
    "bugle",
    "mirror",
    "figurine",
    "stethoscope",
    "tin opener",
    "skeleton key",
    "lock pick",
    "tin whistle",
    "magic marker",
    "blindfold",
    "towel",
    "leash",
)
PILE = "".join(f"OBJECT:('%',\"{n}\"),(4,2)\n" for n in FOOD)
PILE += "".join(f"OBJECT:('(',\"{n}\"),(4,2)\n" for n in TOOLS)
KNIGHT = {"character": "kni-hum-law-mal"}


def own(text=DES, name="mine", **options):
    kwargs = {"types": None, "observation": ["message"], "levels": {name: text}}
    return here(**kwargs, level_options={**KNIGHT, **options})


def say(env, *texts):
    """What is asked, and what else is said, at the end of some actions."""
    for text in texts:
        *_, info = env.step(text)
        assert info["action"] is not None, text
    return info["admissible"], info["message"]


def test_letters_lines_and_any_key():
    with own() as env:
        env.reset(seed=0)
        assert say(env, "engrave")[0] == ["-", "a", "b", "escape"]
        asked, said = say(env, "-")
        assert asked == ["escape"]
        assert said.endswith("What do you want to write in the dust here?")
        observation, *_, info = env.step("Grüße")
        assert observation.startswith('"Grüße" is no answer to that. Possible: a line of text, or escape.')
        assert info["action"] is None
        assert say(env, "Elbereth", "look")[1].endswith('You read: "Elbereth".')


def test_yes_no_and_directions():
    with own() as env:
        env.reset(seed=0)
        assert say(env, "pray")[0] == ["yes", "no", "escape"]
        assert say(env, "no")[0][0] == "north"
        assert say(env, "kick")[0][-1] == "escape"
        assert env.step("dance")[4]["action"] is None
        assert say(env, "east")[0][0] == "north"
        assert say(env, "chat")[0][:2] == ["north", "east"]


@pytest.mark.parametrize("prefix", ["fight", "move", "move far", "rush", "rush 2"])
@pytest.mark.parametrize("prompts", ["all", "minihack"])
def test_what_takes_a_direction_asks_for_it(prefix, prompts):
    """NetHack waits for it and says nothing; what else is said there would be eaten."""
    with here(types="WoD-Medium-Full", observation=["message"], prompts=prompts) as env:
        env.reset(seed=0, options={"task": "WoD-Medium-Full:3"})
        observation, *_, info = env.step(prefix)
        assert observation.startswith("The game asks: In what direction? Answer with one of: north,")
        assert (info["message"], info["admissible"][-1]) == ("", "escape")
        assert env.step("inventory")[4]["action"] is None
        *_, info = env.step("north")
        assert info["message"] in ("It's a wall.", "You harmlessly attack the wall.")
        env.step(prefix)
        *_, info = env.step("escape")
        assert len(info["admissible"]) > 50
        assert env.step("inventory")[4]["message"].startswith("Weapons")


def test_menus_are_chosen_from():
    with own() as env:
        env.reset(seed=0)
        env.step("east")
        asked, said = say(env, "pick up")
        assert asked == ["a", "b", "done", "escape"]
        assert said == "Pick up what?\nComestibles\na - an apple\nb - a pear"
        assert env.step("apple")[0].startswith('"apple" is no answer to that. Possible: a, b, done, escape.')
        assert say(env, "escape")[0][0] == "north"  # nothing taken
        say(env, "pick up")
        assert "a pear." in say(env, "b")[1]
        say(env, "drop type")
        asked, said = say(env, "a")  # of a menu another one comes
        assert said.endswith("a pear")
        assert "What would you like to drop?" in said
        assert say(env, asked[-3], "look")[1].count("\n") == 2  # a heading, the apple, the pear
        asked, said = say(env, "inventory")  # nothing to choose there: it is read
        assert asked[0] == "north"
        assert said.startswith("Weapons\n")


def test_menus_of_several_pages():
    with own(DES + PILE) as env:
        env.reset(seed=0)
        say(env, "east", "east", "pick up")
        asked, said = say(env, "next page")
        assert asked[-3:] == ["previous page", "done", "escape"]
        assert "towel" in said
        assert say(env, "previous page")[0][-3:] == ["next page", "done", "escape"]
        _, said = say(env, "a, next page", "a")  # one of each page
        assert len([line for line in said.replace("  ", "\n").split("\n") if " - " in line]) == 2


def test_places_are_pointed_out():
    with own() as env:
        env.reset(seed=0)
        observation, *_, info = env.step("jump")
        assert observation.startswith("The game asks: Where do you want to jump? The cursor is here. Move")
        assert info["admissible"][:2] == ["north", "east"]
        assert "The cursor is 2 steps east." in [env.step("east") for _ in range(2)][1][0]
        assert "The cursor is 1 step north and 2 steps east." in env.step("north")[0]
        before = env._game._position()
        assert say(env, "here")[0][0] == "north"
        row, column = before
        assert env._game._position() == (row - 1, column + 2)
        say(env, "jump")
        assert "9 steps" in env.step("staircase down")[0] or "steps east" in env.step("look")[0]
        assert say(env, "escape")[0][0] == "north"
        say(env, "call")  # which says no more than how it is done
        assert env.step("m")[0].startswith("The game asks: Which place? The cursor is here. Move")
        assert "no monster there" in say(env, "east", "here")[1]
    with own(wizard=True) as env:  # asked in a message of its own
        env.reset(seed=0)
        say(env, "wish", "2 blessed scrolls of teleportation")
        scroll = say(env, "read")[0][-2]
        assert "The game asks: Where do you want to be teleported? The cursor is here." in env.step(scroll)[0]
        row, column = env._game._position()
        say(env, "east", "east", "here")
        assert env._game._position() == (row, column + 2)


def test_wizard_mode():
    with own(wizard=True) as env:
        *_, info = env.reset(seed=0)
        assert {"wish", "create monster", "level teleport"} <= set(info["admissible"])
        asked, said = say(env, "wish")
        assert (asked, said) == (["escape"], "For what do you wish?")
        assert "3 apples" in say(env, "3 blessed apples")[1]
        assert "Create what kind of monster?" in say(env, "create monster")[1]
        say(env, "newt")


def test_no_step_is_eaten():
    """After whatever was asked and however it was answered, a move moves."""
    ways = ("engrave|escape", "engrave|-|x", "call|a|home", "jump|escape", "jump|far east|here", "pray|no")
    for way in (*ways, "inventory type|a|done", "adjust|a|z", "drop type|escape"):
        with own() as env:
            env.reset(seed=0)
            say(env, *way.split("|"))
            column = env._game._position()[1]
            say(env, "east")
            assert env._game._position()[1] == column + 1, way


def test_the_game_goes_on_as_before_where_minihack_closes_menus():
    with (
        own(wizard=False) as env,
        here(
            types=None,
            observation=["message"],
            levels={"mine": DES},
            level_options=KNIGHT,
            prompts="minihack",
        ) as other,
    ):
        for each in (env, other):
            each.reset(seed=0)
            each.step("east")
        assert "pick up" in say(other, "pick up")[0]
        assert say(other, "look")[1] == say(env, "pick up", "escape", "look")[1]


# --- levels of one's own ---------------------------------------------------------------------------------


def test_levels_are_types(tmp_path):
    (tmp_path / "one.des").write_text(DES)
    (tmp_path / "two.des").write_text(DES.replace("(11,2)", "(9,1)"))
    with here(types=None, levels=tmp_path) as env:
        assert env.types == ("one", "two")
        assert [t.id for t in env.tasks[:3]] == ["one:0", "two:0", "one:1"]
        (tmp_path / "one.des").unlink()  # read when the env is made
        assert env.reset(options={"task": "one:5"})[0].startswith("The staircase is 9 steps east.")
        assert env.reset(options={"task": "two:5"})[0].startswith("The staircase is 1 step north and 7 steps")
        assert "Reach the staircase down." in env.reset(seed=0)[1]["goal"]
        for _ in range(7):
            *_, info = env.step("east")
        *_, info = env.step("northeast") if "two" in info["task"] else env.step("east")
    with make(types="one", levels={"one": DES}, level_options={"kind": "navigation"}) as env:
        env.reset(seed=0)
        assert len(env.step("kick")[4]["admissible"]) == 8
        while not (end := env.step("east"))[2]:
            pass
        assert end[4]["success"]


def test_levels_that_are_wrong():
    with (
        own("LEVEL: nonsense\n") as env,
        pytest.raises(InputError, match=r"level 'mine' can't be compiled: .*line"),
    ):
        env.reset(seed=0)
    with own(DES.replace('"mylevel"', '"other"')) as env, pytest.raises(InputError, match="named mylevel"):
        env.reset(seed=0)
    with (
        make(types=None, levels={"mine": "LEVEL: nonsense\n"}) as env,
        pytest.raises(InputError, match="compiled"),
    ):
        env.reset(seed=0)
    for wrong in (
        "/no/such/folder",
        {},
        {"a:b": DES},
        {ROOM: DES},
        {"river": DES},
        {"a": "/no/such/file.des"},
        {"a": 5},
        {"a": f"{DES}# \ud800"},
        5,
        [DES],
    ):
        with pytest.raises(InputError):
            MiniHackEnv(levels=wrong)
    with pytest.raises(InputError, match="pass levels="):
        MiniHackEnv(level_options={"wizard": True})
    for options, says in (
        (5, "a dict"),
        ({"max_episode_steps": 0}, "max_episode_steps"),
        ({"max_episode_steps": "x"}, "max_episode_steps"),
        ({"des_file": DES}, "des_file"),
    ):
        with pytest.raises(InputError, match=says):
            MiniHackEnv(levels={"mine": DES}, level_options=options)
    with own(colour="red") as env, pytest.raises(InputError, match=r"takes: .*'colour'$"):
        env.reset(seed=0)


def test_conformance_of_levels():
    make_env = functools.partial(gym.make, "metagym/MiniHack-v0", levels={"mine": DES}, isolate=False)
    testing.check_text_env(make_env, steps=12, vector=False, tasks_differ=False)


# --- BALROG's layout -------------------------------------------------------------------------------------


def test_balrogs_layout():
    with here(types="Room-5x5", observation="balrog") as env:
        observation = env.reset(options={"task": "Room-5x5:0"})[0]
        names = ["message", "language observation", "cursor", "map", "inventory"]
        assert re.findall(r"^([a-z ]+):$", observation, re.MULTILINE) == names
        parts = re.split(r"^[a-z ]+:\n", observation, flags=re.MULTILINE)[1:]
        assert parts[0].startswith("Goal: Reach the staircase down.\nHello Agent, welcome to NetHack!")
        assert parts[1] == "stairs down near southeast\n\n"
        assert parts[2] == "Yourself a human rogue called Agent\n(x=36, y=10)\n\n"
        assert [len(line) for line in parts[3].rstrip("\n").split("\n")] == [80] * 23
        assert parts[4].startswith("a: a +0 short sword (weapon in hand)\nb: ")
        assert '"fly" is not an action here.' in env.step("fly")[0]


@pytest.mark.parametrize(
    ("rows", "columns", "words"),
    [
        (-1, 0, ("adjacent", "north")),
        (2, 2, ("very near", "southeast")),
        (-5, 2, ("near", "northnortheast")),
        (2, -6, ("far", "westsouthwest")),
        (0, 30, ("very far", "east")),
    ],
)
def test_distances_and_directions_in_balrogs_words(rows, columns, words):
    from metagym.envs.minihack import render

    assert render._bearing(rows, columns) == words


# --- actions, ends, rewards ----------------------------------------------------------------------------


def test_what_is_no_action_costs_a_turn_and_does_nothing():
    with here(observation="full", max_turns=3) as env:
        env.reset(seed=0)
        before = env._game.screen()
        for action, shown in (("fly away", '"fly away"'), ("kick", '"kick"'), ("x" * 99, f'"{"x" * 40}..."')):
            observation, reward, terminated, truncated, info = env.step(action)
            assert observation.startswith(
                f"{shown} is not an action here. Possible: north, east, south, west, "
            )
            assert (reward, terminated, info["action"]) == (0.0, False, None)
            assert np.array_equal(env._game.screen(), before)
        assert truncated


def test_actions_can_be_restricted():
    with here(actions=MOVES) as env:
        *_, info = env.reset(seed=0)
        assert info["admissible"] == list(MOVES)
        assert env.step("northeast")[4]["action"] is None
        assert env.step("Go West")[4]["action"] == "west"
    with here(actions=["kick"]) as env, pytest.raises(InputError, match=r"kick.*does not have them"):
        env.reset(seed=0)


def walk(env, task):
    """To the staircase, by what the compact observation says."""
    stream = [env.reset(options={"task": task})]
    while True:
        way = re.search(r"steps? (\w+)", stream[-1][0])
        assert way
        stream.append(env.step(way[1]))
        if stream[-1][2] or stream[-1][3]:
            return stream


def test_success():
    for reward in ("minihack", "sparse"):
        with here(reward=reward) as env:
            *steps, last = walk(env, f"{ROOM}:0")[1:]
            assert all(step[1] == 0 and not step[4]["success"] for step in steps)
            observation, value, terminated, truncated, info = last
            assert (observation, value, terminated, truncated) == ("You reached the goal.", 1.0, True, False)
            assert (info["success"], info["end"], info["admissible"]) == (True, "success", [])
    with here(max_turns=len(steps) + 1) as env:  # with the last turn
        assert walk(env, f"{ROOM}:0")[-1][4]["success"]


def test_the_limit_truncates():
    with here() as env:
        env.reset(seed=0)
        steps = [env.step("nonsense") for _ in range(100)]  # MiniHack's own limit for this type
        assert [s[3] for s in steps] == [False] * 99 + [True]
        assert steps[-1][2] is False
        assert steps[-1][4]["end"] == "limit"
        env.reset()
        assert not env.step("nonsense")[3]  # the count starts again


def test_death_terminates_without_success():
    with here(types="WoD-Easy-Restricted") as env:
        env.reset(options={"task": "WoD-Easy-Restricted:3"})
        for action in ("zap", "f", "north"):
            observation, reward, terminated, truncated, info = env.step(action)
        assert (observation, reward, terminated, truncated) == ("You died.", 0.0, True, False)
        assert (info["success"], info["end"]) == (False, "death")
        assert "The death ray hits you!" in info["message"]


# --- the worker ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGKILL])
def test_a_crash_is_a_world_error_of_that_episode(number):
    with make() as env, make() as other:
        first = env.reset(seed=4)
        others = play(other, other.tasks[3].id, ["north", "south"])
        directory = env._worker._process.directory
        os.kill(env._worker.pid, number)
        with pytest.raises(WorldError, match=rf"died during step\(\): killed by {number.name}"):
            env.step("north")
        assert not directory.exists()
        with pytest.raises(gym.error.ResetNeeded):
            env.step("north")
        assert env.reset(seed=4) == first
        assert play(other, other.tasks[3].id, ["north", "south"]) == others


def test_a_hang_is_a_world_error_at_the_deadline():
    with make(timeout_s=0.3) as env:
        with contextlib.suppress(WorldError):  # a slow first reset is none of this test's business
            env.reset(seed=0)
        env._worker._timeout_s = 30
        env.reset(seed=0)
        env._worker._timeout_s = 0.3
        pid = env._worker.pid
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(WorldError, match=r"did not answer step\(\) within 0.3 s"):
            env.step("north")
        assert time.monotonic() - began < 5
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_lost_files_are_a_world_error():
    with make() as env:
        env.reset(seed=0)
        for path in env._worker._process.directory.rglob("nhdat"):
            path.unlink()
        with pytest.raises(WorldError):
            env.reset(seed=1)
        env.reset(seed=1)


def test_a_failure_in_process_is_a_world_error_too(monkeypatch):
    with here() as env:
        first = env.reset(seed=0)
        monkeypatch.setattr(env._game, "step", lambda text: 1 / 0)
        with pytest.raises(WorldError, match=r"failed in step\(\): ZeroDivisionError"):
            env.step("north")
        assert env.reset(seed=0) == first


def test_workers_are_recycled_and_close_is_final():
    with make(recycle_after=2) as env:
        pids = []
        for _ in range(4):
            env.reset(seed=0)
            pids.append(env._worker.pid)
        assert pids[0] == pids[1] != pids[2] == pids[3]
        directory = env._worker._process.directory
        env.close()
        env.close()
        assert not directory.exists()
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def test_a_dropped_env_takes_its_worker_along():
    env = MiniHackEnv(types=ROOM)
    env.reset(seed=0)
    pid = env._worker.pid
    del env
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(("kwargs", "most"), [({}, 1000), ({"recycle_after": 10_000}, 5000)])
def test_memory_of_two_thousand_resets(kwargs, most):
    """NLE leaks about 2 kB a reset; workers are replaced, so that nothing adds up."""

    def private(pid):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))

    with make(**kwargs) as env:
        for n in range(2000):
            env.reset(options={"task": f"{ROOM}:{n}"})
            env.step("north")
            if n == 199:
                before = private(env._worker.pid)
        assert (private(env._worker.pid) - before) / 1800 < most  # bytes a reset


OWNER = """
import os, sys
from metagym.envs import worker
from metagym.envs.minihack import MiniHackEnv
envs = [MiniHackEnv(types="Room-5x5", isolate=i) for i in (True, True, False)]
for env in envs:
    env.reset(seed=0)
(nursery,) = worker._nurseries.values()
print(nursery._process.pid, *(env._worker.pid for env in envs[:2]), worker.scratch("nle"), flush=True)
sys.stdin.read()
"""


def owner(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", OWNER],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    *pids, directory = process.stdout.readline().split()
    return process, [int(p) for p in pids], Path(directory)


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def soon(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_nothing_is_left_when_the_owner_is_killed(tmp_path):
    process, pids, directory = owner(tmp_path)
    with process:
        assert directory.parent == tmp_path
        assert list(directory.glob("nle*"))
        process.kill()
    soon(lambda: all(gone(pid) for pid in pids) and not directory.exists())
    assert not list(tmp_path.iterdir())


def test_leftovers_of_the_dead_are_swept_and_nothing_else(tmp_path, monkeypatch):
    process, pids, directory = owner(tmp_path)
    with process:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        assert worker.sweep("nle") == []  # alive
        os.kill(pids[0], signal.SIGKILL)  # everything at once: the nursery can't clean up
        process.kill()
    soon(lambda: all(gone(pid) for pid in pids))
    assert list(directory.glob("worker-*/nle*"))
    others = ["nle1234", "metagym-nle-x-1", f"metagym-nle-{os.getpid()}-{worker.process_start(os.getpid())}"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "metagym-nle-1-1").symlink_to(tmp_path / "nle1234")
    impossible = tmp_path / f"metagym-nle-{10**20}-1"  # no system has such a pid
    impossible.mkdir()
    assert sorted(worker.sweep("nle")) == sorted([directory, impossible])
    assert {p.name for p in tmp_path.iterdir()} == {*others, "metagym-nle-1-1"}


def test_a_lost_nursery_is_replaced():
    with make() as env, make() as other:
        first = env.reset(seed=0)
        other.reset(seed=0)
        nursery = env._worker._process.nursery
        nursery._process.kill()
        nursery._process.wait()
        for each in (env, other):
            with pytest.raises(WorldError, match=r"died during step\(\)"):
                each.step("north")
            assert each.reset(seed=0) == first


def test_scratch_files_that_are_gone_are_made_again():
    with make() as env:
        first = env.reset(seed=0)
        stat = Path(f"/proc/{env._worker.pid}/stat")
        env._worker._process.nursery._socket.close()  # as an interrupt of fork() or end() does
        for _ in range(1000):  # the worker dies with its parent, soon
            if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
                break
            time.sleep(0.02)
        with pytest.raises(WorldError):
            env.step("north")
        assert env.reset(seed=0) == first
        shutil.rmtree(worker.scratch("nle"))  # as those do that clean up /tmp
        with pytest.raises(WorldError):
            env.reset(seed=0)
        assert env.reset(seed=0) == first


def test_an_interrupted_call_leaves_no_answer_behind(monkeypatch):
    with make() as env:
        first = env.reset(seed=0)

        def interrupt(timeout):
            raise KeyboardInterrupt

        monkeypatch.setattr(env._worker._process.connection, "poll", interrupt, raising=False)
        with pytest.raises(KeyboardInterrupt):
            env.step("north")
        assert env.reset(seed=0) == first


def test_envs_of_many_threads_and_of_a_forked_child():
    with contextlib.ExitStack() as stack:
        envs = [stack.enter_context(make()) for _ in range(6)]
        task = envs[0].tasks[5].id
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            streams = list(pool.map(lambda env: play(env, task, MOVES * 3), envs))
        assert all(stream == streams[0] for stream in streams)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forks with threads
            warnings.simplefilter("ignore", RuntimeWarning)  # JAX, if an earlier test has imported it
            child = os.fork()
        if child == 0:
            same = play(envs[0], task, MOVES * 3) == streams[0]
            envs[0].close()
            worker._clean_up()
            os._exit(0 if same else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert play(envs[0], task, MOVES * 3) == streams[0]


def test_the_owner_imports_no_nethack():
    code = (
        "import sys; from metagym.envs.minihack import MiniHackEnv; env = MiniHackEnv(types='Room-5x5'); "
        "env.reset(seed=0); env.step('north'); env.close(); "
        "sys.exit(any(name.partition('.')[0] in ('nle', 'minihack', 'jax') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- as a gymnasium environment ------------------------------------------------------------------------


def test_conformance_in_a_worker():
    testing.check_text_env(
        functools.partial(gym.make, "metagym:metagym/MiniHack-v0", types="Room-Ultimate-15x15"), steps=12
    )


def test_conformance_in_process():
    testing.check_text_env(
        functools.partial(gym.make, "metagym/MiniHack-v0", types="Eat-Distr", isolate=False),
        steps=12,
        vector=False,
    )


GOLDEN = [
    "The staircase is 3 steps north and 1 step west.",
    "The staircase is 3 steps north and 3 steps west.",
    "The staircase is 1 step north and 1 step west.",
    "The staircase is 3 steps north.",
]

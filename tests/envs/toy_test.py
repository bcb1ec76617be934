import functools

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from metagym.envs import toy
from metagym.envs.toy import SPLITS, THEMES, TYPES, ToyEnv, chance_return, optimal_return
from metagym.errors import InputError, UnknownNameError
from metagym.testing import check_text_env
from metagym.text_env import NumberedTasks

make = functools.partial(gym.make, "metagym:metagym/Toy-v0")


def play(env: ToyEnv, choose, task: str, seed: int) -> tuple[float, int, dict]:
    """The return, the number of turns, and the last info."""
    _, info = env.reset(seed=seed, options={"task": task})
    total, turns = 0.0, 0
    while True:
        _, reward, terminated, truncated, info = env.step(choose(env, info))
        total, turns = total + reward, turns + 1
        if terminated or truncated:
            return total, turns, info


def best(env: ToyEnv, info: dict) -> str:
    return env.best_action()


@pytest.mark.parametrize(
    "kwargs", [{}, {"types": "boxes-red"}, {"rounds": 1, "max_turns": 2, "split": "test"}], ids=str
)
def test_it_keeps_the_rules_of_text_envs(kwargs):
    """Vector envs, unseeded resets, step counters, bad actions and all else that the suite looks at."""
    check_text_env(functools.partial(make, **kwargs), seeds_differ=True, vector=not kwargs)


def test_there_are_types_by_theme_and_secret():
    assert len(THEMES) == 7
    assert len(TYPES) == len(set(TYPES)) == 44
    assert {
        "doors-red",
        "food-fish",
        "scrolls-longest",
        "levers-left",
        "paths-opposite",
        "lamps-neither",
    } < set(TYPES)


@pytest.mark.parametrize("type", [f"{theme}-{secrets[0]}" for theme, secrets in THEMES.items()])
def test_tasks_of_a_type_differ_in_what_they_offer(type):
    """Train, validation and test tasks share no content, not only no id."""
    tasks = NumberedTasks([type], SPLITS)
    assert len({tuple(toy._plan(task, 3)) for task in tasks}) == len(tasks) == 10_000


@pytest.mark.parametrize("type", TYPES)
def test_the_best_policy_gets_the_optimal_return(type):
    env = ToyEnv(types=type)
    plays = [play(env, best, f"{type}:{i}", i) for i in range(120 if type.startswith("boxes") else 5)]
    assert all(info["success"] for *_, info in plays)
    if type.startswith("boxes"):
        # Misses of a round are 0, 1 or 2, equally likely: the mean of n episodes has a standard error of
        # 0.1 * sqrt(2/3) / sqrt(3 n).
        assert abs(np.mean([r for r, *_ in plays]) - optimal_return(type)) < 4 * 0.1 * (2 / 9 / 120) ** 0.5
        assert optimal_return(type) == 0.9
    else:
        assert [(r, n) for r, n, _ in plays] == [(1.0, 3)] * 5
        assert optimal_return(type) == 1.0


@pytest.mark.parametrize(
    ("type", "chance"), [("doors-red", 1 / 3), ("paths-along", 1 / 4), ("boxes-red", None)]
)
def test_chance_returns(type, chance):
    if chance is not None:
        assert chance_return(type) == chance
    env = ToyEnv(types=type)
    rng = np.random.default_rng(0)
    random = [
        play(
            env, lambda _, info: info["admissible"][rng.integers(len(info["admissible"]))], f"{type}:{i}", i
        )[0]
        for i in range(600)
    ]
    assert abs(np.mean(random) - chance_return(type)) < 4 * np.std(random) / 600**0.5


def test_chance_returns_of_boxes_by_hand():
    # One round, one turn: 1/4 of the time +1, else -0.1.
    assert chance_return("boxes-red", rounds=1, max_turns=1) == pytest.approx(0.25 - 0.075)
    # Two turns: the second only after a miss.
    assert chance_return("boxes-red", rounds=1, max_turns=2) == pytest.approx(0.175 + 0.75 * 0.175)


@pytest.mark.parametrize(
    ("type", "scene", "things", "right"),
    [
        ("doors-red", (), ("blue", "red", "grey"), "red"),
        ("food-fish", (), ("fish", "nut", "rice"), "fish"),
        ("scrolls-first", (), ("river", "ash", "moon"), "ash"),
        ("scrolls-last", (), ("river", "ash", "moon"), "river"),
        ("scrolls-shortest", (), ("river", "mountain", "moon"), "moon"),
        ("scrolls-longest", (), ("river", "mountain", "moon"), "mountain"),
        ("levers-middle", ("tin", "gold", "iron"), ("left", "middle", "right"), "middle"),
        ("paths-along", ("flag", "west"), ("north", "east", "south", "west"), "west"),
        ("paths-opposite", ("flag", "west"), ("north", "east", "south", "west"), "east"),
        ("paths-clockwise", ("flag", "west"), ("north", "east", "south", "west"), "north"),
        ("paths-anticlockwise", ("flag", "west"), ("north", "east", "south", "west"), "south"),
        ("lamps-first", ("red", "pink"), ("pink", "blue", "red"), "red"),
        ("lamps-second", ("red", "pink"), ("pink", "blue", "red"), "pink"),
        ("lamps-neither", ("red", "pink"), ("pink", "blue", "red"), "blue"),
        ("boxes-red", (), ("pink", "blue", "red", "grey"), None),
    ],
)
def test_the_rule_of_each_theme(type, scene, things, right):
    assert toy._right(*type.split("-"), toy.Round(scene, things)) == right


def test_an_episode_word_for_word():
    env = ToyEnv(types="boxes-red", rounds=2)
    observation, info = env.reset(seed=3, options={"task": "boxes-red:0"})
    lines = observation.split("\n")
    for action in ("red box", "Open the PINK box.", "fly", "orange", "yellow"):
        observation, reward, terminated, truncated, info = env.step(action)
        lines += [f"> {action} -> {info['action']} {reward:+.2f}", *observation.split("\n")]
    assert lines == [
        "There are 2 rounds. In each, one choice is right.",
        "You can: open brown box, open red box, open orange box, open pink box.",
        "> red box -> open red box -0.05",
        "It is empty.",
        "You can: open brown box, open red box, open orange box, open pink box.",
        "> Open the PINK box. -> open pink box -0.05",
        "It is empty.",
        "You can: open brown box, open red box, open orange box, open pink box.",
        "> fly -> None +0.00",
        "That is not possible.",
        "You can: open brown box, open red box, open orange box, open pink box.",
        "> orange -> open orange box +0.50",
        "Right!",
        "You can: open yellow box, open red box, open brown box, open orange box.",
        "> yellow -> open yellow box +0.50",
        "Right! The end: 2 of 2 right.",
    ]
    assert (terminated, truncated) == (True, False)
    last = {"task": "boxes-red:0", "seed": 3, "success": True, "admissible": [], "action": "open yellow box"}
    assert info == last


def test_the_step_counter_starts_anew_after_a_reset_of_a_vector_env():
    """A vector env's reset did not reset the step counter."""
    envs = SyncVectorEnv([functools.partial(make, max_turns=5)] * 2)
    for _ in range(3):
        envs.reset(seed=1)
        for turn in range(1, 6):
            *_, truncated, _ = envs.step(["wait", "wait"])
            assert truncated.tolist() == [turn == 5] * 2
        envs.reset(seed=1)
        envs.step(["wait", "wait"])  # broken off


@pytest.mark.parametrize(
    "action", ["red", "Red.", " open the red door! ", "`open red door`", "red door", '"RED DOOR"']
)
def test_ways_to_say_an_action(action):
    env = ToyEnv()
    env.reset(seed=0, options={"task": "doors-red:5"})
    assert env.step(action)[4]["action"] == "open red door"


@pytest.mark.parametrize(
    "action", ["", "door", "open", "open red", "red yellow", "open pink door", "redd", "x" * 10**6]
)
def test_anything_else_is_answered_and_costs_a_turn(action):
    env = ToyEnv(max_turns=2)
    first, _ = env.reset(seed=0, options={"task": "doors-red:5"})
    observation, reward, terminated, truncated, info = env.step(action)
    assert observation == "That is not possible.\n" + first.split("\n")[1]
    assert (reward, terminated, truncated, info["action"]) == (0.0, False, False, None)
    assert env.step("wait")[3]


def test_wrong_arguments():
    with pytest.raises(InputError, match="rounds"):
        ToyEnv(rounds=0)
    with pytest.raises(UnknownNameError, match=r"Did you mean .*'doors-red'"):
        ToyEnv(types="doors-rad")
    with pytest.raises(UnknownNameError, match="unknown type"):
        optimal_return("doors")
    with pytest.raises(UnknownNameError, match="unknown type"):
        chance_return("doors")

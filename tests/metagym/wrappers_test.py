"""Wrappers for text envs: what each does, and that a wrapped env still keeps the rules."""

import functools
import time

import gymnasium as gym
import pytest
from gymnasium.error import ResetNeeded

from metagym import testing, wrappers
from metagym.envs.alfworld import ALIASES
from metagym.errors import InputError
from metagym.types import StopReason
from metagym.wrappers import ActionAliases, AdmissibleHints, Budget, History

TOY = functools.partial(gym.make, "metagym:metagym/Toy-v0", types="doors-red")


def wrapped():
    aliases = {r"choose (\w+)": r"open \1 door"}
    return AdmissibleHints(Budget(History(ActionAliases(TOY(), aliases)), max_turns=5, timeout_s=1000))


def test_a_wrapped_env_keeps_the_rules():
    testing.check_text_env(wrapped)


def test_the_spec_makes_the_wrapped_env_again():
    env = wrapped()
    again = gym.make(env.spec)
    assert str(again) == str(env)
    first, second = (e.reset(seed=3, options={"task": "doors-red:7"})[0] for e in (env, again))
    assert first == second
    assert "\n\nPossible actions: open " in first


def test_history_is_the_episode_so_far():
    env = History(TOY())
    first, _ = env.reset(seed=1, options={"task": "doors-red:7"})
    text, *_ = env.step("dance")
    answer = "That is not possible.\nYou can: open brown door, open orange door, open red door."
    assert text == f"{first}\n\n> dance\n{answer}"
    text, reward, *_ = env.step("open red door")
    assert text.startswith(f"{first}\n\n> dance\n{answer}\n\n> open red door\nRight!\n")
    assert reward == 1 / 3
    assert env.reset(seed=1, options={"task": "doors-red:7"})[0] == first


@pytest.mark.parametrize("limit", [{"turns": 1}, {"max_chars": 250}])
def test_history_leaves_out_the_oldest_turns(limit):
    env = History(TOY(), **limit)
    first, _ = env.reset(seed=1)
    env.step("one")
    text, *_ = env.step("two")
    assert text.startswith(f"{first}\n\n...\n\n> two\nThat is not possible.")
    assert text in env.observation_space


def test_history_without_turns_is_the_first_observation():
    env = History(TOY(), turns=0)
    first, _ = env.reset(seed=1)
    assert env.step("one")[0] == f"{first}\n\n..."
    env = History(TOY(), max_chars=20)
    assert env.reset(seed=1)[0] == first[:20]
    assert env.step("one")[0] == first[:20]


def test_a_budget_of_turns():
    env = Budget(TOY(rounds=5), max_turns=2)
    for _ in range(2):
        env.reset(seed=0)
        assert env.step("dance")[3] is False
        _, _, terminated, truncated, info = env.step("dance")
        assert (terminated, truncated, info["stop"]) == (False, True, StopReason.TURN_LIMIT)
        with pytest.raises(ResetNeeded, match="budget"):
            env.step("dance")
    env = Budget(TOY(rounds=1), max_turns=1)
    env.reset(seed=0)
    _, _, terminated, truncated, info = env.step("open red door")
    assert (terminated, truncated) == (True, False)
    assert "stop" not in info


def test_a_budget_of_seconds(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    env = Budget(TOY(), timeout_s=30)
    env.reset(seed=0)
    now = 129.0
    assert env.step("dance")[3] is False
    now = 131.0
    _, _, _, truncated, info = env.step("dance")
    assert (truncated, info["stop"]) == (True, StopReason.AGENT_TIMEOUT)
    env.reset()
    assert env.step("dance")[3] is False


def test_hints_are_what_can_be_done():
    env = AdmissibleHints(TOY(), most=2, template="Do: {actions}!")
    text, _ = env.reset(seed=1, options={"task": "doors-red:7"})
    assert text.endswith("\n\nDo: open brown door, open orange door, and 1 more!")
    for _ in range(3):
        text, _, terminated, *_ = env.step("open red door")
    assert terminated
    assert "Do:" not in text  # nothing can be done any more


def test_aliases_are_other_words_for_an_action():
    env = ActionAliases(TOY(), {r"choose (\w+)": r"open \1 door", "choose .*": "never"})
    env.reset(seed=1, options={"task": "doors-red:7"})
    assert env.step(" choose red ")[4]["action"] == "open red door"
    assert env.step("I choose red")[4]["action"] is None  # a whole action
    with pytest.raises(TypeError):
        env.step(3)  # type: ignore[arg-type]


def test_alfworlds_aliases_say_move():
    compiled = wrappers.compile_aliases(ALIASES)
    for word in ("in/on", "in", "on", "into", "onto", "inside"):
        assert wrappers.rewrite(f"put mug 1 {word} shelf 2", compiled) == "move mug 1 to shelf 2"
    for same in ("put mug 1", "take mug 1 from shelf 2", "", "Put mug 1 in shelf 2"):
        assert wrappers.rewrite(same, compiled) == same


@pytest.mark.parametrize(
    "make",
    [
        lambda env: History(env, turns=-1),
        lambda env: History(env, max_chars=0),
        lambda env: Budget(env, max_turns=0),
        lambda env: Budget(env, timeout_s=float("nan")),
        lambda env: AdmissibleHints(env, most=0),
        lambda env: AdmissibleHints(env, template="do something"),
        lambda env: ActionAliases(env, {"put (.+": "x"}),
        lambda env: ActionAliases(env, {"put (.+)": r"move \2"}),
    ],
)
def test_what_makes_no_sense_is_refused(make):
    with pytest.raises(InputError):
        make(TOY())

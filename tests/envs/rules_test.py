import functools

import gymnasium as gym
import pytest

from metagym.agents.follower import rule_follower
from metagym.envs.rules import FORMS, TYPES, RulesEnv, rule, types_of
from metagym.episode import run
from metagym.errors import InputError, UnknownNameError
from metagym.testing import check_text_env


def test_it_keeps_the_rules_of_text_envs():
    check_text_env(functools.partial(gym.make, "metagym/Rules-v0"), vector=False)


def test_a_task_by_hand():
    env = RulesEnv(types="keys-iron-oak", split=None)
    text, info = env.reset(seed=0, options={"task": "keys-iron-oak:1"})
    assert text == "Palace. Keys and locks: iron, bronze, oak, elm."
    assert sorted(info["admissible"]) == [
        "turn bronze in elm",
        "turn bronze in oak",
        "turn iron in elm",
        "turn iron in oak",
    ]
    assert env.step("Turn iron in oak!")[:4] == ("Right.", 1 / 3, False, False)
    text, reward, _, _, info = env.step("turn gold in pine")
    assert (text, reward, info["action"]) == ("That can't be done.", 0.0, None)
    text, reward, terminated, _, info = env.step("turn iron in elm")
    assert (text, reward, terminated, info["success"]) == ("Wrong.", 0.0, True, False)
    assert info["admissible"] == []


@pytest.mark.parametrize("type", TYPES)
def test_four_things_can_be_done_and_the_rule_is_one_of_them(type):
    env = RulesEnv(types=type, rounds=1)
    _, info = env.reset(seed=0, options={"task": f"{type}:0"})
    assert len(set(info["admissible"])) == 4
    assert rule(type) in info["admissible"]
    assert env.step(rule(type))[1] == 1.0


def test_chance_and_optimum():
    """Without advice a quarter, with the rule everything, with a wrong one no more than chance."""
    env, actor = RulesEnv(split="train"), rule_follower()

    def mean(prompt):
        returns = []
        for i in range(400):
            kind = TYPES[i % len(TYPES)]
            chat = actor.new_chat(i)
            told = prompt and prompt(kind)
            returns.append(run(env, chat, f"{kind}:{i}", seed=i, system=told, agent=actor.agent).reward)
        return sum(returns) / len(returns)

    assert mean(None) == pytest.approx(0.25, abs=0.04)  # standard error 0.0125
    assert mean(lambda kind: f"Remember: {rule(kind)}!") == 1.0
    assert mean(lambda kind: "Good luck.") == pytest.approx(0.25, abs=0.04)


def test_rumours_are_no_better_than_a_guess():
    env = RulesEnv(types="doors-red", split="train")
    told = [env.reset(seed=0, options={"task": f"doors-red:{n}"})[0] for n in range(2000)]
    rumours = [text for text in told if "says:" in text]
    assert len(rumours) == pytest.approx(1000, abs=80)
    assert sum("red door" in text for text in rumours) / len(rumours) == pytest.approx(0.25, abs=0.05)


def test_tasks_of_a_type_differ():
    env = RulesEnv(types="food-plum", split="test")
    assert len({env.reset(seed=0, options={"task": t.id})[0] for t in env.tasks}) > 0.5 * len(env.tasks)


def test_types_by_form():
    assert types_of("keys", "doors")[:1] == ("doors-red",)
    assert sum(len(types_of(form)) for form in FORMS) == len(TYPES)
    with pytest.raises(UnknownNameError, match="doors"):
        types_of("door")
    with pytest.raises(UnknownNameError):
        rule("doors-purple")
    with pytest.raises(InputError, match="rounds"):
        RulesEnv(rounds=0)

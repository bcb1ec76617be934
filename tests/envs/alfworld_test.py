"""The environment: what it tells, its tasks, its promises of speed and size, and TextWorld behind it."""

import concurrent.futures
import contextlib
import functools
import importlib.util
import re
import time
import tracemalloc

import gymnasium as gym
import pytest

from metagym import testing
from metagym.envs.alfworld import ALFWorldEnv, generate
from metagym.envs.alfworld import env as module
from metagym.envs.alfworld.env import PROMPT, SPLITS, TYPES
from metagym.envs.alfworld.native import HELP
from metagym.errors import InputError, MissingExtraError, UnknownNameError

HEAT = "pick_heat_then_place_in_recep"
REAL = all(importlib.util.find_spec(p) for p in ("textworld", "alfworld", "fast_downward"))


def make(**kwargs):
    return contextlib.closing(ALFWorldEnv(**{"split": "generated", **kwargs}))


def stream(env, task, commands):
    """The whole of an episode, without what names the engine's source."""
    seen = [env.reset(seed=0, options={"task": task})]
    for command in commands:
        seen.append(env.step(command))
        if seen[-1][2] or seen[-1][3]:
            break
    return seen


def test_it_keeps_the_rules_of_text_envs():
    testing.check_text_env(functools.partial(gym.make, "metagym:metagym/ALFWorld-v0", split="generated"))


def test_an_episode_from_start_to_win():
    with make(types=HEAT) as env:
        text, info = env.reset(seed=5, options={"task": f"{HEAT}:3"})
        assert text.startswith("-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room.")
        assert text.endswith(f"\n\nYour task is to: {info['goal']}")
        assert (info["type"], info["progress"], info["won"], info["action"]) == (HEAT, 0.0, False, None)
        assert info["admissible"] == info["admissible_commands"]
        assert {"look", "inventory", "help"} < set(info["admissible"])
        # what ReAct's and Reflexion's scripts take the task's name from
        assert "/".join(info["extra.gamefile"].split("/")[-3:-1]).startswith(HEAT)
        for command in generate.walkthrough(HEAT, 3):
            text, reward, terminated, truncated, info = env.step(command)
            assert reward == terminated == info["success"] == info["won"]
            assert info["action"] == command
            assert not truncated
        assert terminated
        assert info["progress"] == 1.0


def test_the_horizon_is_that_of_the_published_results():
    with make() as env:
        env.reset(seed=0)
        flags = [env.step("look")[3] for _ in range(50)]
    assert flags == [False] * 49 + [True]


def test_the_seed_draws_the_task_and_adds_nothing_to_it():
    with make() as env:
        assert env.reset(seed=3)[1]["task"] == env.reset(seed=3)[1]["task"]
        task = env.tasks[0].id
        first, second = (env.reset(seed=s, options={"task": task}) for s in (1, 2))
        assert first[0] == second[0]
        assert first[1] | {"seed": 2} == second[1]


def test_splits_are_disjoint_and_go_by_the_librarys_words():
    ids = set()
    for split in ("generated", "generated_validation", "generated_test"):
        with make(split=split) as env:
            assert {env.tasks[0].split, env.tasks[-1].split} == {split}
            ids |= {env.tasks[0].id, env.tasks[-1].id}
            assert [t.type for t in env.tasks[:6]] == list(TYPES)
    assert len(ids) == 6
    assert SPLITS[:3] == ("train", "valid_seen", "valid_unseen")
    with make() as env, pytest.raises(InputError, match="generated_test"):
        env.reset(options={"task": f"{HEAT}:1199999"})
    for bad in ({"split": "dev"}, {"types": "pick"}, {"engine": "fast"}):
        with pytest.raises(UnknownNameError):
            ALFWorldEnv(**{"split": "generated", **bad})


def test_the_expert_is_a_plan_from_here_on():
    with make(expert=True) as env:
        _, info = env.reset(seed=0, options={"task": f"{HEAT}:0"})
        assert info["expert"] == generate.walkthrough(HEAT, 0)
        env.step("help")
        away = next(c for c in info["admissible"] if c.startswith("go to"))
        _, _, terminated, _, info = env.step(away)
        while not terminated:
            before = info["expert"]
            _, _, terminated, _, info = env.step(before[0])
            assert len(info["expert"]) == len(before) - 1
        assert info["expert"] == []
    with make() as env:
        assert "expert" not in env.reset(seed=0)[1]


def test_the_expert_is_no_burden():
    """A planner that is asked after each step made one take minutes, elsewhere."""
    seconds = []
    with make(expert=True) as env:
        for kind in (TYPES[0], HEAT, TYPES[5]):
            _, info = env.reset(options={"task": f"{kind}:8"})
            while info["expert"]:
                start = time.process_time()
                *_, info = env.step(info["expert"][0])
                seconds.append(time.process_time() - start)
    assert max(seconds) < 0.5


@pytest.mark.parametrize("word", ["in/on", "in", "on", "into"])
def test_aliases_are_off_unless_asked_for(word):
    task = f"{TYPES[0]}:0"
    *way, last = generate.walkthrough(TYPES[0], 0)
    thing, place = re.fullmatch("move (.+) to (.+)", last).groups()
    put = f"put {thing} {word} {place}"
    with make(aliases=True) as env:
        seen = stream(env, task, [*way, put])
        assert seen[-1][2]
        assert seen[-1][4]["action"] == last
        assert env.reset(options={"task": task})
        assert env.step("put it down")[0] == "Nothing happens."
    with make() as env:
        assert stream(env, task, [*way, put])[-1][0] == "Nothing happens."


def test_the_prompt_lists_the_verbs_that_there_are():
    words = {line.split()[0] for line in PROMPT.splitlines() if line.startswith("  ")}
    words |= {"close", "inventory", "help"} & set(re.findall(r"\w+", PROMPT))
    real = {line.split()[0].rstrip(":") for line in HELP.splitlines()[1:]}
    assert {w.rstrip(",") for w in words} == real | {"help"}


def test_a_step_does_not_depend_on_threads():
    """Many envs at once, in threads, do what they do alone; games and their tables are shared."""

    def play(number):
        with make() as env:
            kind = TYPES[number % 6]
            return stream(env, f"{kind}:{number % 12}", generate.walkthrough(kind, number % 12))

    alone = [play(n) for n in range(12)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for number, together in enumerate(pool.map(play, range(48))):
            assert together == alone[number % 12]


def test_a_thousand_envs_in_one_process():
    module._compiled.cache_clear()
    tracemalloc.start()
    try:
        envs = [ALFWorldEnv(split="generated") for _ in range(1000)]
        base, _ = tracemalloc.get_traced_memory()
        for number, env in enumerate(envs[:60]):  # each its own game
            env.reset(seed=0, options={"task": f"{TYPES[number % 6]}:{number}"})
            env.step("look")
        each = (tracemalloc.get_traced_memory()[0] - base) / 60
    finally:
        tracemalloc.stop()
    assert each < 200_000  # bytes; the promise is 1 MB
    for env in envs:
        env.reset(seed=1, options={"task": f"{HEAT}:1"})
    assert {env.step("inventory")[0] for env in envs} == {"You are not carrying anything."}
    for env in envs:
        env.close()


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="alfworld"):
        ALFWorldEnv(split="generated", engine="textworld")


# --- the real stack, where it is installed --------------------------------------------------------------

real = pytest.mark.skipif(not REAL, reason="the extra alfworld is not installed")


@real
@pytest.mark.parametrize("kind", TYPES)
def test_textworld_engine_says_the_same(kind):
    commands = ["look", "help", "nonsense", *testing.BAD_ACTIONS, *generate.walkthrough(kind, 4)]
    with make(engine="textworld", timeout_s=240) as theirs, make() as ours:
        assert stream(theirs, f"{kind}:4", commands) == stream(ours, f"{kind}:4", commands)


@real
def test_textworld_engine_recycles_its_worker():
    with make(engine="textworld", recycle_after=1, timeout_s=240) as env:
        env.reset(seed=0)
        first = env._worker.pid
        env.reset(seed=0)
        assert env._worker.pid != first
    assert env._worker.pid is None

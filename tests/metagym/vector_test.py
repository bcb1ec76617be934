"""Envs side by side: the world chooses threads or none, and the result is that of SyncVectorEnv."""

import contextlib
import functools
import threading
import time

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from metagym import vector
from metagym.envs.toy import ToyEnv
from metagym.errors import InputError
from metagym.vector import TextVectorEnv


class SlowToy(ToyEnv):
    """A toy whose steps wait, and which counts how many do at once."""

    waits = True
    at_once, most = 0, 0
    lock = threading.Lock()

    def _act(self, action):
        with self.lock:
            SlowToy.at_once += 1
            SlowToy.most = max(SlowToy.most, SlowToy.at_once)
        time.sleep(0.05)
        with self.lock:
            SlowToy.at_once -= 1
        return super()._act(action)


def test_the_world_chooses():
    for name, kwargs, threads in (
        ("Toy", {}, False),
        ("MiniHack", {"types": "Room-5x5"}, True),
        ("MiniHack", {"types": "Room-5x5", "isolate": False}, False),
        ("ALFWorld", {"split": "generated"}, False),
    ):
        with contextlib.closing(gym.make_vec(f"metagym:metagym/{name}-v0", num_envs=2, **kwargs)) as envs:
            assert isinstance(envs, TextVectorEnv)
            assert envs.threads is threads
            assert len(envs.reset(seed=0)[0]) == 2


def test_steps_that_wait_are_taken_at_once():
    SlowToy.most = 0
    envs = TextVectorEnv([SlowToy] * 4)
    assert envs.threads
    envs.reset(seed=0)
    envs.step(("dance",) * 4)
    envs.close()
    assert SlowToy.most == 4


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_it_does_what_gymnasiums_does(mode):
    makes = [functools.partial(ToyEnv, types="doors-red", rounds=n + 1) for n in range(3)]
    one = TextVectorEnv(makes, autoreset_mode=mode, threads=True)
    other = SyncVectorEnv(makes, autoreset_mode=mode)
    for reset in ({"seed": 5}, {}, {"seed": [1, None, 3]}):
        got, expected = one.reset(**reset), other.reset(**reset)
        if reset.get("seed") != [1, None, 3]:
            assert str(got) == str(expected)
        for turn in range(1 if mode == AutoresetMode.DISABLED else 9):
            actions = ("open red door", "dance", "open red door" if turn % 2 else "x")
            got, expected = one.step(actions), other.step(actions)
            assert np.array_equal(got[1], expected[1])
            if reset.get("seed") != [1, None, 3]:
                assert str(got) == str(expected)
    one.close()
    other.close()


def test_an_env_that_fails_leaves_no_answers_behind():
    envs = TextVectorEnv([SlowToy] * 3)
    envs.reset(seed=0)
    with pytest.raises(TypeError):
        envs.step(("dance", 3, "dance"))  # type: ignore[arg-type]
    expected = ToyEnv().reset(seed=0)[0]
    assert envs.reset(seed=0)[0][0] == expected
    assert envs.step(("dance",) * 3)[0][2].startswith("That is not possible.")
    envs.close()


@pytest.mark.parametrize("threads", [False, True])
def test_there_is_one_action_and_one_seed_for_each_env(threads):
    one, other = (TextVectorEnv([ToyEnv] * 2, threads=threads) for _ in range(2))
    one.reset(seed=0)
    other.reset(seed=0)
    for actions in (("dance",), ("dance",) * 3):
        with pytest.raises(InputError, match="for 2 envs"):
            one.step(actions)
    with pytest.raises(InputError, match="1 seeds for 2 envs"):
        one.reset(seed=[1])
    for actions in (("dance", "x"), ("y", "dance")):  # nothing has been done, nothing is left behind
        assert str(one.step(actions)) == str(other.step(actions))
    for envs in (one, other):
        envs.close()
        with pytest.raises(ResetNeeded):
            envs.step(("dance",) * 2)


def test_no_envs_are_no_vector():
    with pytest.raises(InputError, match="at least one"):
        TextVectorEnv([])
    assert not hasattr(vector, "Nothing")
    assert vector.Toy(num_envs=1).num_envs == 1

import copy
import subprocess
import sys
import threading

import gymnasium as gym
import pytest

import metagym  # noqa: F401 (registers)
from metagym.live import Live


@pytest.mark.parametrize("name", ["metagym/Toy-v0", "metagym/MiniHack-v0"])
def test_the_import_registers(name):
    assert isinstance(gym.spec(name).entry_point, str)


def test_make_works_without_the_import_and_loads_nothing_heavy():
    code = (
        "import sys, gymnasium as gym; gym.make('metagym:metagym/Toy-v0').reset(seed=0);"
        "heavy = {'jax', 'nle', 'minihack', 'flax', 'torch', 'metagym.envs.minihack'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_importing_twice_is_fine():
    code = "import importlib, metagym; importlib.reload(metagym)"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


class Handle(Live):
    def __init__(self):
        self.lock = threading.Lock()


class HandleEnv(gym.Env):
    observation_space = action_space = gym.spaces.Discrete(2)

    def __init__(self, handle: Handle):
        self.handle = handle


def test_a_live_handle_survives_the_deep_copy_of_the_spec():
    handle = Handle()
    assert copy.deepcopy({"x": [handle]})["x"][0] is handle
    spec = gym.envs.registration.EnvSpec("Handle-v0", entry_point=HandleEnv)
    env = gym.make(spec, handle=handle, disable_env_checker=True)
    assert env.unwrapped.handle is handle  # type: ignore[attr-defined]
    assert env.spec is not None
    assert env.spec.kwargs["handle"] is handle

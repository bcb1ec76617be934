"""`metagym/MiniHack-v0`: MiniHack as a text world.

    env = gymnasium.make("metagym/MiniHack-v0", types="Room-Random-5x5", observation="compact")

* env.py: the environment; catalog.py: which types there are; actions.py: text to keys; frame.py: a result;
* game.py, render.py: NetHack and its text, the only modules that import nle.
"""

from metagym.envs.minihack.env import MiniHackEnv

__all__ = ["MiniHackEnv"]

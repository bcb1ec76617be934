"""`metagym/ALFWorld-v0`: ALFWorld's household tasks as a text world.

    env = gymnasium.make("metagym/ALFWorld-v0", split="generated")   # needs no data
    env = gymnasium.make("metagym/ALFWorld-v0", split="valid_unseen")  # $ALFWORLD_DATA

* env.py: the environment; data.py: the games on disk; generate.py: games of our own;
* game.py, native.py, plan.py: a game's text compiled, played, solved;
* real.py: TextWorld itself, the only module that imports it.
"""

from metagym.envs.alfworld.env import ALIASES, PROMPT, ALFWorldEnv

__all__ = ["ALIASES", "PROMPT", "ALFWorldEnv"]

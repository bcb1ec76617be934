"""MetaGym: reinforcement learning of LLM agents, with a Gym-style API.

`import metagym` registers the environments with Gymnasium; it imports nothing but numpy and gymnasium.
"""

import gymnasium as _gym

_ENVS = {
    "metagym/Toy-v0": "metagym.envs.toy:ToyEnv",
    "metagym/ALFWorld-v0": "metagym.envs.alfworld:ALFWorldEnv",
    "metagym/MiniHack-v0": "metagym.envs.minihack:MiniHackEnv",
    "metagym/Rules-v0": "metagym.envs.rules:RulesEnv",
    "metagym/SWE-v0": "metagym.envs.swe:SWEEnv",
    "metagym/ICT-v0": "metagym.meta:ICTEnv",
    "metagym/Reflect-v0": "metagym.meta:ReflectEnv",
}

for _id, _entry_point in _ENVS.items():
    if _id not in _gym.registry:
        _name = _id.removeprefix("metagym/").removesuffix("-v0")
        _gym.register(_id, entry_point=_entry_point, vector_entry_point=f"metagym.vector:{_name}")

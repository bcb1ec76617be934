"""The whole loop in seconds: a tiny random model in the Toy world.

Shows that everything is wired, not that anything is learned: random weights, two steps.

Time: half a minute on two cores, most of it compiling. Expected: success near 0 before and after.
Command: make train CONFIG=experiments/configs/debug.py
"""

from metagym.experiments.config import base, evaluation


def get_config():
    config = base()
    config.steps = 2
    config.model.name = "random"
    config.model.chat_template = "plain"

    config.world.id = "metagym/Toy-v0"
    config.world.types = ("doors-red", "food-apple")
    config.agent.template = "{observation}\nAction:"
    config.agent.history = False
    config.sampling.max_tokens = 4
    config.sampling.context = 256

    # A random model never succeeds, so all advantages are 0: the entropy bonus gives the update work to do.
    config.algorithm.args.entropy_coef = 0.01
    config.algorithm.args.drop_equal = False
    config.groups_per_step = 2
    config.group_size = 2
    config.max_workers = 4
    config.mesh.fsdp = 1
    config.batch.rows = 2
    config.batch.length = 256
    config.model.chunk = 64
    config.engine.slots = 4

    config.evaluate_every = 1
    config.checkpoint_every = 1
    config.evaluate.toy = evaluation(episodes=4, during=True)
    return config

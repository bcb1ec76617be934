"""In-Context Training that really learns, on two cores: SmolLM2-135M reflects on a world of hidden rules."""

from metagym.envs.rules import types_of
from metagym.experiments.config import base, ict_evaluation

TRAIN = types_of("doors", "food", "spells", "masks", "buttons", "gifts", "dances")
HELD_OUT = types_of("tools", "keys", "drums")


def get_config():
    config = base()
    config.steps = 12
    config.model.name = "smollm2-135m"
    config.model.chat_template = "plain"
    config.model.memory = 0.3

    config.ict.world = "metagym/Rules-v0"
    config.ict.types = TRAIN
    config.ict.held_out = HELD_OUT
    config.ict.k = 3
    config.ict.meta_turns = 4
    config.ict.transcript = {"head": "Advice: {prompt}", "no_prompt": "none", "episode": "", "end": ""}
    config.ict.data = "runs/ict_rules/tuples.jsonl"
    config.ict.collect = "random_action"
    config.ict.runs = 1
    config.actor.kind = "rule_follower"

    config.world.id = "metagym/Reflect-v0"
    config.world.kwargs.data = config.ict.data
    config.world.kwargs.reward = "previous"
    config.world.kwargs.held_out = HELD_OUT

    config.agent.kind = "reflector"
    config.agent.template = "{observation}\n\nBetter advice:\n>"
    config.agent.history = False
    config.agent.args.one_line = True
    config.sampling.max_tokens = 10
    config.sampling.stop = ("\n",)
    config.sampling.context = 384

    config.groups_per_step = 16
    config.group_size = 8
    config.max_workers = 32
    config.optimizer.learning_rate = 3e-5
    config.batch.rows = 4
    config.batch.length = 256
    config.batch.share_prompts = True
    config.engine.slots = 32
    config.checkpoint_every = 3
    config.checkpoints_kept = 8

    config.ict.evaluate.held_out = ict_evaluation(types=HELD_OUT, k=(3,), meta_turns=4, runs=1)
    return config

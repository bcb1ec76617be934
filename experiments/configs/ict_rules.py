"""In-Context Training that learns: SmolLM2-135M reflects on a world whose rules must be told.

The actor is frozen and has no model: it does what its prompt speaks for, in any words, and guesses otherwise
(`metagym.agents.follower`). Each type of `metagym/Rules-v0` has a secret; the reflector sees 3 episodes of
three tries, half of them with a rumour that is no better than a guess, and writes the next prompt. GRPO on
tuples that random actions as prompts made, reward of the replayed batch, one on-policy update a step. Every
reply is begun with ">", whatever the type; the rest, up to the end of the line, is sampled. Three forms of
rules are never trained on: tools (one of four), keys (a pair), drums (an order).

Time: about 13 CPU-minutes of training. Expected: on forms of rules never trained on, a return of 85 % or more
from the third meta-turn on, from 30 %; experiments/README.md has what came out.
Command: metagym ict collect --config=ict_rules, then
make train CONFIG=experiments/configs/ict_rules.py ARGS=--workdir=DIR, then
metagym ict eval --config=ict_rules --workdir=DIR
"""

from metagym.envs.rules import types_of
from metagym.experiments.config import base, ict_evaluation

TRAIN = types_of("doors", "food", "spells", "masks", "buttons", "gifts", "dances")
HELD_OUT = types_of("tools", "keys", "drums")
MEASURED = tuple(t for form in ("tools", "keys", "drums") for t in types_of(form)[:4])


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

    config.ict.evaluate.held_out = ict_evaluation(types=MEASURED, k=(3,), meta_turns=6, runs=1)
    return config

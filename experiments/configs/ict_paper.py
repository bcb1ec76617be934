"""The setting of In-Context Training's paper: Qwen2.5-7B-Instruct is actor and reflector, on ALFWorld.

k = 3 tasks a batch and up to 4 meta-turns; prompts written by the reflector as it comes are collected, GRPO
trains it on them with the reward of the replayed batch. `ict_paper_k5` is the same with k = 5, and
`ict_paper_minihack` with MiniHack. What the paper does not say is marked "not in the paper" below.

Needs accelerators (the reflector's weights, moments and gradients in float32 are 120 GB) and ALFWorld's data.
Time: not run. Expected: what the paper reports; nothing was measured with this code.
Command: metagym ict collect --config=ict_paper, then
make train CONFIG=experiments/configs/ict_paper.py ARGS=--workdir=DIR, then
metagym ict eval --config=ict_paper --workdir=DIR
"""

from metagym.experiments.config import base, ict_evaluation

WORLD = "metagym/ALFWorld-v0"
# Not in the paper: which types are held out. Two of six here, the ones that need an appliance found last.
TRAIN = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_two_obj_and_place",
)
HELD_OUT = ("pick_heat_then_place_in_recep", "pick_cool_then_place_in_recep")
MINIHACK = {"observation": "compact", "max_turns": 30}
MINIHACK_TYPES = ("MiniHack-Room-Random-15x15-v0", "MiniHack-Corridor-R2-v0", "MiniHack-KeyRoom-S5-v0")
GOAL = "An agent does tasks in a text world. Its system prompt is all that you can change."


def get_config():
    config = base()
    config.steps = 200  # not in the paper
    config.model.name = "Qwen/Qwen2.5-7B-Instruct"
    config.model.compute_dtype = "bfloat16"
    config.model.engine_dtype = "bfloat16"

    config.ict.world = WORLD
    config.ict.types = TRAIN
    config.ict.held_out = HELD_OUT
    config.ict.k = 3
    config.ict.meta_turns = 4
    config.ict.transcript = {"max_chars": 24_000}  # not in the paper
    config.ict.data = "runs/ict_paper/tuples.jsonl"
    config.ict.collect = "untrained"
    config.ict.runs = 64  # of each type; not in the paper

    config.actor.kind = "engine"
    config.actor.max_tokens = 256  # not in the paper, as all of the actor's sampling
    config.actor.temperature = 1.0
    config.actor.context = 16_384
    config.actor.slots = 64
    config.actor.max_turns = 30
    config.actor.agent.kind = "react"
    config.actor.agent.args.list_actions = True

    config.world.id = "metagym/Reflect-v0"
    config.world.kwargs.data = config.ict.data
    config.world.kwargs.reward = "previous"
    config.world.kwargs.held_out = HELD_OUT

    config.agent.kind = "reflector"
    config.agent.args.goal = GOAL
    config.agent.history = False
    config.sampling.max_tokens = 1024  # an analysis, then the prompt; not in the paper
    config.sampling.context = 12_288

    config.groups_per_step = 16  # not in the paper, as all that follows
    config.group_size = 8
    config.optimizer.learning_rate = 1e-6
    config.optimizer.warmup_steps = 10
    config.batch.rows = 1
    config.batch.length = 12_288
    config.checkpoint_every = 20

    # Tasks of held-out types are new whatever their split, and only the train split has enough for eight
    # meta-turns of five: ALFWorld's others have ten to thirty of a type.
    common = {
        "meta_turns": 8,
        "runs": 8,
        "reflectors": ("initial", "noop", "untrained", "best_of", "trained"),
    }
    config.ict.evaluate.held_out = ict_evaluation(
        types=HELD_OUT, split="train", k=(1, 3, 5), validation=10, validation_split="valid_seen", **common
    )
    config.ict.evaluate.transfer = ict_evaluation(
        world="metagym/MiniHack-v0", world_kwargs=MINIHACK, types=MINIHACK_TYPES, validation=10, **common
    )
    return config

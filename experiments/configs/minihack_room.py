"""The main job: SmolLM2-135M learns to walk to the staircase of a NetHack room, and of a larger one.

GRPO on MiniHack-Room-Random-5x5, eight seeds with eight episodes each a step, reward 1 for reaching the
staircase within eight moves. Every turn is a conversation of its own, and the reply is a single word behind a
begun one. Room-Random-15x15 is never trained on: a small room has few distinct starts, the large one shows
that the meaning of the words was learned.

Time: at most 10 minutes on two cores without an accelerator. Expected: success on held-out seeds of the small
room from at most 45 % to at least 95 %, of the large one from at most 45 % to at least 90 %.
Command: make train, or make train CONFIG=experiments/configs/minihack_room.py
"""

from metagym.experiments.config import base, evaluation

TEMPLATE = """\
Walk to the staircase: north, south, east or west.

The staircase is 1 step south and 3 steps west.
Action: south

{observation}
Action:"""


def get_config():
    config = base()
    config.steps = 10
    config.model.name = "smollm2-135m"
    config.model.chat_template = "plain"

    config.world.id = "metagym/MiniHack-v0"
    config.world.types = ("MiniHack-Room-Random-5x5-v0",)
    config.world.kwargs.observation = "compact"
    config.world.kwargs.actions = ("north", "south", "east", "west")
    config.world.kwargs.reward = "sparse"
    config.world.kwargs.max_turns = 8

    config.agent.kind = "plain"
    config.agent.template = TEMPLATE
    config.agent.history = False
    config.agent.args.max_format_errors = 8
    config.sampling.max_tokens = 1
    config.sampling.context = 128

    config.groups_per_step = 8
    config.group_size = 8
    config.max_workers = 16
    config.batch.rows = 2
    config.batch.length = 512
    config.engine.slots = 16

    config.evaluate_every = 5
    config.evaluate.small_room = evaluation(episodes=200, during=True)
    config.evaluate.large_room = evaluation(
        types=("MiniHack-Room-Random-15x15-v0",), episodes=100, kwargs={"max_turns": 40}
    )
    return config

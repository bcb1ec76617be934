"""The main job: SmolLM2-135M learns to walk to the staircase of a NetHack room, and of a larger one.

GRPO on MiniHack-Room-Random-5x5, eight seeds with eight episodes each a step, reward 1 for reaching the
staircase within eight moves, one on-policy update a step. Every turn is a conversation of its own: a worked
example, the observation, and one sampled token that is the action. Room-Random-15x15 is never trained on: a
small room has few distinct starts, the large one shows that the meaning of the words was learned.

Time: 5 to 8 minutes on two cores without an accelerator, about 5 GB. Expected, success on held-out seeds at
temperature 1: small room (200 seeds, 8 moves) from 34 % to 100 %, large room (100 seeds, 40 moves) from 29 %
to 100 %.
Command: make train, or make train CONFIG=experiments/configs/minihack_room.py
"""

from metagym.experiments.config import base, evaluation

TEMPLATE = """\
The staircase is 1 step south and 3 steps west. Action: west
{observation} Action:"""


def get_config():
    config = base()
    config.steps = 8
    config.model.name = "smollm2-135m"
    config.model.chat_template = "plain"
    config.model.memory = 0.3

    config.world.id = "metagym/MiniHack-v0"
    config.world.types = ("MiniHack-Room-Random-5x5-v0",)
    config.world.kwargs.observation = "compact"
    config.world.kwargs.actions = ("north", "south", "east", "west")
    config.world.kwargs.reward = "sparse"
    config.world.kwargs.max_turns = 8

    config.agent.kind = "plain"
    config.agent.template = TEMPLATE
    config.agent.history = False
    config.agent.args.max_format_errors = 8  # a reply that is no move costs a turn, no more
    config.sampling.max_tokens = 1
    config.sampling.context = 64

    config.groups_per_step = 8
    config.group_size = 8
    config.max_workers = 32
    config.optimizer.learning_rate = 2e-5
    config.batch.rows = 2
    config.batch.length = 512
    config.engine.slots = 32
    config.engine.page_size = 4  # prompts differ in their last dozen tokens

    config.evaluate_every = 2
    config.evaluate.small_room = evaluation(episodes=200, during=True)
    config.evaluate.large_room = evaluation(
        types=("MiniHack-Room-Random-15x15-v0",), episodes=100, during=True, kwargs={"max_turns": 40}
    )
    return config

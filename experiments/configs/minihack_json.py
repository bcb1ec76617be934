"""A whole conversation in one trace: SmolLM2-135M walks to the staircase with JSON actions.

GRPO on MiniHack-Room-Random-5x5 with the model's own chat template and the history kept: an episode is one
token trace of up to eight turns. A reply is begun with `{"action": "`; the model samples the rest, closing
quote, brace and end-of-turn token included, and is trained on all of it. A reply that is no complete JSON
object ends the episode, so the form is learned along with the way.

Time: 10 to 20 minutes on two cores without an accelerator, 5.4 GB. Expected, success on 200 held-out seeds at
temperature 1: from 21 % to 99 %.
Command: make train CONFIG=experiments/configs/minihack_json.py
"""

from metagym.experiments.config import base, evaluation

FORMAT = 'Walk to it. Reply with JSON. Example: 1 step south and 3 steps west: {"action": "west"}'


def get_config():
    config = base()
    config.steps = 6
    config.model.name = "smollm2-135m"
    config.model.memory = 0.3

    config.world.id = "metagym/MiniHack-v0"
    config.world.types = ("MiniHack-Room-Random-5x5-v0",)
    config.world.kwargs.observation = "compact"
    config.world.kwargs.actions = ("north", "south", "east", "west")
    config.world.kwargs.reward = "sparse"
    config.world.kwargs.max_turns = 8

    config.agent.kind = "json_action"
    config.agent.prefix = '{"action": "'
    config.agent.args.format = FORMAT
    config.agent.args.max_format_errors = 1
    config.sampling.max_tokens = 6
    config.sampling.context = 512

    config.groups_per_step = 8
    config.group_size = 8
    config.max_workers = 32
    config.optimizer.learning_rate = 2e-5
    config.batch.rows = 2
    config.batch.length = 512
    config.engine.slots = 32
    config.engine.page_size = 8

    config.evaluate.small_room = evaluation(episodes=200)
    return config

"""Two rooms and a closed door: SmolLM2-135M walks through with ReAct, the whole history in its context.

MiniHack-MultiRoom-N2 in twelve moves. The observation names the staircase, or else the door if there is room
for it, but no walls: who walks into one sees the same again. A reply is a thought and an action, begun with
"Thought: go"; five tokens are sampled. One without an action ends the episode. Six worked steps stand first.

Rejection fine-tuning, so that only the model's own successes are learned from:
1. Steps 1 and 2 in single rooms: the form of a reply, and what the directions mean.
2. From step 3 on in two rooms.

Time: 31 minutes of CPU time on two cores without an accelerator, evaluations included; 8 GB.
Expected, success on 100 held-out seeds at temperature 1: from 2 % to 80 %; a random policy
has 3 %.
Command: make train CONFIG=experiments/configs/minihack_multiroom.py
"""

from metagym.experiments.config import base, evaluation, phase

# Texts joined by line breaks, with an empty line before each observation.
LINES = (
    "{% for m in messages %}"
    "{% if not loop.first %}{{ '\n' if m['role'] == 'assistant' else '\n\n' }}{% endif %}{{ m['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}\n{% endif %}"
)
STEP = "Observation: {}\nThought: go {}\nAction: {}"
WORKED = (
    ("No staircase in sight. The closed door is 2 steps south.", "south"),
    ("The staircase is 1 step south and 3 steps west.", "west"),
    ("No staircase in sight. The open door is 1 step east.", "east"),
    ("No staircase in sight. Free: north, west, northwest.", "north"),
    ("The staircase is 2 steps north and 1 step east.", "north"),
    ("The staircase is 1 step west.", "west"),
)


def get_config():
    config = base()
    config.steps = 7
    config.model.name = "smollm2-135m"
    config.model.chat_template = LINES
    config.model.memory = 0.3

    config.world.id = "metagym/MiniHack-v0"
    config.world.types = ("MiniHack-Room-Random-5x5-v0",)
    config.world.kwargs.observation = "compact"
    config.world.kwargs.actions = ("north", "south", "east", "west")
    config.world.kwargs.reward = "sparse"
    config.world.kwargs.max_turns = 6

    config.agent.kind = "react"
    config.agent.system = "\n\n".join(STEP.format(seen, way, way) for seen, way in WORKED)
    config.agent.template = "Observation: {observation}"
    config.agent.prefix = "Thought: go"
    config.agent.args.max_format_errors = 1
    config.sampling.max_tokens = 5
    config.sampling.context = 512

    config.algorithm.name = "rft"
    config.groups_per_step = 8
    config.group_size = 12
    config.max_workers = 32
    config.optimizer.learning_rate = 2e-5
    config.batch.rows = 1
    config.batch.length = 1024
    config.batch.minibatches = 2
    config.batch.share_prompts = True
    config.engine.slots = 32
    config.engine.page_size = 8

    config.phases.door = phase(
        after=2,
        world__types=("MiniHack-MultiRoom-N2-v0",),
        world__kwargs={**config.world.kwargs.to_dict(), "max_turns": 12},
        groups_per_step=16,
        group_size=3,
    )
    config.evaluate.two_rooms = evaluation(episodes=100)
    return config

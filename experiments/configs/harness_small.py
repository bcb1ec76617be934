"""A foreign harness, trained as it is: mini-swe-agent with SmolLM2-135M on the built-in repairs.

The tasks are those of swe_small, but the program that drives the episode is mini-swe-agent, in the sandbox,
with its own prompts. It asks the proxy for a reply; the reply is its tool call, of which the model says one
token, the operator. GRPO, four tasks with six episodes each a step.

Needs: metagym doctor --install-harness=mini-swe-agent
Time: not measured. Expected: not measured.
Command: make train CONFIG=experiments/configs/harness_small.py
"""

from metagym.experiments.config import base, evaluation

BEGUN = """\
I use sed -i '2s/[-+*]/+/' to add, sed -i '2s/[-+*]/-/' to subtract, sed -i '2s/[-+*]/*/' to multiply.
"""
SED, FILES = "sed -i '2s/[-+*]/", "/' calc/[a-z]*.py"
PREFIX = f'{BEGUN}<tool_call>\n{{"name": "bash", "arguments": {{"command": "{SED}'
SUFFIX = f'{FILES} && echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}}}}\n</tool_call>'


def get_config():
    config = base()
    config.steps = 4
    config.model.name = "smollm2-135m"
    config.model.memory = 0.3

    config.world.id = "metagym/SWE-v0"
    config.world.kwargs.remember = True

    config.agent.kind = "harness"
    config.agent.args.name = "mini-swe-agent"
    config.agent.args.timeout_s = 300.0
    config.agent.args.suffix = SUFFIX
    config.agent.prefix = PREFIX
    config.agent.max_turns = 3
    config.sampling.max_tokens = 1
    config.sampling.context = 2048

    config.groups_per_step = 4
    config.group_size = 6
    config.max_workers = 4
    config.optimizer.learning_rate = 2e-5
    config.batch.rows = 1
    config.batch.length = 2048
    config.batch.share_prompts = True
    config.engine.slots = 8
    config.engine.num_pages = 1000
    config.record_traces = True

    config.evaluate.held_out = evaluation(episodes=12)
    return config

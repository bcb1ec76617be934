"""A foreign harness, trained as it is: mini-swe-agent with SmolLM2-135M on the built-in repairs of additions.

The program that drives the episode is mini-swe-agent, in the sandbox, with its own prompts. It asks the proxy
for a reply; the reply is its tool call, of which the model says one token: the line that sed leaves alone. A
fix leaves line 1 as it is. GRPO, two tasks with four episodes each a step.

Needs: metagym doctor --install-harness=mini-swe-agent
Time: 6 minutes of CPU for model and trainer, about as much for 72 processes of the harness; 26 minutes on a
machine that other work shared. Expected: groups of unequal outcomes in the first step, then none; 60 % of 20
held-out tasks before, 100 % after. An episode has 1,035 tokens, of which one is trained.
Command: make train CONFIG=experiments/configs/harness_small.py
"""

from metagym.experiments.config import base, evaluation

PREFIX = """\
The operator in line 2 is wrong.
<tool_call>
{"name": "bash", "arguments": {"command": "sed -i '"""
SUFFIX = """!s/ [-+*] / + /' calc/add.py && echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}}
</tool_call>"""


def get_config():
    config = base()
    config.steps = 4
    config.model.name = "smollm2-135m"
    config.model.memory = 0.3

    config.world.id = "metagym/SWE-v0"
    config.world.types = ("add",)
    config.world.kwargs.remember = True

    config.agent.kind = "harness"
    config.agent.args.name = "mini-swe-agent"
    config.agent.args.timeout_s = 900.0
    config.agent.args.suffix = SUFFIX
    config.agent.prefix = PREFIX
    config.agent.max_turns = 1
    config.sampling.max_tokens = 1
    config.sampling.context = 2048

    config.groups_per_step = 2
    config.group_size = 4
    config.max_workers = 8
    config.optimizer.learning_rate = 2e-5
    config.batch.rows = 1
    config.batch.length = 1152
    config.batch.share_prompts = True
    config.engine.slots = 8
    config.engine.num_pages = 1000
    config.record_traces = True

    config.evaluate.held_out = evaluation(episodes=20)
    return config

"""Software engineering, made so small that a small model learns: SmolLM2-135M names the right operator.

The built-in tasks: a function of one line computes the wrong thing, the issue gives an example. A reply is
one token; it goes into a `sed` command in a real sandbox, and what that changes is graded as always, in
another one, by hidden tests. GRPO, eight tasks with eight episodes each a step. Held out are numbers, names
of arguments and mistakes that training has not seen.

Time: 8 minutes beside other work on two cores without an accelerator, 3 of them this process's CPU time.
Expected: success on the 60 held-out tasks at temperature 1 from 40 % [29, 53] to 98 % [91, 100] (one run,
95 % intervals); from step 5 on every group is solved, so that nothing is left to learn.
Command: make train CONFIG=experiments/configs/swe_small.py
"""

from metagym.experiments.config import base, evaluation

GOAL = """\
add(3, 4) should be 7, it is 12.
calc/add.py:
     1  def add(u, v):
     2      return u * v

The repository is in /testbed.

The operator must be +
"""


def get_config():
    config = base()
    config.steps = 8
    config.model.name = "smollm2-135m"
    config.model.chat_template = "plain"
    config.model.memory = 0.3

    config.world.id = "metagym/SWE-v0"
    config.world.kwargs.max_turns = 1
    config.world.kwargs.remember = True

    config.agent.kind = "swe"
    config.agent.history = False
    config.agent.args.goal = GOAL
    config.agent.args.format = "The operator must be"
    config.agent.args.action = "shell sed -i '2s/ [-+*] / {reply} /' calc/[a-z]*.py"
    config.agent.args.max_format_errors = 1
    config.sampling.max_tokens = 1
    config.sampling.context = 256

    config.groups_per_step = 8
    config.group_size = 8
    config.max_workers = 8
    config.optimizer.learning_rate = 2e-5
    config.batch.rows = 2
    config.batch.length = 512
    config.batch.share_prompts = True
    config.engine.slots = 16
    config.engine.page_size = 8

    config.evaluate.held_out = evaluation(episodes=60)
    return config

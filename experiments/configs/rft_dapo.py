"""The two-stage recipe of 2508.03501 in one run, small: rejection fine-tuning, then DAPO with growing limits.

1. Steps 1 to 2, rejection fine-tuning: the successes of short episodes are imitated, replies that were no
   action are masked, in updates of a quarter of the step each.
2. From step 3 on DAPO, with the penalty on long episodes. Tasks that were never solved, or more than 2/3 of
   the time, would be dropped by the curriculum; here every task is new, so none is.
3. From step 5 on the limits are doubled, and the clip is narrower.

At full size (rft_dapo_full) the limits are 65,536 tokens and 40 turns, then 131,072 and 80.
The world is that of minihack_json: SmolLM2-135M walks to the staircase of a NetHack room.

Time: that of minihack_json, 10 to 20 minutes on two cores without an accelerator; not measured. Expected:
success on 100 held-out seeds at temperature 1 rises from 21 %; how far was not measured.
Command: make train CONFIG=experiments/configs/rft_dapo.py
"""

from metagym.experiments.config import evaluation, phase
from metagym.experiments.configs import minihack_json


def get_config():
    config = minihack_json.get_config()
    config.steps = 8
    config.agent.args.max_format_errors = 2
    config.agent.max_turns = 4
    config.sampling.context = 256

    config.algorithm.name = "rft"
    config.batch.minibatches = 4
    config.optimizer.learning_rate = 2e-5

    config.phases.dapo = phase(
        after=2,
        algorithm__name="dapo",
        algorithm__args={"clip_low": 0.2, "clip_high": 0.3},
        penalties={"length": {"threshold": 3, "maximum": 4}},
        curriculum={"at_least": 1, "at_most": 2 / 3},
        batch__minibatches=1,
    )
    config.phases.long = phase(
        after=4,
        agent__max_turns=8,
        sampling__context=512,
        algorithm__args={"clip_low": 0.2, "clip_high": 0.26},
        penalties={"length": {"threshold": 3, "maximum": 8}},
    )
    config.evaluate.small_room = evaluation(episodes=100)
    return config

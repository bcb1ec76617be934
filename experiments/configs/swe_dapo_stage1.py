"""Stage 1 of the software-engineering recipe of 2508.03501: DAPO at 65,536 tokens and 40 turns.

From the weights that swe_rft ended with (`--config.model.name=DIR`): learning rate 1e-6, groups of ten, clip
0.2 and 0.3, a penalty on episodes of more than ten turns, groups whose outcomes are all equal replaced.

Time: not run. Expected: not known between the stages; swe_dapo_stage2 has the end of the recipe.
Command: make train CONFIG=experiments/configs/swe_dapo_stage1.py
"""

import runpy
from pathlib import Path


def get_config():
    config = runpy.run_path(str(Path(__file__).with_name("swe_rft.py")))["get_config"]()
    config.steps = 64
    config.algorithm.name = "dapo"
    config.algorithm.args = {"clip_low": 0.2, "clip_high": 0.3}
    config.penalties = {"length": {"threshold": 10, "maximum": 40}}
    config.optimizer.learning_rate = 1e-6
    config.groups_per_step = 128
    config.batch.minibatches = 1
    config.rollout.refill = 32
    return config

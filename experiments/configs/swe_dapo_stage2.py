"""Stage 2 of the software-engineering recipe of 2508.03501: DAPO at 131,072 tokens and 80 turns.

From the weights that swe_dapo_stage1 ended with (`--config.model.name=DIR`): both limits doubled, a narrower
clip, and of the tasks only those that were solved at least once and at most 2/3 of the time.

Time: not run. Expected: the paper (arXiv:2508.03501) reports 39 % on SWE-bench Verified after it.
Command: make train CONFIG=experiments/configs/swe_dapo_stage2.py
"""

import runpy
from pathlib import Path


def get_config():
    config = runpy.run_path(str(Path(__file__).with_name("swe_dapo_stage1.py")))["get_config"]()
    config.agent.max_turns = 80
    config.sampling.context = 131072
    config.algorithm.args = {"clip_low": 0.2, "clip_high": 0.26}
    config.penalties = {"length": {"threshold": 10, "maximum": 80}}
    config.curriculum.at_least = 1
    config.curriculum.at_most = 2 / 3
    return config

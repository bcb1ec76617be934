"""The two-stage recipe of 2508.03501 at full size: 65,536 tokens and 40 turns, then 131,072 and 80.

Qwen2.5-72B on software engineering. Rejection fine-tuning (learning rate 5e-6, updates of 64 episodes), then
DAPO (1e-6, groups of ten, clip 0.2 and 0.3, a penalty on more than ten turns), then both limits doubled, a
narrower clip, and tasks dropped that were solved never or more than 2/3 of the time. rft_dapo is the same in
small. The mesh is that of scale_qwen25_72b; `world.kwargs.data` is for your instances (docs/worlds.md), the
built-in set is tiny.

Time: not run. Expected: the paper (arXiv:2508.03501) reports 39 % on SWE-bench Verified.
Command: make train CONFIG=experiments/configs/rft_dapo_full.py
"""

from metagym.experiments.config import phase
from metagym.experiments.configs import scale_qwen25_72b


def get_config():
    config = scale_qwen25_72b.get_config()
    config.steps = 130

    config.world.id = "metagym/SWE-v0"
    config.agent.kind = "react"
    config.agent.max_turns = 40
    config.sampling.max_tokens = 4096
    config.sampling.context = 65536
    config.max_workers = 512
    config.episode_timeout_s = 7200.0
    config.rollout.refill = 32

    config.algorithm.name = "rft"
    config.optimizer.learning_rate = 5e-6
    config.groups_per_step = 640
    config.group_size = 10
    config.batch.minibatches = 100  # 640 x 10 episodes, 64 a minibatch

    config.phases.dapo = phase(
        after=1,
        algorithm__name="dapo",
        algorithm__args={"clip_low": 0.2, "clip_high": 0.3},
        penalties={"length": {"threshold": 10, "maximum": 40}},
        optimizer__learning_rate=1e-6,
        groups_per_step=128,
        batch__minibatches=1,
    )
    config.phases.long = phase(
        after=65,
        agent__max_turns=80,
        sampling__context=131072,
        algorithm__args={"clip_low": 0.2, "clip_high": 0.26},
        penalties={"length": {"threshold": 10, "maximum": 80}},
        curriculum={"at_least": 1, "at_most": 2 / 3},
    )
    return config

"""Stage 0 of the software-engineering recipe of 2508.03501: Qwen2.5-72B learns its own successes by heart.

Rejection fine-tuning: ten attempts at each task, those that the grader calls resolved are imitated, replies
that were no command are masked; learning rate 5e-6, updates of 64 episodes, 65,536 tokens, 40 turns. The mesh
is that of scale_qwen25_72b, which `metagym doctor --compile` sizes. `world.kwargs.data` is for your instances
and `world.kwargs.sandbox` for where they run (docs/swe.md).

Time: not run. Expected: the paper (arXiv:2508.03501) reports 20 % on SWE-bench Verified after it.
Command: make train CONFIG=experiments/configs/swe_rft.py
"""

from metagym.experiments.configs import scale_qwen25_72b


def get_config():
    config = scale_qwen25_72b.get_config()
    config.steps = 1

    config.world.id = "metagym/SWE-v0"
    config.world.kwargs.warm = 4
    config.agent.kind = "swe"
    config.agent.max_turns = 40
    config.sampling.max_tokens = 4096
    config.sampling.context = 65536
    config.max_workers = 512
    config.episode_timeout_s = 7200.0

    config.algorithm.name = "rft"
    config.optimizer.learning_rate = 5e-6
    config.groups_per_step = 640
    config.group_size = 10
    config.batch.minibatches = 100  # 640 x 10 episodes, 64 a minibatch
    return config

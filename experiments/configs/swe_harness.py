"""Software engineering through a foreign harness: the recipe of LEGO-RL (2608.17393) for Qwen3-30B-A3B.

Group advantages with the loss of GSPO (clip 3e-4 and 4e-4), a KL term of 1e-3 against the first weights,
learning rate 1e-6, 64 tasks with eight episodes each, one step of staleness, and routing replay, since the
model is a mixture of experts. `--config.agent.args.name` says which harness; afterwards the model is measured
through four of them on the same tasks. The mesh is that of scale_qwen3_30b, which `metagym doctor --compile`
sizes. `world.kwargs.data` is for your instances and `world.kwargs.sandbox` for where they run (docs/swe.md).

Needs: metagym doctor --install-harness=all
Time: not run. Expected: not known.
Command: make train CONFIG=experiments/configs/swe_harness.py
"""

from metagym.experiments.config import evaluation
from metagym.experiments.configs import scale_qwen3_30b

MEASURED = ("mini-swe-agent", "claude-code", "codex", "qwen-code")


def get_config():
    config = scale_qwen3_30b.get_config()
    config.steps = 100

    config.world.id = "metagym/SWE-v0"
    config.agent.kind = "harness"
    config.agent.args.name = "qwen-code"
    config.agent.args.timeout_s = 5400.0
    config.agent.max_turns = 100
    config.sampling.max_tokens = 8192
    config.max_workers = 512
    config.episode_timeout_s = 7200.0

    config.algorithm.name = "gspo"
    config.algorithm.args = {"clip_low": 3e-4, "clip_high": 4e-4, "kl_coef": 1e-3}
    config.groups_per_step = 64
    config.group_size = 8
    config.rollout.staleness = 1

    for name in MEASURED:
        config.evaluate[name] = evaluation(episodes=100, agent={"args": {"name": name, "timeout_s": 5400.0}})
    return config

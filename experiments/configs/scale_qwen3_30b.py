"""Qwen3-30B-A3B at 65,536 tokens with routing replay: GRPO on 64 v5p chips.

Sized by `metagym doctor --compile`. Experts are split over the mesh axis `expert`, tokens of a row over
`context`. docs/scale.md has what it takes of each chip.
Time: not run on such a machine. Expected: that it fits; nothing is known of what it learns.
Command: metagym doctor --compile=scale_qwen3_30b --topology=v5p:4x4x4; on the machine itself
make train CONFIG=experiments/configs/scale_qwen3_30b.py
"""

from metagym.experiments.config import base


def get_config():
    config = base()
    config.model.name = "Qwen/Qwen3-30B-A3B"
    config.model.yarn = 2.0
    config.model.compute_dtype = "bfloat16"
    config.model.engine_dtype = "bfloat16"
    config.model.chunk = 1024
    config.model.memory = 0.0
    config.model.replay = True

    config.algorithm.name = "grpo"
    config.optimizer.learning_rate = 1e-6
    config.mesh.fsdp = 2
    config.mesh.context = 8
    config.mesh.expert = 4
    config.batch.rows = 8
    config.batch.length = 65536
    config.sampling.context = 65536
    return config

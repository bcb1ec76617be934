"""Qwen2.5-7B at 32,768 tokens: GRPO on sixteen v5e or v6e chips. Sized by `metagym doctor --compile`.

AdamW with f32 master weights, bf16 products, splash attention. docs/scale.md has what it takes of each chip.
Time: not run on such a machine. Expected: that it fits; nothing is known of what it learns.
Command: metagym doctor --compile=scale_qwen25_7b --topology=v6e:4x4; on the machine itself
make train CONFIG=experiments/configs/scale_qwen25_7b.py
"""

from metagym.experiments.config import base


def get_config():
    config = base()
    config.model.name = "Qwen/Qwen2.5-7B-Instruct"
    config.model.compute_dtype = "bfloat16"
    config.model.engine_dtype = "bfloat16"
    config.model.chunk = 1024
    config.model.memory = 0.0

    config.algorithm.name = "grpo"
    config.optimizer.learning_rate = 1e-6
    config.mesh.fsdp = 2
    config.mesh.context = 8
    config.batch.rows = 2
    config.batch.length = 32768
    config.sampling.context = 32768
    return config

"""Qwen2.5-72B at 131,072 tokens, YaRN x4: GRPO on 256 v5p chips. Sized by `metagym doctor --compile`.

AdamW with f32 master weights, bf16 products, splash attention, a chunked head, sixteen packed rows a step;
the layers' inputs wait for the backward pass on the host, 21.5 GB of each chip.
With 128 or 64 chips: mesh.fsdp and batch.rows 8 or 4. docs/scale.md has what it takes of each chip.
Time: not run on such a machine. Expected: that it fits; nothing is known of what it learns.
Command: metagym doctor --compile=scale_qwen25_72b --topology=v5p:8x8x4; on the machine itself
make train CONFIG=experiments/configs/scale_qwen25_72b.py
"""

from metagym.experiments.config import base


def get_config():
    config = base()
    config.model.name = "Qwen/Qwen2.5-72B-Instruct"
    config.model.yarn = 4.0
    config.model.compute_dtype = "bfloat16"
    config.model.engine_dtype = "bfloat16"
    config.model.chunk = 512
    config.model.memory = 0.0
    config.model.offload = True

    config.algorithm.name = "grpo"
    config.optimizer.learning_rate = 1e-6
    config.mesh.fsdp = 16
    config.mesh.context = 16
    config.batch.rows = 16
    config.batch.length = 131072
    config.sampling.context = 131072
    return config

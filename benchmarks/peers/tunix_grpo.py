"""One GRPO step of Tunix's GRPOLearner: a prompt, 8 completions of 64 tokens, all weights trained.

Runs in an environment of its own (benchmarks/requirements/tunix.txt).
Prints a line of JSON: seconds of each step, CPU seconds, peak resident memory in GB.
"""

import json
import resource
import sys
import time
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from transformers import AutoTokenizer
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params
from tunix.rl import rl_cluster as rl
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

model_dir, steps, prompt, workdir = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
precision = (
    sys.argv[5] if len(sys.argv) > 5 else "float32"
)  # of weights, moments and products: Tunix has one for all
config = json.loads(Path(f"{model_dir}/config.json").read_text())
mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
tokenizer = AutoTokenizer.from_pretrained(model_dir)


def now():
    return time.perf_counter(), time.process_time()


times = [now()]


def reward(prompts, completions, **kwargs):
    return [float(len(c) % 7) for c in completions]


shape = llama.ModelConfig(
    num_layers=config["num_hidden_layers"],
    vocab_size=config["vocab_size"],
    embed_dim=config["hidden_size"],
    hidden_dim=config["intermediate_size"],
    num_heads=config["num_attention_heads"],
    head_dim=config["hidden_size"] // config["num_attention_heads"],
    num_kv_heads=config["num_key_value_heads"],
    rope_theta=int(config["rope_theta"]),
    norm_eps=config["rms_norm_eps"],
    weight_tying=config["tie_word_embeddings"],
)
with mesh:
    model = params.create_model_from_safe_tensors(model_dir, shape, mesh, dtype=jnp.dtype(precision))
    cluster = rl.RLCluster(
        actor=model,
        reference=None,
        tokenizer=tokenizer,
        cluster_config=rl.ClusterConfig(
            role_to_mesh={rl.Role.ACTOR: mesh, rl.Role.REFERENCE: mesh, rl.Role.ROLLOUT: mesh},
            rollout_engine="vanilla",
            training_config=rl.RLTrainingConfig(
                actor_optimizer=optax.adamw(1e-6), eval_every_n_steps=1000, max_steps=steps + 1
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=64,
                max_prompt_length=32,
                kv_cache_size=128,
                temperature=1.0,
                top_p=1.0,
                top_k=None,
                eos_tokens=[config["vocab_size"] - 1],  # an id that is never sampled: 64 tokens each
            ),
        ),
    )
    learner = GRPOLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(num_generations=8, num_iterations=1, beta=0.0, epsilon=0.2),
        reward_fns=reward,
    )
    generate = cluster.generate

    def timed(*args, **kwargs):  # a step begins with its generation
        times.append(now())
        return generate(*args, **kwargs)

    cluster.generate = timed
    learner.train([{"prompts": np.asarray([prompt])} for _ in range(steps + 1)])
    jax.block_until_ready(nnx.state(cluster.actor_trainer.model))
times.append(now())
seconds, cpu = ([b[i] - a[i] for a, b in pairwise(times[1:])][1:] for i in (0, 1))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
print(json.dumps({"seconds": seconds, "cpu": cpu, "peak_gb": peak}))

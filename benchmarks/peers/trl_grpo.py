"""One GRPO step of TRL's GRPOTrainer: a prompt, 8 completions of 64 tokens, all weights trained.

Runs in an environment of its own (benchmarks/requirements/trl.txt).
Prints a line of JSON: seconds of each step, CPU seconds, peak resident memory in GB.
"""

import json
import resource
import sys
import time
from itertools import pairwise

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

model_dir, steps, prompt, workdir = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
precision = sys.argv[5] if len(sys.argv) > 5 else "float32"
torch.set_num_threads(2)


def now():
    return time.perf_counter(), time.process_time()


class Clock(TrainerCallback):
    def __init__(self):
        self.times = [now()]

    def on_step_end(self, args, state, control, **kwargs):
        self.times.append(now())


def reward(completions, **kwargs):
    return [float(len(c) % 7) for c in completions]


clock = Clock()
tokenizer = AutoTokenizer.from_pretrained(model_dir)
trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
    processing_class=tokenizer,
    reward_funcs=reward,
    train_dataset=Dataset.from_list([{"prompt": prompt}] * (8 * (steps + 2))),
    args=GRPOConfig(
        output_dir=workdir,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=64,
        generation_kwargs={"min_new_tokens": 64},
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        max_steps=steps + 1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=precision == "bfloat16",
        use_cpu=True,
        gradient_checkpointing=False,
    ),
    callbacks=[clock],
)
trainer.train()
seconds, cpu = ([b[i] - a[i] for a, b in pairwise(clock.times)][1:] for i in (0, 1))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
print(json.dumps({"seconds": seconds, "cpu": cpu, "peak_gb": peak}))

"""PyTorch on the same work as metagym's model: a train step, decoding, prefill.

Runs in an environment of its own (benchmarks/requirements/torch.txt).
Usage: torch_model.py MODEL_DIR {train,decode,prefill} {float32,bfloat16} REPEATS BATCH LENGTH
Prints a line of JSON: seconds of each repeat, CPU seconds, peak resident memory in GB.
"""

import json
import resource
import sys
import time

import torch
from transformers import AutoModelForCausalLM

model_dir, task, precision, repeats, batch, length = *sys.argv[1:4], *map(int, sys.argv[4:7])
torch.set_num_threads(2)
torch.manual_seed(0)
autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16")
model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
tokens = torch.randint(0, model.config.vocab_size, (batch, length))
seconds, cpu = [], []
if task == "train":
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    for _ in range(repeats + 1):
        start, start_cpu = time.perf_counter(), time.process_time()
        with autocast:
            model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
else:
    if precision == "bfloat16":
        model = model.to(torch.bfloat16)
    with torch.inference_mode():
        for _ in range(repeats + 1):
            if task == "prefill":
                start, start_cpu = time.perf_counter(), time.process_time()
                model(tokens, use_cache=True, logits_to_keep=1)
                seconds.append(time.perf_counter() - start)
                cpu.append(time.process_time() - start_cpu)
            else:  # 64 tokens each, sampled at temperature 1 with their log-probabilities, after `length`
                out = model(tokens, use_cache=True, logits_to_keep=1)
                start, start_cpu = time.perf_counter(), time.process_time()
                for _ in range(64):
                    logp = torch.log_softmax(out.logits[:, -1].float(), -1)
                    chosen = torch.multinomial(logp.exp(), 1)
                    logp.gather(1, chosen)
                    out = model(chosen, past_key_values=out.past_key_values, use_cache=True)
                seconds.append(time.perf_counter() - start)
                cpu.append(time.process_time() - start_cpu)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
print(json.dumps({"seconds": seconds[1:], "cpu": cpu[1:], "peak_gb": peak}))

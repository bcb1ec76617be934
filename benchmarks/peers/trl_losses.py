"""TRL's own loss code on given batches: trl_losses.py BATCHES.npz RESULTS.npz.

A trainer's `_compute_loss` is called with a stand-in for the trainer that has the options it reads, and gives
it the log-probs and entropies of the batch in place of a model's.
"""

import collections
import sys
from types import SimpleNamespace

import numpy as np
import torch
from trl import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

CONSTANT = 16

accelerator = SimpleNamespace(
    num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
)


def grpo(loss_type: str, low: float = 0.2, high: float = 0.28, **more):
    """A case: (batch) -> the loss, a function of batch["l"]. `more` are attributes of the trainer."""

    def run(b):
        trainer = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (b["l"], b["entropy"], None),
            aux_loss_enabled=False,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=more.get("off_policy_mask_threshold"),
            get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
            importance_sampling_level=more.get("importance_sampling_level", "token"),
            beta=more.get("beta", 0.0),
            epsilon_low=low,
            epsilon_high=high,
            loss_type=loss_type,
            use_vllm="weights" in more,
            vllm_importance_sampling_correction="weights" in more,
            args=SimpleNamespace(
                delta=more.get("delta"), use_bias_correction_kl=False, steps_per_generation=1
            ),
            model=SimpleNamespace(training=True),
            current_gradient_accumulation_steps=1.0,
            accelerator=accelerator,
            max_completion_length=CONSTANT,
            _entropy_bonus_enabled="entropy_coef" in more,
            entropy_coef=more.get("entropy_coef", 0.0),
            use_adaptive_entropy=False,
            _metrics={"train": collections.defaultdict(list)},
        )
        ids = torch.zeros_like(b["mask"], dtype=torch.long)
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": torch.ones_like(ids[:, :1]),
            "completion_ids": ids,
            "completion_mask": b["mask"],
            "advantages": b["advantages"],
            "old_per_token_logps": b["o"],
            "sampling_per_token_logps": b["q"],
            "ref_per_token_logps": b["ref"],
            "num_items_in_batch": b["mask"].sum(),
        }
        if "weights" in more:
            inputs["importance_sampling_ratio"] = more["weights"](torch.exp((b["o"] - b["q"]) * b["mask"]))
        return GRPOTrainer._compute_loss(trainer, None, inputs)

    return run


def rloo(b):
    """On policy: its ratio is of a sequence's probability, ours of a token's."""
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (b["l"], b["entropy"], None),
        aux_loss_enabled=False,
        epsilon_low=0.2,
        epsilon_high=0.28,
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        _metrics={"train": collections.defaultdict(list)},
    )
    ids = torch.zeros_like(b["mask"], dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": b["mask"],
        "advantages": b["advantages"],
        "old_logps": (b["l"].detach() * b["mask"]).sum(1),
    }
    return RLOOTrainer._compute_loss(trainer, None, inputs)


CASES = {
    "ppo token-mean": grpo("dapo"),
    "ppo token-mean, bnpo": grpo("bnpo"),
    "ppo seq-mean-token-mean": grpo("grpo"),
    "ppo constant": grpo("dr_grpo"),
    "dual token-mean": grpo("dapo", delta=3.0),
    "gspo seq-mean-token-mean": grpo("grpo", 0.05, 0.08, importance_sampling_level="sequence"),
    "cispo token-mean": grpo("cispo", high=5.0),
    "k3 in the loss, seq-mean-token-mean": grpo("grpo", beta=0.1),
    "entropy bonus, token-mean": grpo("dapo", entropy_coef=0.1),
    "tis token-mean": grpo("dapo", weights=lambda w: w.clamp(max=2.0)),
    "icepop token-mean": grpo("dapo", weights=lambda w: w.masked_fill((w < 0.5) | (w > 5.0), 0.0)),
    "off_policy_mask token-mean": grpo("dapo", off_policy_mask_threshold=0.05),
    "rloo on policy seq-mean-token-sum": rloo,
}


def main(source: str, target: str) -> None:
    data = np.load(source)
    results = {}
    for dtype in (torch.float64, torch.float32):
        for name, case in CASES.items():
            losses, grads = [], []
            for i in range(len(data["l"])):
                b = {k: torch.tensor(data[k][i], dtype=dtype) for k in data.files if k != "group"}
                b["l"].requires_grad_(True)
                out = case(b)
                out.backward()
                losses.append(out.item())
                grads.append(b["l"].grad.numpy())
            results[f"{name}/loss/{str(dtype)[-2:]}"] = np.array(losses)
            results[f"{name}/gradient/{str(dtype)[-2:]}"] = np.array(grads)
    np.savez(target, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])

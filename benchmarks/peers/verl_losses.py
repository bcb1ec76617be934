"""verl's own loss and advantage code on given batches: verl_losses.py BATCHES.npz RESULTS.npz."""

import sys

import numpy as np
import torch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.workers.config import ActorConfig

OFF = 1e30  # a dual clip that never binds
CONSTANT = 16.0


class Config(dict):
    """What an advantage function reads of its config."""

    gamma = 1.0


def actor(reduction: str, low: float, high: float, dual: float = OFF) -> ActorConfig:
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=dual,
        loss_agg_mode=reduction,
    )
    config.global_batch_info["loss_scale_factor"] = CONSTANT
    return config


REDUCTIONS = {
    "token-mean": "token-mean",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "constant": "seq-mean-token-sum-norm",
}


def policy(loss: str, reduction: str, low: float, high: float, dual: float = OFF, weights=None):
    """A case: (batch) -> the loss, a function of batch["l"]."""
    theirs = REDUCTIONS[reduction]
    config = actor(theirs, low, high, dual)

    def run(b):
        return core_algos.get_policy_loss_fn(loss)(
            b["o"],
            b["l"],
            b["advantages"][:, None].expand_as(b["l"]),
            b["mask"],
            loss_agg_mode=theirs,
            config=config,
            rollout_is_weights=weights(b) if weights else None,
        )[0]

    return run


def importance(level: str, threshold):
    return lambda b: compute_rollout_correction_weights(b["o"] - b["q"], b["mask"], level, threshold)[0]


def kl(name: str):
    def run(b):
        return core_algos.agg_loss(core_algos.kl_penalty(b["l"], b["ref"], name), b["mask"], "token-mean")

    return run


def advantage(name: str, **more):
    def run(b):
        rewards = torch.zeros_like(b["mask"])
        last = b["mask"].shape[1] - 1 - b["mask"].flip(1).argmax(1)
        rewards[torch.arange(len(last)), last] = b["rewards"]
        given = {"token_level_rewards": rewards, "response_mask": b["mask"], "index": b["group"]}
        return core_algos.get_adv_estimator_fn(name)(**given, **more)[0]

    return run


CASES = {
    **{f"ppo {r}": policy("vanilla", r, 0.2, 0.28) for r in REDUCTIONS},
    "dual token-mean": policy("vanilla", "token-mean", 0.2, 0.28, 3.0),
    **{f"gspo {r}": policy("gspo", r, 0.05, 0.08) for r in ("token-mean", "seq-mean-token-mean")},
    "cispo token-mean": policy("cispo", "token-mean", 1.0, 4.0),
    "tis token-mean": policy("vanilla", "token-mean", 0.2, 0.28, weights=importance("token", 2.0)),
    "icepop token-mean": policy("vanilla", "token-mean", 0.2, 0.28, weights=importance("token", "0.5_5.0")),
    "sequence_tis token-mean": policy(
        "vanilla", "token-mean", 0.2, 0.28, weights=importance("sequence", 2.0)
    ),
    "sequence_mask weights": lambda b: compute_rollout_rejection_mask(
        b["o"] - b["q"], b["mask"], "seq_mean_k1", "0.8_1.25"
    )[0],
    **{f"{k} token-mean": kl(k) for k in ("k1", "k2", "k3")},
    "grpo advantages": advantage("grpo"),
    "dr_grpo advantages": advantage("grpo", norm_adv_by_std_in_grpo=False),
    "rloo advantages": advantage("rloo"),
    "reinforce_pp advantages": advantage("reinforce_plus_plus", config=Config()),
    "reinforce_pp baseline advantages": advantage("reinforce_plus_plus_baseline"),
}


def main(source: str, target: str) -> None:
    data = np.load(source)
    results = {}
    for dtype in (torch.float64, torch.float32):
        for name, case in CASES.items():
            losses, grads = [], []
            for i in range(len(data["l"])):
                b = {k: torch.tensor(data[k][i], dtype=dtype) for k in data.files if k != "group"}
                b["group"] = data["group"][i]
                b["l"].requires_grad_(True)
                out = case(b)
                if out.dim():
                    losses.append(out.detach().numpy())
                    continue
                out.backward()
                losses.append(out.item())
                grads.append(b["l"].grad.numpy())
            bits = str(dtype)[-2:]
            results[f"{name}/loss/{bits}"] = np.array(losses)
            if grads:
                results[f"{name}/gradient/{bits}"] = np.array(grads)
    np.savez(target, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])

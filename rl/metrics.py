"""What is written down: metrics.jsonl (the record of truth), episodes, TensorBoard; and the numbers
themselves."""

import math
from collections.abc import Iterable

import numpy as np

from metagym.rl.types import Array, Batch


def wilson(successes: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % interval (Wilson's) of a share of `successes` in `n` trials; (0, 1) for no trials."""
    if n == 0:
        return 0.0, 1.0
    share, zz = successes / n, z * z
    middle = (share + zz / (2 * n)) / (1 + zz / n)
    half = z * math.sqrt(share * (1 - share) / n + zz / (4 * n * n)) / (1 + zz / n)
    return max(0.0, middle - half), min(1.0, middle + half)


@np.errstate(all="ignore")
def distance(trainer: np.ndarray, sampler: np.ndarray) -> dict[str, float]:
    """How far the trainer's log-probs [N] are from the sampler's of the same tokens and weights.

    max, p99 and mean of |difference| in nats, Pearson correlation, and the effective sample size of the
    weights exp(trainer - sampler) as a share of N. Correlation alone is a weak measure.
    """
    trainer, sampler = np.asarray(trainer, np.float64), np.asarray(sampler, np.float64)
    difference = trainer - sampler
    weights = np.exp(np.clip(difference, -20, 20))
    spread = float(trainer.std() * sampler.std())
    covariance = float(np.mean((trainer - trainer.mean()) * (sampler - sampler.mean())))
    return {
        "max": float(np.abs(difference).max()),
        "p99": float(np.quantile(np.abs(difference), 0.99)),
        "mean": float(np.abs(difference).mean()),
        "pearson": covariance / spread if spread > 0 else float(np.array_equal(trainer, sampler)),
        "ess": float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum())),
    }


@np.errstate(all="ignore")
def token_metrics(seen: Iterable[tuple[Batch, Array, Array, Array]]) -> dict[str, float]:
    """Metrics over the trained tokens of micro-batches; each is (batch, logprobs, entropy, clipped [B, L]).

    A token that stands for n equal ones counts n times. Empty if nothing was trained.
    """
    columns: list[np.ndarray] = []
    for batch, logprobs, entropy, clipped in seen:
        on = np.asarray(batch.mask) > 0
        fields = (logprobs, batch.old_logprobs, batch.behavior_logprobs, batch.ref_logprobs, entropy, clipped)
        values = np.stack([np.asarray(x, np.float64)[on] for x in fields])
        columns.append(np.repeat(values, np.asarray(batch.mask)[on].astype(np.int64), axis=1))
    if not sum(c.shape[1] for c in columns):
        return {}
    l, o, q, ref, entropy, clipped = np.concatenate(columns, axis=1)
    ratio = np.exp(l - o)
    metrics = {
        "policy/entropy": float(entropy.mean()),
        "policy/clip_fraction": float(clipped.mean()),
        "policy/ratio_min": float(ratio.min()),
        "policy/ratio_mean": float(ratio.mean()),
        "policy/ratio_max": float(ratio.max()),
        "policy/kl_old": float(np.mean(ratio - 1 - (l - o))),
    }
    if not np.isnan(ref).all():
        metrics["policy/kl_ref"] = float(np.mean(np.exp(ref - l) - 1 - (ref - l)))
    return metrics | {f"sampler/{name}": value for name, value in distance(o, q).items()}

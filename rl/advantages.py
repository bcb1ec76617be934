"""Advantages of one group of episodes, and the penalties that shape a reward. Host side, f64.

Deviations from the papers, by decision:

1. A group whose raw outcomes are all equal gets exactly 0: nothing was learned about the task, and float
   noise in mean and standard deviation (or a length penalty) would otherwise pass for a signal.
2. A group of one gets 0: there is nothing to compare it with.
"""

import numpy as np


def _check(rewards: np.ndarray, outcomes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rewards, outcomes = np.asarray(rewards, np.float64), np.asarray(outcomes, np.float64)
    if rewards.ndim != 1 or rewards.shape != outcomes.shape:
        raise ValueError(
            f"rewards and outcomes of one group are two vectors [N]; got {rewards.shape}, {outcomes.shape}"
        )
    if not (np.all(np.isfinite(rewards)) and np.all(np.isfinite(outcomes))):
        raise ValueError("rewards and outcomes must be finite")
    return rewards, outcomes


def all_equal(outcomes: np.ndarray) -> bool:
    """Whether a group [N] teaches nothing: fewer than two members, or equal raw outcomes."""
    outcomes = np.asarray(outcomes)
    return outcomes.size < 2 or bool(np.all(outcomes == outcomes[0]))


def standardized(rewards: np.ndarray, outcomes: np.ndarray, *, eps: float = 1e-6) -> np.ndarray:
    """GRPO (2402.03300): (R - mean) / (std + eps), std with ddof 1. f64[N] -> f64[N]."""
    rewards, outcomes = _check(rewards, outcomes)
    if all_equal(outcomes):
        return np.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + eps)


def centered(rewards: np.ndarray, outcomes: np.ndarray) -> np.ndarray:
    """Dr.GRPO (2503.20783): R - mean. f64[N] -> f64[N]."""
    rewards, outcomes = _check(rewards, outcomes)
    if all_equal(outcomes):
        return np.zeros_like(rewards)
    return rewards - rewards.mean()


def leave_one_out(rewards: np.ndarray, outcomes: np.ndarray) -> np.ndarray:
    """RLOO (2402.14740): R - mean of the others. f64[N] -> f64[N]."""
    rewards, outcomes = _check(rewards, outcomes)
    n = len(rewards)
    if all_equal(outcomes):
        return np.zeros_like(rewards)
    return (rewards - rewards.mean()) * (n / (n - 1))


def length_penalty(steps: int, *, threshold: int, maximum: int) -> float:
    """Nebius (2508.03501): 0 below `threshold` steps, then linear to -1 at `maximum`. Added to the reward."""
    return 0.0 if steps < threshold else (threshold - steps) / (maximum - threshold)


def overlong_penalty(tokens: int, *, maximum: int, cache: int) -> float:
    """DAPO (2503.14476): 0 up to `maximum - cache` tokens, then linear to -1 at `maximum`. Added to the
    reward."""
    return min(0.0, max(-1.0, (maximum - cache - tokens) / cache))

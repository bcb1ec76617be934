"""Our losses and advantages beside TRL's and verl's own code, on random batches.

    python benchmarks/conformance/losses.py            1,000 batches, both peers; prints the table
    python benchmarks/conformance/losses.py --write    and puts it into docs/algorithms.md

Each peer lives in an environment of its own, .venv-bench-<peer>, made when it is first needed from
benchmarks/requirements/<peer>.txt; BENCH_TRL, BENCH_VERL=/path/to/python name one that exists. Losses,
gradients with respect to the log-probs, and advantages are compared in float64 and float32; a difference
above the tolerance fails. Where conventions differ, options are chosen with which they don't: the table says
so, and docs/algorithms.md which convention is ours.
"""

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))

from run import python_of  # noqa: E402

from metagym.rl import advantages, losses  # noqa: E402
from metagym.rl.algorithms import cispo, grpo, gspo, reinforce_pp, rft, rloo  # noqa: E402
from metagym.rl.batching import empty_batch  # noqa: E402
from metagym.rl.losses import loss_terms, token_weights  # noqa: E402
from metagym.rl.types import Algorithm, LossInputs  # noqa: E402

PAGE = HERE.parent / "docs" / "algorithms.md"
BEGIN, END = "<!-- conformance: begin -->\n", "<!-- conformance: end -->"
IN_F32 = 1e-5
COUNTS = {"note": "they add 1e-8 to counts", "tolerance": 1e-8}
GROUPS, SIZE, LENGTH = 3, 4, 16
PEERS = ("TRL", "verl")
WIDE = {"clip_low": 0.05, "clip_high": 0.08}
CLIP = {"clip": 0.2, "clip_high": 0.28}


def random_batches(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Ragged batches [count, B, L] of groups whose rewards differ; masks have holes, as of several turns."""
    rng = np.random.default_rng(seed)
    rows = GROUPS * SIZE
    shape = (count, rows, LENGTH)
    lengths = rng.integers(1, LENGTH + 1, (count, rows, 1))
    mask = (np.arange(LENGTH) < lengths) & (rng.random(shape) < 0.7)
    mask[..., 0] |= ~mask.any(-1)  # every sequence has a trained token
    o = -rng.exponential(1.0, shape)
    rewards = np.where(
        rng.random((count, 1)) < 0.5, rng.integers(0, 2, (count, rows)), rng.normal(size=(count, rows))
    )
    grouped = rewards.reshape(count, GROUPS, SIZE)
    grouped[..., 0] += np.ptp(grouped, axis=-1) == 0
    rewards = grouped.reshape(count, rows)
    values = [[advantages.standardized(group, group) for group in batch] for batch in grouped]
    l = np.minimum(o + rng.normal(scale=0.7, size=shape), -1e-3)
    return {
        "l": l,
        "o": o,
        "q": np.minimum(o + rng.normal(scale=0.9, size=shape), -1e-3),
        "ref": np.clip(np.minimum(o + rng.normal(scale=0.5, size=shape), -1e-3), l - 2, l + 2),  # k3 below 10
        "entropy": rng.exponential(1.0, shape),
        "mask": mask.astype(np.float64),
        "rewards": rewards,
        "group": np.tile(np.arange(rows) // SIZE, (count, 1)),
        "advantages": np.array(values).reshape(count, rows),
    }


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the table: `theirs` names a case of the peer's script."""

    theirs: str
    ours: Callable[[dict[str, np.ndarray], Any], dict[str, np.ndarray]]
    name: str
    reduction: str
    note: str = ""
    tolerance: float = 1e-12  # in float64


def loss_of(algorithm: Algorithm, *, on_policy: bool = False, value: bool = True) -> Callable[..., Any]:
    """(batches, dtype) -> losses [N] and gradients [N, B, L] with respect to the log-probs."""

    def run(data: dict[str, np.ndarray], dtype: Any) -> dict[str, np.ndarray]:
        rows = data["mask"].shape[1]
        sequence = np.arange(rows)[:, None].repeat(LENGTH, 1)
        weights = np.stack(
            [
                token_weights(m > 0, sequence, algorithm.reduction, constant=algorithm.constant)
                for m in data["mask"]
            ]
        )

        def one(l: Any, o: Any, q: Any, ref: Any, entropy: Any, mask: Any, a: Any, w: Any) -> Any:
            batch = dataclasses.replace(
                empty_batch(rows, LENGTH),
                mask=mask,
                weight=w,
                advantages=jnp.broadcast_to(a[:, None], l.shape),
                behavior_logprobs=q,
                old_logprobs=o,
                ref_logprobs=ref,
                segments=np.ones((rows, LENGTH), np.int32),
            )
            return loss_terms(algorithm, l, entropy, batch, on_policy)[0]

        names = ("l", "o", "q", "ref", "entropy", "mask", "advantages")
        arrays = [jnp.asarray(data[n], dtype) for n in names]
        found, gradient = jax.jit(jax.vmap(jax.value_and_grad(one)))(*arrays, jnp.asarray(weights, dtype))
        out = {"gradient": np.asarray(gradient)}
        return out | {"loss": np.asarray(found)} if value else out

    return run


def advantages_of(algorithm: Algorithm) -> Callable[..., Any]:
    """(batches, dtype) -> advantages of the trained tokens [N, B, L]. Ours are float64 whatever the dtype."""

    def run(data: dict[str, np.ndarray], dtype: Any) -> dict[str, np.ndarray]:
        found = []
        for rewards, mask in zip(data["rewards"].astype(dtype).astype(np.float64), data["mask"], strict=True):
            groups = rewards.reshape(GROUPS, SIZE)
            values = np.concatenate([algorithm.advantages(g, g) for g in groups])[:, None] * np.ones(LENGTH)
            on = mask > 0
            if algorithm.whiten:
                values[on] = advantages.whitened(values[on])
            found.append(np.where(on, values, 0.0))
        return {"loss": np.array(found)}

    return run


def mask_of(data: dict[str, np.ndarray], dtype: Any) -> dict[str, np.ndarray]:
    """The tokens that our sequence mask leaves."""
    found = []
    for o, q, mask in zip(data["o"], data["q"], data["mask"], strict=True):
        o, q = (np.where(mask > 0, x, 0.0).astype(dtype) for x in (o, q))
        arrays = (o, o, q, o, mask > 0, np.ones(mask.shape, np.int32))
        keep = losses.sequence_mask(LossInputs(*map(jnp.asarray, arrays)), low=0.8, high=1.25)
        found.append(np.asarray(keep) * mask)
    return {"loss": np.array(found)}


def _ppo(reduction: Any, **more: Any) -> Callable[..., Any]:
    return loss_of(grpo(**CLIP, reduction=reduction, **more))


TIS = {"correction": losses.truncated_importance}
ICEPOP = {"correction": losses.icepop}


def kl_of(kl: Any) -> Callable[..., Any]:
    """The KL term alone: the algorithm without its policy loss."""

    def nothing(x: LossInputs) -> tuple[jax.Array, jax.Array]:
        return 0.0 * x.logprobs, 0.0 * x.logprobs

    return loss_of(dataclasses.replace(rft(), policy_loss=nothing, kl=kl, kl_coef=1.0))


CASES: dict[str, tuple[Case, ...]] = {
    "TRL": (
        Case("ppo token-mean", _ppo("token-mean"), "GRPO, DAPO", "token-mean", "`dapo`"),
        Case(
            "ppo token-mean, bnpo", _ppo("token-mean"), "GRPO, DAPO", "token-mean", "`bnpo`, one micro-batch"
        ),
        Case("ppo seq-mean-token-mean", _ppo("seq-mean-token-mean"), "GRPO", "seq-mean-token-mean", "`grpo`"),
        Case("ppo constant", _ppo("constant", constant=16), "Dr.GRPO", "constant", "`dr_grpo`"),
        Case("dual token-mean", _ppo("token-mean", dual=3.0), "dual clip 3", "token-mean", "`delta`"),
        Case(
            "gspo seq-mean-token-mean",
            loss_of(gspo(**WIDE)),
            "GSPO",
            "seq-mean-token-mean",
            "`sequence` level",
        ),
        Case("cispo token-mean", loss_of(cispo()), "CISPO, cap 5", "token-mean"),
        Case(
            "k3 in the loss, seq-mean-token-mean",
            _ppo("seq-mean-token-mean", kl_coef=0.1),
            "GRPO with k3",
            "seq-mean-token-mean",
        ),
        Case(
            "entropy bonus, token-mean",
            _ppo("token-mean", entropy_coef=0.1),
            "GRPO with entropy",
            "token-mean",
            "theirs is a token-mean whatever the loss's",
        ),
        Case("tis token-mean", _ppo("token-mean", **TIS), "TIS, cap 2", "token-mean", "weights given"),
        Case("icepop token-mean", _ppo("token-mean", **ICEPOP), "IcePop", "token-mean", "weights given"),
        Case(
            "off_policy_mask token-mean",
            _ppo("token-mean", correction=partial(losses.off_policy_mask, bound=0.05)),
            "off-policy mask",
            "token-mean",
        ),
        Case(
            "rloo on policy seq-mean-token-sum",
            loss_of(rloo(), on_policy=True, value=False),
            "RLOO",
            "seq-mean-token-sum",
            "gradient on policy: its ratio is of the sequence",
        ),
    ),
    "verl": (
        Case("ppo token-mean", _ppo("token-mean"), "GRPO, DAPO", "token-mean"),
        Case("ppo seq-mean-token-mean", _ppo("seq-mean-token-mean"), "GRPO", "seq-mean-token-mean", **COUNTS),
        Case("ppo seq-mean-token-sum", _ppo("seq-mean-token-sum"), "RLOO", "seq-mean-token-sum"),
        Case("ppo constant", _ppo("constant", constant=16), "Dr.GRPO", "constant"),
        Case("dual token-mean", _ppo("token-mean", dual=3.0), "dual clip 3", "token-mean"),
        Case("gspo seq-mean-token-mean", loss_of(gspo(**WIDE)), "GSPO", "seq-mean-token-mean", **COUNTS),
        Case("gspo token-mean", loss_of(gspo(**WIDE, reduction="token-mean")), "GSPO", "token-mean"),
        Case(
            "cispo token-mean", loss_of(cispo()), "CISPO, cap 5", "token-mean", "their bounds set to [0, 5]"
        ),
        Case("tis token-mean", _ppo("token-mean", **TIS), "TIS, cap 2", "token-mean"),
        Case("icepop token-mean", _ppo("token-mean", **ICEPOP), "IcePop", "token-mean"),
        Case(
            "sequence_tis token-mean",
            _ppo("token-mean", correction=losses.sequence_importance),
            "sequence TIS, cap 2",
            "token-mean",
        ),
        Case("sequence_mask weights", mask_of, "sequence mask", "the mask itself"),
        *(Case(f"{k} token-mean", kl_of(getattr(losses, k)), k, "token-mean") for k in ("k1", "k2", "k3")),
        Case("grpo advantages", advantages_of(grpo()), "GRPO", "advantages"),
        Case(
            "dr_grpo advantages",
            advantages_of(dataclasses.replace(grpo(), advantages=advantages.centered)),
            "Dr.GRPO",
            "advantages",
        ),
        Case("rloo advantages", advantages_of(rloo()), "RLOO", "advantages"),
        Case("reinforce_pp advantages", advantages_of(reinforce_pp()), "REINFORCE++", "advantages", **COUNTS),
        Case(
            "reinforce_pp baseline advantages",
            advantages_of(reinforce_pp(baseline=True)),
            "REINFORCE++, baseline",
            "advantages",
            **COUNTS,
        ),
    ),
}


def theirs(peer: str, data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the peer's script makes of the batches."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "batches.npz", Path(folder) / "results.npz"
        np.savez(source, **data)  # pyright: ignore
        script = HERE / "peers" / f"{peer.lower()}_losses.py"
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [python_of(peer.lower()), script, source, target], env=env, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{script.name} failed:\n{done.stderr[-3000:]}")
        return dict(np.load(target))


def difference(ours: np.ndarray, their: np.ndarray) -> float:
    """The largest absolute difference; of numbers above 1, relative to them."""
    ours, their = np.asarray(ours, np.float64), np.asarray(their, np.float64)
    assert ours.shape == their.shape, (ours.shape, their.shape)
    return float(np.max(np.abs(ours - their) / np.maximum(1.0, np.abs(their))))


def row(peer: str, case: Case, data: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> tuple[str, bool]:
    """A line of the table, and whether all its differences are within the tolerance."""
    cells, fine = [], True
    for bits, dtype in (("64", np.float64), ("32", np.float32)):
        mine = case.ours(data, dtype)
        for what in ("loss", "gradient"):
            if what not in mine:
                cells.append("")
                continue
            worst = difference(mine[what], found[f"{case.theirs}/{what}/{bits}"])
            fine &= worst <= (case.tolerance if bits == "64" else IN_F32)
            cells.append(f"{worst:.0e}" if worst else "0")
    return f"| {peer} | {case.name} | {case.reduction} | {' | '.join(cells)} | {case.note} |", fine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_platforms", "cpu")
    data = random_batches(options.batches)
    head = "| | algorithm | reduction | loss, f64 | gradient, f64 | loss, f32 | gradient, f32 | |"
    lines, wrong = [head, "|---|---|---|---|---|---|---|---|"], 0
    for peer in PEERS:
        found = theirs(peer, data)
        for case in CASES[peer]:
            line, fine = row(peer, case, data, found)
            wrong += not fine
            lines.append(line)
            print(line, "" if fine else "  <-- differs", flush=True)
    if options.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}" + "\n".join(lines) + "\n" + END + rest.partition(END)[2])
    if wrong:
        raise SystemExit(f"{wrong} comparisons differ by more than their tolerance")


if __name__ == "__main__":
    main()

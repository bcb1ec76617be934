"""From episodes to packed rows. The one next-token shift of this library is here.

Rules:

- A token trace of T tokens is one segment of at most T - 1 positions: the last token is only a target. What
  follows the last trained target is cut off; causal attention never lets it matter.
- A trace without a trained token gives no row; a failed episode (stop reason not in the loss) gives none
  either.
- An episode with a trace longer than a row is left out whole, and counted: training a part of it would credit
  half of what was done. Its reward still counts in its group's baseline.
- Equal segments may be merged into one: the losses are positively homogeneous in the advantage, so segments
  that agree in everything but the size of their advantage have together the loss of one with the summed
  advantage.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from metagym.errors import InputError
from metagym.rl.advantages import whitened
from metagym.rl.losses import token_weights
from metagym.rl.types import Advantage, Algorithm, Batch, SelectFn
from metagym.types import Group, TokenTrace


@dataclass(frozen=True)
class Segment:
    """One shifted trace: what stands at each of its positions. All arrays `[n]`, routing `[n, R]`."""

    tokens: np.ndarray  # i32
    targets: np.ndarray  # i32
    mask: np.ndarray  # f32: how many sampled tokens the target stands for
    weight: np.ndarray  # f64: share in the loss
    advantages: np.ndarray  # f64
    behavior_logprobs: np.ndarray  # f32, NaN off the mask
    turn: np.ndarray  # i32
    version: np.ndarray  # i32, -1 where it was not sampled
    routing: np.ndarray  # i32
    rollout: Any  # int; i32[n] where the segment is a tree
    positions: np.ndarray  # i32: 0, 1, 2, ..., in a tree along each branch
    part: np.ndarray  # i32: 0, in a tree 0 for the shared prompt and 1, 2, ... for its branches

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Packed:
    """The batch of one training step. Every micro-batch has the shape [rows, length], whatever their
    number."""

    minibatches: tuple[tuple[Batch, ...], ...]  # one update each; numpy arrays; a minibatch may be empty
    metrics: Mapping[str, float]


def shift(trace: TokenTrace, advantage: Advantage, rollout: int) -> Segment | None:
    """The segment of a trace, weight 0 so far; None if nothing of it is trained.

    Position t holds token t and asks for token t + 1, and holds what belongs to token t + 1. `advantage` is
    one number, or f64[C] with one for each model call, found by `trace.turn`. Raises InputError if a trained
    token is of a call that has none.
    """
    trained = np.flatnonzero(trace.trainable[1:])
    if trained.size == 0:
        return None
    n = int(trained[-1]) + 1
    mask = np.asarray(trace.trainable[1 : n + 1], bool)
    return Segment(
        tokens=np.asarray(trace.tokens[:n], np.int32),
        targets=np.asarray(trace.tokens[1 : n + 1], np.int32),
        mask=mask.astype(np.float32),
        weight=np.zeros(n, np.float64),
        advantages=_of_tokens(advantage, trace.turn[1 : n + 1], mask),
        behavior_logprobs=np.where(mask, trace.logprobs[1 : n + 1], np.nan).astype(np.float32),
        turn=np.asarray(trace.turn[1 : n + 1], np.int32),
        version=np.asarray(trace.version[1 : n + 1], np.int32),
        routing=np.asarray(trace.routing[:n], np.int32),
        rollout=rollout,
        positions=np.arange(n, dtype=np.int32),
        part=np.zeros(n, np.int32),
    )


def _of_tokens(advantage: Advantage, calls: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The advantage of each token, 0 off the mask. f64[n]."""
    advantage = np.asarray(advantage, np.float64)
    if advantage.ndim > 1:
        raise InputError(f"an advantage is a number or f64[calls]; got an array {advantage.shape}")
    values = np.zeros(len(mask), np.float64)
    if (
        advantage.ndim == 1
        and mask.any()
        and not 0 <= calls[mask].min() <= calls[mask].max() < len(advantage)
    ):
        raise InputError(
            f"there are advantages for {len(advantage)} model calls, and a trained token is of call "
            f"{calls[mask].max()}"
        )
    values[mask] = advantage[calls[mask]] if advantage.ndim else advantage
    return values


def segments(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[Advantage] | np.ndarray],
    length: int,
    *,
    first_rollout: int = 0,
    select: SelectFn | None = None,
) -> tuple[list[Segment], dict[str, float]]:
    """All segments of the groups' episodes, in order, and counts of what was left out.

    `advantages[g][m]` is the advantage of member m of group g: a number, shared by all its traces, or f64[C],
    one for each of its model calls. That of an episode that is not in the loss is not read. `select` says
    what of an episode is trained, or None.
    """
    found: list[Segment] = []
    counts = {"overflow": 0, "untrained": 0, "failed": 0, "rejected": 0}
    rollout = first_rollout
    for group, values in zip(groups, advantages, strict=True):
        for trajectory, advantage in zip(group.trajectories, values, strict=True):
            chosen = trajectory if select is None or not trajectory.stop.in_loss else select(trajectory)
            traces = chosen.traces if chosen is not None and trajectory.stop.in_loss else ()
            own = [s for t in traces if (s := shift(t, advantage, rollout)) is not None]
            if not trajectory.stop.in_loss:
                counts["failed"] += 1
            elif chosen is None:
                counts["rejected"] += 1
            elif any(len(s) > length for s in own):
                counts["overflow"] += 1
            elif not own:
                counts["untrained"] += 1
            else:
                found += own
            rollout += 1
    return found, {k: float(v) for k, v in counts.items()}


def weigh(found: Sequence[Segment], algorithm: Algorithm) -> list[Segment]:
    """The segments of one minibatch with each token's share in its loss."""
    if not found:
        return []
    mask = np.concatenate([s.mask > 0 for s in found])
    sequence = np.repeat([s.rollout for s in found], [len(s) for s in found])
    weights = token_weights(mask, sequence, algorithm.reduction, constant=algorithm.constant)
    cuts = np.cumsum([len(s) for s in found])[:-1]
    return [dataclasses.replace(s, weight=w) for s, w in zip(found, np.split(weights, cuts), strict=True)]


def whiten(found: Sequence[Segment]) -> list[Segment]:
    """The segments of a step with their advantages normalised over all its trained tokens."""
    if not found:
        return []
    masks = [s.mask > 0 for s in found]
    values = whitened(np.concatenate([s.advantages[m] for s, m in zip(found, masks, strict=True)]))
    cuts = np.cumsum([m.sum() for m in masks])[:-1]

    def with_values(s: Segment, mask: np.ndarray, own: np.ndarray) -> Segment:
        advantages = np.zeros_like(s.advantages)
        advantages[mask] = own
        return dataclasses.replace(s, advantages=advantages)

    return [with_values(*x) for x in zip(found, masks, np.split(values, cuts), strict=True)]


def merge(found: Sequence[Segment], *, match_behavior: bool = True) -> list[Segment]:
    """Merges segments that agree in tokens, mask, routing, behavior log-probs and the sign of every
    advantage.

    The merged one counts them in `mask`, sums their weights and means their advantages under the weights, so
    that loss and gradient are those of all of them: a loss f with f(c A) = c f(A) for c >= 0 has sum w_i
    f(A_i) = f(sum w_i A_i) for A_i of one sign. Old log-probs are a function of the tokens, so they agree
    too.

    `match_behavior=False` ignores the behavior log-probs: right for an algorithm without a correction, whose
    loss does not read them; the first one's stay, and the distance to the sampler is measured on those. The
    first one's `turn` and `version`, which no loss reads, stay in any case.
    """
    merged: dict[tuple[bytes, ...], list[Segment]] = {}
    for s in found:
        arrays = (s.tokens, s.targets, s.mask > 0, np.sign(s.advantages).astype(np.int8), s.routing)
        key = tuple(a.tobytes() for a in arrays) + (
            (s.behavior_logprobs.tobytes(),) if match_behavior else ()
        )
        merged.setdefault(key, []).append(s)
    return [same[0] if len(same) == 1 else _sum(same) for same in merged.values()]


def _sum(same: Sequence[Segment]) -> Segment:
    weight = np.sum([s.weight for s in same], axis=0)
    total = np.sum([s.weight * s.advantages for s in same], axis=0)
    return dataclasses.replace(
        same[0],
        mask=np.sum([s.mask for s in same], axis=0, dtype=np.float32),
        weight=weight,
        advantages=np.divide(total, weight, out=np.zeros_like(total), where=weight > 0),
    )


def share(found: Sequence[Segment], length: int) -> list[Segment]:
    """Joins segments that begin with the same prompt into trees of at most `length` positions: the prompt
    once, then of each segment what begins at its first trained target. What is left alone stays as it is.

    Only for a policy that knows trees (`metagym.models.make_policy`, `trees=True`).
    """
    prompts: dict[tuple[bytes, bytes], list[Segment]] = {}
    for s in found:
        n = _prompt_length(s)
        prompts.setdefault((s.tokens[:n].tobytes(), s.routing[:n].tobytes()), []).append(s)
    trees: list[list[Segment]] = []
    for same in prompts.values():
        n, used = _prompt_length(same[0]), length + 1
        for s in sorted(same, key=_order):
            if used + len(s) - n > length:
                trees.append([])
                used = n
            trees[-1].append(s)
            used += len(s) - n
    return [_tree(members) for members in trees]


def _prompt_length(s: Segment) -> int:
    """Positions before the one whose target is the first that is trained."""
    return int(np.argmax(s.mask > 0))


def _tree(members: Sequence[Segment]) -> Segment:
    n = _prompt_length(members[0])
    if len(members) == 1 or n == 0:
        return members[0]

    def join(name: str) -> np.ndarray:
        values = [
            np.broadcast_to(getattr(s, name), (len(s), *np.shape(getattr(s, name))[1:])) for s in members
        ]
        return np.concatenate([values[0][:n], *(v[n:] for v in values)])

    fields = {f.name: join(f.name) for f in dataclasses.fields(Segment)}
    sizes = [n, *(len(s) - n for s in members)]
    return Segment(**fields | {"part": np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)})


def _order(s: Segment) -> tuple[int, bytes, bytes, bytes, bytes]:
    """Longest first; ties by content, so that the same segments in any order give the same rows."""
    return (
        -len(s),
        s.tokens.tobytes(),
        s.targets.tobytes(),
        s.behavior_logprobs.tobytes(),
        (s.weight * s.advantages).tobytes(),
    )


def fill_rows(found: Sequence[Segment], length: int, *, align: int = 1) -> list[list[tuple[int, Segment]]]:
    """First-fit decreasing: rows of (start, segment), every start a multiple of `align`.

    Raises InputError for a segment longer than a row.
    """
    rows: list[list[tuple[int, Segment]]] = []
    used: list[int] = []
    for s in sorted(found, key=_order):
        if len(s) > length:
            raise InputError(f"a segment of {len(s)} positions does not fit into rows of length {length}")
        size = -(-len(s) // align) * align
        row = next((i for i, u in enumerate(used) if u + len(s) <= length), len(rows))
        if row == len(rows):
            rows.append([])
            used.append(0)
        rows[row].append((used[row], s))
        used[row] += size
    return rows


def empty_batch(rows: int, length: int, routing: int = 0) -> Batch:
    """A micro-batch of padding: loss 0, gradient 0. Numpy arrays."""
    shape = (rows, length)
    nan = np.full(shape, np.nan, np.float32)
    return Batch(
        tokens=np.zeros(shape, np.int32),
        targets=np.zeros(shape, np.int32),
        mask=np.zeros(shape, np.float32),
        weight=np.zeros(shape, np.float32),
        advantages=np.zeros(shape, np.float32),
        behavior_logprobs=nan.copy(),
        old_logprobs=nan.copy(),
        ref_logprobs=nan.copy(),
        positions=np.zeros(shape, np.int32),
        segments=np.zeros(shape, np.int32),
        rollout=np.full(shape, -1, np.int32),
        turn=np.zeros(shape, np.int32),
        version=np.full(shape, -1, np.int32),
        routing=np.zeros((*shape, routing), np.int32),
    )


def micro_batches(found: Sequence[Segment], *, rows: int, length: int, align: int = 1) -> tuple[Batch, ...]:
    """Packs the segments of one minibatch into micro-batches [rows, length]; none for no segments."""
    filled = fill_rows(found, length, align=align)
    widths = {s.routing.shape[1] for s in found}
    if len(widths) > 1:
        raise InputError(f"traces of one step differ in how many experts they record: {sorted(widths)}")
    batches = []
    for first in range(0, len(filled), rows):
        batch = empty_batch(rows, length, next(iter(widths)))
        for r, row in enumerate(filled[first : first + rows]):
            number = 1
            for start, s in row:
                at = (r, slice(start, start + len(s)))
                for name in (
                    "tokens",
                    "targets",
                    "mask",
                    "weight",
                    "advantages",
                    "behavior_logprobs",
                    "turn",
                    "version",
                    "routing",
                    "rollout",
                    "positions",
                ):
                    getattr(batch, name)[at] = getattr(s, name)
                batch.segments[at] = number + s.part
                number += 1 + int(s.part.max())
        batches.append(batch)
    return tuple(batches)


def pack(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[Advantage] | np.ndarray],
    algorithm: Algorithm,
    *,
    rows: int,
    length: int,
    minibatches: int = 1,
    align: int = 1,
    merge_equal: bool = True,
    share_prompts: bool = False,
) -> Packed:
    """The batch of one step. Groups go round-robin into `minibatches`, each its own update with its own
    denominator.

    `advantages[g][m]` is a number for the whole episode, or f64[C], one for each of its model calls.
    `rows` x `length` is the shape of a micro-batch, `align` what segment starts are multiples of. A merged
    batch has the loss and gradient of the unmerged one. If all advantages are 0, and
    no other term is in the loss, the minibatches are empty. `share_prompts`: see `share`.
    """
    own: list[list[Segment]] = []  # of each minibatch
    totals: dict[str, float] = {}
    first = 0
    for m in range(minibatches):
        members = range(m, len(groups), minibatches)
        found, counts = segments(
            [groups[g] for g in members],
            [advantages[g] for g in members],
            length,
            first_rollout=first,
            select=algorithm.select,
        )
        own.append(found)
        first += sum(len(groups[g].trajectories) for g in members)
        for name, value in counts.items():
            totals[name] = totals.get(name, 0.0) + value
    if algorithm.whiten:
        sizes = np.cumsum([len(found) for found in own])[:-1]
        spread = whiten([s for found in own for s in found])
        own = [spread[a:b] for a, b in zip((0, *sizes), (*sizes, len(spread)), strict=True)]
    terms = algorithm.entropy_coef or (algorithm.kl is not None and algorithm.kl_in == "loss")
    if not terms and not any(s.advantages.any() for found in own for s in found):
        own = [[] for _ in own]  # the gradient is zero: no reason to compute it
    before = sum(len(found) for found in own)
    own = [weigh(found, algorithm) for found in own]
    if merge_equal:
        own = [merge(found, match_behavior=algorithm.correction is not None) for found in own]
    after = sum(len(found) for found in own)
    if share_prompts:
        own = [share(found, length) for found in own]
    made = [micro_batches(found, rows=rows, length=length, align=align) for found in own]
    flat = [b for batches in made for b in batches]
    used = sum(int(np.count_nonzero(b.segments)) for b in flat)
    metrics = {f"batch/{name}": value for name, value in totals.items()}
    metrics |= {
        "batch/segments": float(before),
        "batch/merged": float(before - after),
        "batch/micro_batches": float(len(flat)),
        "batch/fill": used / (len(flat) * rows * length) if flat else 0.0,
        "tokens/trained": float(sum(b.mask.sum(dtype=np.float64) for b in flat)),
        "tokens/computed": float(used),
    }
    return Packed(tuple(made), metrics)

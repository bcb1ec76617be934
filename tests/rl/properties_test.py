"""Loss and gradient of random ragged groups, from packing to parameters: what must not change them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from metagym.rl import losses
from metagym.rl.advantages import by_turn
from metagym.rl.algorithms import cispo, dapo, dr_grpo, grpo, gspo, reinforce_pp
from metagym.rl.batching import micro_batches, pack, segments, weigh
from metagym.rl.losses import loss_terms
from metagym.rl.train_step import init_state, make_optimizer, make_train_step, state_shardings
from metagym.types import Group, Turn

ALGORITHMS = [
    grpo(
        entropy_coef=0.02,
        kl_coef=0.1,
        correction=losses.truncated_importance,
        reduction="seq-mean-token-mean",
    ),
    dapo(dual=3.0, correction=losses.product(losses.sequence_mask, losses.icepop)),
    dr_grpo(max_tokens=16, correction=losses.sequence_importance),
    gspo(clip_low=0.2, clip_high=0.3, reduction="token-mean"),
    cispo(correction=functools.partial(losses.off_policy_mask, bound=0.1), reduction="seq-mean-token-sum"),
    reinforce_pp(),
]
GSPO = 3
ON_DEVICES = gspo(clip_low=0.2, clip_high=0.3, correction=losses.truncated_importance)
rngs = st.integers(0, 2**32 - 1).map(np.random.default_rng)
indices = st.integers(0, len(ALGORITHMS) - 1)


@pytest.fixture(scope="module")
def measure(tiny):
    """(index of the algorithm, micro-batches) -> loss and gradient with respect to the parameters."""
    params, old, ref = tiny.params(0), tiny.params(1), tiny.params(2)
    old, ref = (jax.tree.map(lambda x, y: 0.7 * x + 0.3 * y, params, other) for other in (old, ref))

    @functools.cache
    def gradient(index):
        def loss(p, batch):
            masked = jnp.asarray(batch.mask) > 0
            stored = [jnp.where(masked, tiny.policy(x, batch)[0], jnp.nan) for x in (old, ref)]
            batch = dataclasses.replace(batch, old_logprobs=stored[0], ref_logprobs=stored[1])
            return loss_terms(ALGORITHMS[index], *tiny.policy(p, batch), batch, False)[0]

        return jax.jit(jax.value_and_grad(loss))

    def run(index, batches):
        parts = [gradient(index)(params, b) for b in batches]
        leaves = zip(*(jax.tree.leaves(g) for _, g in parts), strict=True)
        total = [sum(np.asarray(x, np.float64) for x in same) for same in leaves]
        return sum(float(value) for value, _ in parts), total

    return run


def same(one, other):
    np.testing.assert_allclose(one[0], other[0], rtol=1e-5, atol=1e-6)
    for a, b in zip(one[1], other[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def draw(tiny, rng):
    """Ragged groups of several traces and turns with random advantages, some of them by turn."""
    groups = tiny.groups(rng, count=rng.integers(1, 4), size=rng.integers(1, 4))
    values = [
        [rng.normal(size=3) if rng.random() < 0.3 else rng.normal() for _ in g.trajectories] for g in groups
    ]
    return groups, values


def packed(groups, values, index, *, rows=2, length=24, **more):
    """Micro-batches of the one minibatch; at least one."""
    (batches,) = pack(groups, values, ALGORITHMS[index], rows=rows, length=length, **more).minibatches
    return batches


@settings(max_examples=12, deadline=None)
@given(rng=rngs, index=indices, shape=st.sampled_from([(1, 24), (5, 40)]), align=st.sampled_from([1, 8]))
def test_micro_batches_rows_padding_and_alignment(tiny, measure, rng, index, shape, align):
    groups, values = draw(tiny, rng)
    rows, length = shape
    other = packed(groups, values, index, rows=rows, length=length, align=align)
    same(measure(index, packed(groups, values, index)), measure(index, other))


@settings(max_examples=12, deadline=None)
@given(rng=rngs, index=indices)
def test_padding_may_stand_on_either_side(tiny, measure, rng, index):
    """Each row is moved to its right end: the padding comes first."""
    groups, values = draw(tiny, rng)
    batches = packed(groups, values, index, rows=1, length=40)

    def to_the_right(batch):
        ends = [int(np.flatnonzero(row)[-1]) + 1 if row.any() else 0 for row in batch.segments]

        def move(x):
            return np.stack([np.roll(row, len(row) - n, axis=0) for row, n in zip(x, ends, strict=True)])

        return jax.tree.map(move, batch)

    moved = [to_the_right(b) for b in batches]
    assume(any(not np.array_equal(a.segments, b.segments) for a, b in zip(batches, moved, strict=True)))
    same(measure(index, batches), measure(index, moved))


@settings(max_examples=12, deadline=None)
@given(rng=rngs, index=indices)
def test_the_order_of_groups_members_and_traces(tiny, measure, rng, index):
    groups, values = draw(tiny, rng)
    shuffled, theirs = [], []
    for g in rng.permutation(len(groups)):
        members = rng.permutation(len(groups[g].trajectories))
        mixed = []
        for m in members:
            episode = groups[g].trajectories[m]
            traces = tuple(episode.traces[i] for i in rng.permutation(len(episode.traces)))
            mixed.append(dataclasses.replace(episode, traces=traces))
        shuffled.append(Group(mixed))
        theirs.append([values[g][m] for m in members])
    same(measure(index, packed(groups, values, index)), measure(index, packed(shuffled, theirs, index)))


@settings(max_examples=12, deadline=None)
@given(rng=rngs, index=indices)
def test_rows_in_any_order_of_packing(tiny, measure, rng, index):
    """Not the packer's own order: segments in random order, one to a row."""
    groups, values = draw(tiny, rng)
    algorithm = dataclasses.replace(ALGORITHMS[index], whiten=False)
    found, _ = segments(groups, values, 24, select=algorithm.select)
    found = weigh(found, algorithm)
    alone = [b for i in rng.permutation(len(found)) for b in micro_batches([found[i]], rows=2, length=24)]
    whole = micro_batches(found, rows=2, length=24)
    same(measure(index, whole), measure(index, alone))


@settings(max_examples=12, deadline=None)
@given(rng=rngs, index=indices, merge=st.booleans())
def test_garbage_off_the_mask_changes_no_bit(tiny, measure, rng, index, merge):
    groups, values = draw(tiny, rng)
    batches = packed(groups, values, index, merge_equal=merge)

    def spoil(batch):
        off, padding = batch.mask == 0, batch.segments == 0
        ids = rng.integers(0, tiny.VOCAB, off.shape)
        floats = ("advantages", "behavior_logprobs", "weight")
        spoiled = {n: np.where(off, np.nan, getattr(batch, n)).astype(np.float32) for n in floats}
        tokens = np.where(padding, ids, batch.tokens).astype(np.int32)
        targets = np.where(off, ids, batch.targets).astype(np.int32)
        return dataclasses.replace(batch, **spoiled, tokens=tokens, targets=targets)

    one, other = measure(index, batches), measure(index, [spoil(b) for b in batches])
    assert one[0] == other[0]
    for a, b in zip(one[1], other[1], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def steps(tiny):
    """The training step on 1, 2, 4 and 8 devices, each with its parameters."""
    optimizer, made = make_optimizer(1e-2), []
    for shape in ((1, 1), (2, 1), (2, 2), (4, 2)):
        mesh = tiny.make_mesh(*shape)
        state = init_state(tiny.params(), optimizer, jax.random.key(0), mesh)
        step = make_train_step(tiny.policy, ON_DEVICES, optimizer, mesh, state_shardings(state))
        made.append((step, state.params))
    return made


@settings(max_examples=5, deadline=None)
@given(rng=rngs)
def test_one_to_eight_devices(tiny, steps, rng):
    groups, values = draw(tiny, rng)
    (batches,) = pack(groups, values, ON_DEVICES, rows=8, length=24).minibatches
    results = []
    for step, params in steps:
        loss, leaves = 0.0, 0.0
        for batch in batches:
            with jax.set_mesh(step.mesh):
                grads, value, _ = step.gradient(params, step.put(batch), step._flag(True))
            loss += float(value)
            leaves += np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(grads))])
        results.append((loss, [leaves]))
    for other in results[1:]:
        same(results[0], other)


@functools.cache
def of_logits(index):
    """(logits, batch) -> the loss's gradient with respect to the logits."""

    def loss(logits, batch):
        logp = jax.nn.log_softmax(logits)
        l = jnp.take_along_axis(logp, batch.targets[..., None], axis=-1)[..., 0]
        return loss_terms(ALGORITHMS[index], l, -jnp.sum(jnp.exp(logp) * logp, -1), batch, False)[0]

    return jax.jit(jax.grad(loss))


@settings(max_examples=12, deadline=None)
@given(rng=rngs, index=indices)
def test_the_gradient_at_observations_is_exactly_zero(tiny, rng, index):
    """With respect to all logits, entropy bonus, KL and corrections included."""
    groups, values = draw(tiny, rng)
    for batch in packed(groups, values, index):
        shape = batch.tokens.shape
        o, ref = (
            np.where(batch.mask > 0, -rng.exponential(1, shape), np.nan).astype(np.float32) for _ in range(2)
        )
        batch = dataclasses.replace(batch, old_logprobs=o, ref_logprobs=ref)
        logits = rng.normal(size=(*shape, tiny.VOCAB)).astype(np.float32)
        gradient = np.asarray(of_logits(index)(logits, batch))
        assert np.all(gradient[batch.mask == 0] == 0)
        assert np.all(np.isfinite(gradient))


@settings(max_examples=6, deadline=None)
@given(rng=rngs)
def test_a_group_without_advantage_has_no_gradient(tiny, measure, rng):
    """Beside a group that has one, whose gradient it only thins out: it counts in the denominator."""
    groups, _ = draw(tiny, rng)
    silent = tiny.groups(rng, count=1, size=2)
    index = GSPO
    values = [np.ones(len(g.trajectories)) for g in groups]
    alone = measure(index, packed(groups, values, index))
    both = measure(index, packed([*groups, *silent], [*values, np.zeros(2)], index))
    assert packed(silent, [np.zeros(2)], index) == ()
    found = [segments(x, [[0] * len(g.trajectories) for g in x], 24)[0] for x in (groups, silent)]
    tokens = [sum(s.mask.sum() for s in own) for own in found]
    share = tokens[0] / sum(tokens)
    same((alone[0] * share, [g * share for g in alone[1]]), both)


@settings(max_examples=6, deadline=None)
@given(rng=rngs, data=st.data())
def test_turn_wise_credit_is_packed_call_by_call(tiny, rng, data):
    """What `by_turn` gives is found again at the tokens of each call, for any number of turns."""
    members = []
    for _ in range(data.draw(st.integers(2, 4))):
        turns = int(rng.integers(1, 4))
        episode = tiny.trajectory([tiny.trace(rng, 2, 2, turns)], rng.integers(0, 2))
        said = tuple(Turn("", "", "", float(r)) for r in rng.integers(0, 2, turns))
        members.append(dataclasses.replace(episode, turns=said, reward=sum(t.reward for t in said)))
    group = Group(members)
    values = by_turn(group, np.zeros(len(members)))
    algorithm = grpo(entropy_coef=0.1)
    for batch in pack([group], [values], algorithm, rows=2, length=24, merge_equal=False).minibatches[0]:
        on = batch.mask > 0
        for rollout, turn, advantage in zip(
            batch.rollout[on], batch.turn[on], batch.advantages[on], strict=True
        ):
            assert advantage == np.float32(values[rollout][turn])

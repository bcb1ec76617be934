"""The mixture of experts against a loop over tokens, and routing replay."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from metagym.models import Decoder, ModelConfig, ModelError, experts, init_cache, make_policy
from metagym.models.head import token_logprobs

CONFIG = ModelConfig(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    model_type="qwen3_moe",
    qk_norm=True,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
)


@pytest.fixture(scope="module")
def moe() -> Decoder:
    return Decoder(CONFIG, seed=3)


@pytest.fixture(scope="module")
def batch(random_batch):
    return random_batch([[30, 34], [50]])


def route(logits, k, recorded=None):
    chosen = experts.choose(logits, k, recorded)
    return chosen, experts.gates(logits, chosen, True)


def naive(x, chosen, gates, gate_up, down):
    """One token and expert at a time."""
    out = np.zeros(x.shape)
    for at in np.ndindex(x.shape[:-1]):
        for e, g in zip(chosen[at], gates[at], strict=True):
            gate, up = x[at] @ gate_up[e, :, 0], x[at] @ gate_up[e, :, 1]
            out[at] += g * ((gate / (1 + np.exp(-gate)) * up) @ down[e])
    return out


def test_equals_a_loop_over_tokens_in_value_and_gradient():
    rng = np.random.default_rng(0)
    x, router = rng.normal(size=(2, 9, 8)), rng.normal(size=(8, 4))
    gate_up, down = rng.normal(size=(4, 8, 2, 6)), rng.normal(size=(4, 6, 8))
    chosen, gates = route(jnp.asarray(x @ router), 2)
    got = jax.jit(experts.mlps)(jnp.asarray(x), chosen, gates, jnp.asarray(gate_up), jnp.asarray(down))
    np.testing.assert_allclose(got, naive(x, chosen, gates, gate_up, down), rtol=1e-5, atol=1e-5)

    def grouped(x, gates, gate_up, down):
        return jnp.sin(experts.mlps(x, chosen, gates, gate_up, down)).sum()

    def dense(x, gates, gate_up, down):  # every expert for every token
        y = jnp.einsum("bld,edpf->blepf", x, gate_up)
        y = jnp.einsum("blef,efd->bled", jax.nn.silu(y[..., 0, :]) * y[..., 1, :], down)
        weight = (jax.nn.one_hot(chosen, 4) * gates[..., None]).sum(2)
        return jnp.sin(jnp.einsum("bled,ble->bld", y, weight)).sum()

    arguments = [jnp.asarray(a, jnp.float32) for a in (x, gates, gate_up, down)]
    got, want = (jax.jit(jax.grad(f, argnums=(0, 1, 2, 3)))(*arguments) for f in (grouped, dense))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.abs(b).max()))


def test_the_router_by_hand():
    """Probabilities 1/2, 1/4, 1/8, 1/8: the two highest, of sum 1."""
    logits = jnp.log(jnp.asarray([0.25, 0.5, 0.125, 0.125]))
    chosen, gates = route(logits, 2)
    assert chosen.tolist() == [1, 0]
    np.testing.assert_allclose(gates, [2 / 3, 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(experts.gates(logits, chosen, False), [0.5, 0.25], rtol=1e-6)
    chosen, gates = route(logits, 2, jnp.asarray([3, 0]))  # as recorded; the gates are the router's
    assert chosen.tolist() == [3, 0]
    np.testing.assert_allclose(gates, [1 / 3, 2 / 3], rtol=1e-6)
    assert experts.choose(logits, 2, jnp.asarray([-1, -1])).tolist() == [1, 0]  # not recorded


# Replay


def with_routing(batch, routing):
    """The batch with `routing` [B, L, R]."""
    own = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    kind = dataclasses.make_dataclass("Batch", [*own, "routing"], frozen=True)
    return kind(**own, routing=routing)


def scored(graphdef, params, batch, **kwargs):
    """Log-probs and entropies of the policy, in one program."""
    policy = make_policy(graphdef, chunk=64, **kwargs)
    return jax.jit(lambda params: policy(params, batch))(params)


def recorded(model, batch):
    """The experts that the model's own forward pass takes, by reading each segment into a cache."""
    B, L = batch.tokens.shape
    graphdef, params = nnx.split(model)
    extend = jax.jit(lambda params, *inputs: nnx.merge(graphdef, params).extend(*inputs))
    routing = np.full((B, L, model.config.routing_width), -1, np.int32)
    for b in range(B):
        for s in range(1, int(batch.segments[b].max()) + 1):
            at = np.flatnonzero(np.asarray(batch.segments[b]) == s)
            cache = init_cache(model.config, 2, len(at))
            table = jnp.ones((1, 1), jnp.int32)
            _, cache = extend(params, cache, batch.tokens[b, at][None], batch.positions[b, at][None], table)
            routing[b, at] = np.moveaxis(np.asarray(cache.routing[:, 1]), 0, 1).reshape(len(at), -1)
    return routing


def test_replay_of_its_own_choice_changes_nothing(moe, batch):
    graphdef, params = nnx.split(moe)
    routing = recorded(moe, batch)
    assert (routing[np.asarray(batch.segments) > 0] >= 0).all()
    assert (routing[np.asarray(batch.segments) == 0] == -1).all()
    free = scored(graphdef, params, batch)
    bound = scored(graphdef, params, with_routing(batch, routing), replay=True)
    for got, want in zip(bound, free, strict=True):
        np.testing.assert_array_equal(got, want)


def test_replay_takes_the_recorded_experts_and_the_live_gates(moe, batch):
    graphdef, params = nnx.split(moe)
    B, L = batch.tokens.shape
    rng = np.random.default_rng(0)
    forced = np.stack([rng.permutation(8)[:2] for _ in range(B * L * 2)]).reshape(B, L, 4).astype(np.int32)
    policy = make_policy(graphdef, chunk=64, replay=True)

    def loss(params, routing):
        return policy(params, with_routing(batch, routing))[0].sum()

    value, gradient = jax.jit(jax.value_and_grad(loss))(params, jnp.asarray(forced))
    assert abs(float(value - scored(graphdef, params, batch)[0].sum())) > 1e-3
    assert float(jnp.abs(gradient["layers"]["router"].get_value()).max()) > 0

    # The same in the model's own layers, with the choice put in by hand.
    def by_hand(params):
        model = nnx.merge(graphdef, params)
        hidden = model.hidden(batch.tokens, batch.positions, batch.segments, jnp.asarray(forced))
        return token_logprobs(hidden, model._head(), batch.targets, batch.mask, chunk=64)[0]

    want = jax.jit(by_hand)(params)
    np.testing.assert_allclose(value, want.sum(), rtol=1e-6)


def test_without_a_recording_the_router_chooses_and_it_is_said(moe, batch, caplog):
    graphdef, params = nnx.split(moe)
    B, L = batch.tokens.shape
    got = scored(graphdef, params, with_routing(batch, jnp.zeros((B, L, 0), jnp.int32)), replay=True)
    np.testing.assert_array_equal(got[0], scored(graphdef, params, batch)[0])
    assert "no routing was recorded" in caplog.text


def test_replays_that_are_refused(tiny, moe, batch):
    B, L = batch.tokens.shape
    nothing = with_routing(batch, jnp.zeros((B, L, 0), jnp.int32))
    graphdef, params = nnx.split(tiny)
    with pytest.raises(ModelError, match="dense model has no experts"):
        make_policy(graphdef, replay=True)(params, nothing)
    graphdef, params = nnx.split(moe)
    with pytest.raises(ModelError, match="records 3 experts of a token; this model has 2 layers with 2 each"):
        make_policy(graphdef, replay=True)(params, with_routing(batch, jnp.zeros((B, L, 3), jnp.int32)))


def test_replay_shrinks_the_distance_to_a_sampler_that_rounds_otherwise(moe, random_batch):
    """A sampler in bf16 sends some of 1,400 tokens elsewhere than an f32 trainer; the replay follows it.
    Numbers are nats, the largest of a token."""
    batch = random_batch([[700], [700]])
    graphdef, params = nnx.split(moe)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    routing = recorded(nnx.merge(graphdef, rounded), batch)
    policy = make_policy(graphdef, chunk=64, replay=True)
    run = jax.jit(lambda params, routing: policy(params, with_routing(batch, routing))[0])
    nothing = np.full_like(routing, -1)  # the router chooses
    sampler, free, bound = run(rounded, nothing), run(params, nothing), run(params, routing)
    with_replay, without = (float(jnp.abs(x - sampler).max()) for x in (bound, free))
    assert with_replay < without / 2, (with_replay, without)


def test_prefill_and_decode_equal_the_full_forward(moe):
    tokens = np.random.default_rng(0).integers(0, 320, (1, 24)).astype(np.int32)
    row = np.arange(24, dtype=np.int32)[None]
    graphdef, params = nnx.split(moe)

    @jax.jit
    def whole(params):
        model = nnx.merge(graphdef, params)
        return model.hidden(jnp.asarray(tokens), jnp.asarray(row), jnp.ones_like(tokens))

    extend = jax.jit(lambda params, *inputs: nnx.merge(graphdef, params).extend(*inputs))
    cache, table = init_cache(CONFIG, 4, 8), jnp.asarray([[1, 2, 3]], jnp.int32)
    parts = []
    for at in (slice(0, 20), *(slice(i, i + 1) for i in range(20, 24))):
        got, cache = extend(params, cache, tokens[:, at], row[:, at], table)
        parts.append(got)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole(params), rtol=0, atol=1e-5)

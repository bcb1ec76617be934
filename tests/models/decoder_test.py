from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from metagym.models import Decoder, ModelConfig, init_cache, make_policy
from metagym.models.attention import BLOCK
from metagym.models.decoder import kept


def relative(a, b):
    return float(jnp.abs(a - b).max() / jnp.abs(b).max())


def cosine(a, b):
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (a, b))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("lengths", [[[300], [170]], [[50, 130, 80], [1, 2, 9]]])
def test_blockwise_equals_dense_in_value_and_gradient(tiny, dense_hidden, random_batch, lengths):
    b = random_batch(lengths)
    weight = jnp.where(b.segments[..., None] > 0, jnp.cos(jnp.arange(tiny.config.hidden_size)), 0.0)
    graphdef, params = nnx.split(tiny)

    @jax.jit
    def ours(params):
        hidden = nnx.merge(graphdef, params).hidden(b.tokens, b.positions, b.segments)
        return (hidden * weight).sum(), hidden

    @jax.jit
    def dense(params):
        hidden = dense_hidden(nnx.merge(graphdef, params), b.tokens, b.positions, b.segments)
        return (hidden * weight).sum(), hidden

    (_, hidden), gradient = jax.value_and_grad(ours, has_aux=True)(params)
    (_, expected), expected_gradient = jax.value_and_grad(dense, has_aux=True)(params)
    assert bool(jnp.isfinite(hidden).all())
    real = b.segments > 0
    assert relative(hidden[real], expected[real]) < 1e-5
    for got, want in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
        assert relative(got, want) < 1e-5


def test_attention_holds_no_square_buffer(tiny):
    """The largest value in the program, backward included, grows linearly with the length."""
    graphdef, params = nnx.split(tiny)

    def largest(L: int) -> int:
        row = jnp.zeros((1, L), jnp.int32)

        def loss(p):
            return nnx.merge(graphdef, p).hidden(row, row, row + 1).sum()

        return jax.jit(jax.grad(loss)).lower(params).compile().memory_analysis().temp_size_in_bytes

    assert largest(4096) < 2.5 * largest(2048)  # a square would be four times as large
    assert largest(4096) < 4 * 4096 * 4096


def test_out_of_range_tokens_in_padding_stay_finite(tiny, random_batch):
    b = random_batch([[20, 30], [20]])
    padding = b.segments == 0
    tokens, targets = jnp.where(padding, -7, b.tokens), jnp.where(padding, 10**6, b.targets)
    graphdef, params = nnx.split(tiny)
    logprobs, entropy = make_policy(graphdef)(params, replace(b, tokens=tokens, targets=targets))
    assert bool(jnp.isfinite(logprobs).all() & jnp.isfinite(entropy).all())


# Exactness: f32, same machine


@pytest.fixture(scope="module")
def scores(tiny):
    graphdef, params = nnx.split(tiny)
    policy = jax.jit(make_policy(graphdef, chunk=256))
    return lambda batch: [np.asarray(x) for x in policy(params, batch)]


@pytest.fixture(scope="module")
def eight(random_batch):
    return random_batch([[200]] * 8)


def test_batch_of_eight_is_bit_equal_to_one_at_a_time(scores, eight):
    whole = scores(eight)
    for i in range(8):
        one = type(eight)(**{k: v[i : i + 1] for k, v in vars(eight).items()})
        for got, want in zip(scores(one), whole, strict=True):
            np.testing.assert_array_equal(got[0], want[i])


def test_right_padding_is_bit_equal(scores, eight):
    padded = type(eight)(**{k: jnp.pad(v, ((0, 0), (0, 90))) for k, v in vars(eight).items()})
    for got, want in zip(scores(padded), scores(eight), strict=True):
        np.testing.assert_array_equal(got[:, :200], want)


def test_packing_at_block_starts_is_bit_equal(scores, eight):
    width = -(-200 // BLOCK) * BLOCK
    packed = {}
    for name, value in vars(eight).items():
        value = np.asarray(value) * (np.arange(1, 9)[:, None] if name == "segments" else 1)
        packed[name] = jnp.asarray(np.pad(value, ((0, 0), (0, width - 200))).reshape(2, 4 * width))
    for got, want in zip(scores(type(eight)(**packed)), scores(eight), strict=True):
        np.testing.assert_array_equal(got.reshape(8, width)[:, :200], want)


def test_packing_anywhere_is_close(scores, eight):
    packed = {
        name: value.reshape(2, 800)
        * (np.arange(1, 9).repeat(200).reshape(2, 800) if name == "segments" else 1)
        for name, value in vars(eight).items()
    }
    for got, want in zip(scores(type(eight)(**packed)), scores(eight), strict=True):
        np.testing.assert_allclose(got.reshape(8, 200), want, rtol=1e-5, atol=1e-5)


def test_what_is_kept_changes_no_bit_of_the_log_probs_nor_the_gradient(tiny, random_batch):
    b = random_batch([[100, 28], [128]])
    graphdef, params = nnx.split(tiny)
    assert kept(tiny.config, 256, 0) == []
    assert kept(tiny.config, 256, 1 << 30) == ["attention", "qkv", "middle", "gate_up"]
    results = []
    for memory in (0, 600_000, 1 << 30):
        policy = make_policy(graphdef, chunk=128, memory=memory)

        def loss(p, policy=policy):
            logprobs, _ = policy(p, b)
            return logprobs.sum(), logprobs

        results.append(jax.jit(jax.grad(loss, has_aux=True))(params))
    for gradient, logprobs in results[1:]:
        np.testing.assert_array_equal(logprobs, results[0][1])
        for got, want in zip(jax.tree.leaves(gradient), jax.tree.leaves(results[0][0]), strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * float(jnp.abs(want).max()))


# bf16


def test_bf16_gradient_points_where_the_f32_gradient_does(tiny, random_batch):
    b = random_batch([[100, 28], [128]])
    graphdef, params = nnx.split(tiny)
    gradients = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        policy = make_policy(graphdef, compute_dtype=dtype, chunk=128)
        gradients[dtype] = jax.jit(jax.grad(lambda p, policy=policy: policy(p, b)[0].sum()))(params)
        assert {x.dtype for x in jax.tree.leaves(gradients[dtype])} == {jnp.dtype("float32")}
    assert cosine(gradients[jnp.bfloat16], gradients[jnp.float32]) > 0.999


# Generation


def test_prefill_in_chunks_and_decode_equal_the_full_forward(tiny):
    """Three sequences at different points, with scattered pages and padding in every call."""
    rng = np.random.default_rng(0)
    S, page, pages_each = 3, 16, 8
    tokens = rng.integers(0, 320, (S, 120)).astype(np.int32)
    row = jnp.tile(jnp.arange(120, dtype=jnp.int32), (S, 1))
    expected = np.asarray(tiny.hidden(jnp.asarray(tokens), row, jnp.ones_like(row)))
    table = jnp.asarray(1 + rng.permutation(S * pages_each).reshape(S, pages_each), jnp.int32)
    graphdef, params = nnx.split(tiny)
    extend = jax.jit(lambda p, *args: nnx.merge(graphdef, p).extend(*args))
    cache = init_cache(tiny.config, 1 + S * pages_each, page)
    done = np.zeros(S, int)
    for C, amounts in (
        (64, (64, 40, 3)),
        (16, (0, 16, 1)),
        (16, (5, 9, 16)),
        *((1, (1, 1, i % 2)) for i in range(8)),
    ):
        step = np.zeros((S, C), np.int32)
        positions = np.full((S, C), -1, np.int32)
        for s, n in enumerate(amounts):
            step[s, :n] = tokens[s, done[s] : done[s] + n]
            positions[s, :n] = done[s] + np.arange(n)
        hidden, cache = extend(params, cache, jnp.asarray(step), jnp.asarray(positions), table)
        for s, n in enumerate(amounts):
            want = expected[s, done[s] : done[s] + n]
            np.testing.assert_allclose(hidden[s, :n], want, atol=1e-5 * np.abs(expected).max(), rtol=0)
            done[s] += n


def test_extend_writes_its_own_pages_and_the_scratch_page_only(tiny):
    cache = init_cache(tiny.config, 6, 4)
    tokens = jnp.asarray([[5, 6, 7, 8, 9, 0]], jnp.int32)
    positions = jnp.asarray([[0, 1, 2, 3, 4, -1]], jnp.int32)
    _, cache = tiny.extend(cache, tokens, positions, jnp.asarray([[4, 2]], jnp.int32))
    written = np.abs(np.asarray(cache.k)).sum((0, 3, 4)) > 0  # [pages, page_size]
    assert written[4].all()
    assert written[2].tolist() == [True, False, False, False]
    assert not written[[1, 3, 5]].any()


def test_sharing_a_prefix_page_gives_the_same_bits(tiny):
    """A second sequence whose table begins with the first one's page reads it as if it had written it."""
    rng = np.random.default_rng(1)
    prompt, rest = (
        rng.integers(0, 320, (1, 16)).astype(np.int32),
        rng.integers(0, 320, (1, 1)).astype(np.int32),
    )
    row = np.arange(16, dtype=np.int32)[None]
    extend = nnx.jit(lambda m, *args: m.extend(*args))
    cache = init_cache(tiny.config, 8, 16)
    _, cache = extend(tiny, cache, prompt, row, np.asarray([[1, 2]], np.int32))
    own, _ = extend(tiny, cache, rest, row[:, :1] + 16, np.asarray([[1, 2]], np.int32))
    shared, _ = extend(tiny, cache, rest, row[:, :1] + 16, np.asarray([[1, 5]], np.int32))
    np.testing.assert_array_equal(own, shared)


def test_abstract_model_costs_nothing():
    sizes = {"hidden_size": 8192, "intermediate_size": 29568, "vocab_size": 150_000, "num_hidden_layers": 80}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    huge = ModelConfig(**sizes, **heads)
    shapes = nnx.state(nnx.eval_shape(lambda: Decoder(huge)))
    assert shapes["embed"].get_value().shape == (150_000, 8192)
    assert shapes["layers"]["qkv"].get_metadata()["axes"] == ("layers", "embed", "kv_heads", "head")

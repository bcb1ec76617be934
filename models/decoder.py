"""The decoder that every family is: one Flax module, read from top to bottom.

What a family adds (biases, normalised heads, experts) is a field of its `ModelConfig`.

Letters in shapes: B rows, L tokens of a row, D embed, N layers, K key/value heads, G query heads per key
head, h head size, F hidden units, V vocabulary; S sequences being generated, C new tokens of each, P pages of
each.

All layers are stacked along a leading axis and run by `lax.scan`. Three ways through the same weights:
`hidden` + `token_logprobs` (training, packed rows), `extend` + `logits` (generation, paged cache).
Master weights, residual stream, norms and every sum are f32; `compute_dtype` is what the operands of the
matrix products are rounded to. f32 is the exact mode.
"""

import functools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from metagym.models import experts, lora, sharding
from metagym.models.attention import BLOCK, MASKED, dot_batched, packed_attention
from metagym.models.config import Llama3Rope, ModelConfig
from metagym.models.errors import ModelError
from metagym.models.head import token_logprobs
from metagym.models.matmul import from_bits, matmul, to_bits
from metagym.models.trees import tree_attention, tree_mask

_LOG = logging.getLogger(__name__)
MEMORY = 1 << 30
"""Bytes of intermediate results that a device keeps for the backward pass, if nothing else is said."""


def kept(config: ModelConfig, tokens: int, memory: int) -> list[str]:
    """What a training pass over `tokens` tokens keeps of every layer, within `memory` bytes, so that the
    backward pass does not compute it again: what costs the most time for its size comes first. The inputs of
    the layers are kept in any case. Keeping more or less changes no log-probability."""
    c = config
    sizes = {
        "attention": c.num_attention_heads * (c.head_dim + 1),
        "qkv": (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim,
        "middle": c.hidden_size,
    }
    if not c.num_experts:
        sizes["gate_up"] = 2 * c.intermediate_size
    names, used = [], 0
    for name, size in sizes.items():
        used += 4 * size * tokens * c.num_hidden_layers
        if used > memory:
            break
        names.append(name)
    return names


class Cache(NamedTuple):
    """Keys and values of everything generated so far, in pages that sequences own. k and v are
    `[N, pages, page_size, K, h]`; page 0 is scratch: padding is written there and nobody reads it. `routing`,
    i32 `[N, pages, page_size, k]`, are the experts that every token was sent to; None for a dense model."""

    k: jax.Array
    v: jax.Array
    routing: jax.Array | None = None


def init_cache(config: ModelConfig, num_pages: int, page_size: int, dtype: Any = jnp.float32) -> Cache:
    """An empty cache of `num_pages` pages, the scratch page included."""
    pages = (config.num_hidden_layers, num_pages, page_size)
    shape = (*pages, config.num_key_value_heads, config.head_dim)
    routing = jnp.full((*pages, config.num_experts_per_tok), -1, jnp.int32) if config.num_experts else None
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), routing)


def rotary(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, f32 `[..., h / 2]`, for positions `[...]`."""
    h, scale = config.head_dim, 1.0
    freq = 1.0 / (config.rope_theta ** (np.arange(0, h, 2, dtype=np.float32) / np.float32(h)))
    s = config.rope_scaling
    if isinstance(s, Llama3Rope):
        turns = s.original_max_position_embeddings * freq / (2 * math.pi)
        smooth = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        freq = freq / s.factor * (1 - smooth) + freq * smooth
    elif s is not None:  # YaRN: between the dimensions that turn beta_fast and beta_slow times, a ramp

        def dimension(turns: float) -> float:
            ratio = s.original_max_position_embeddings / (turns * 2 * math.pi)
            return h * math.log(ratio) / (2 * math.log(config.rope_theta))

        low, high = dimension(s.beta_fast), dimension(s.beta_slow)
        if s.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, h - 1)
        ramp = np.clip((np.arange(h // 2, dtype=np.float32) - low) / max(high - low, 1e-3), 0.0, 1.0)
        freq = freq / s.factor * ramp + freq * (1 - ramp)
        scale = s.attention_factor if s.attention_factor is not None else 0.1 * math.log(s.factor) + 1
    angle = positions[..., None].astype(jnp.float32) * jnp.asarray(freq, jnp.float32)
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding of x `[..., heads, h]`: the first half of a head is paired with the second."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps) * weight


@functools.partial(jax.jit, static_argnums=1)
def _draw(key: jax.Array, arrays: tuple[tuple[tuple[int, ...], int], ...]) -> list[jax.Array]:
    """N(0, 1 / fan_in) for each (shape, fan_in). One program and one long draw: a draw of its own for each
    shape takes seconds to compile."""
    ends = np.cumsum([math.prod(shape) for shape, _ in arrays])
    parts = jnp.split(jax.random.normal(key, (int(ends[-1]),), jnp.float32), ends[:-1])
    return [x.reshape(shape) * fan_in**-0.5 for x, (shape, fan_in) in zip(parts, arrays, strict=True)]


class Layers(nnx.Module):
    """The weights of all decoder layers. `qkv` holds, for each key head, its G query heads, its key and its
    value side by side, so that one product makes all three and a tensor-parallel split cuts between key
    heads."""

    def __init__(self, c: ModelConfig, make: Callable[..., nnx.Param]):
        N, D, K, h, F = (
            c.num_hidden_layers,
            c.hidden_size,
            c.num_key_value_heads,
            c.head_dim,
            c.intermediate_size,
        )
        self.attn_norm = make((N, D), ("layers", "norm"), None)
        self.qkv = make((N, D, K, (c.groups + 2) * h), ("layers", "embed", "kv_heads", "head"), D)
        self.out = make((N, K, c.groups * h, D), ("layers", "kv_heads", "head", "embed"), K * c.groups * h)
        if c.qkv_bias:
            self.qkv_bias = make((N, K, (c.groups + 2) * h), ("layers", "kv_heads", "head"), 0)
        if c.qk_norm:
            self.q_norm = make((N, h), ("layers", "norm"), None)
            self.k_norm = make((N, h), ("layers", "norm"), None)
        rank = c.lora.rank if c.lora else 0
        for name, (rows, columns) in lora.sizes(c).items():
            setattr(self, f"{name}_a", make((N, rows, rank), ("layers", "norm", "rank"), rows))
            setattr(self, f"{name}_b", make((N, rank, columns), ("layers", "rank", "norm"), 0))
        self.mlp_norm = make((N, D), ("layers", "norm"), None)
        if E := c.num_experts:
            F = c.moe_intermediate_size
            self.router = make((N, D, E), ("layers", "norm", "norm"), D)
            self.gate_up = make((N, E, D, 2, F), ("layers", "expert", "embed", "pair", "mlp"), D)
            self.down = make((N, E, F, D), ("layers", "expert", "mlp", "embed"), F)
        else:
            self.gate_up = make((N, D, 2, F), ("layers", "embed", "pair", "mlp"), D)
            self.down = make((N, F, D), ("layers", "mlp", "embed"), F)


class Decoder(nnx.Module):
    """A decoder-only transformer. Every parameter is an f32 `nnx.Param` whose metadata `axes` names its axes.

    `Decoder(config, seed=0)` draws N(0, 1 / fan_in) weights; under `nnx.eval_shape` it costs nothing.
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0):
        self.config = config
        random: list[tuple[nnx.Param, tuple[int, ...], int]] = []

        def make(shape: tuple[int, ...], axes: tuple[str, ...], fan_in: int | None) -> nnx.Param:
            """Random; ones for a fan-in of None, zeros for 0."""
            if fan_in:
                random.append((param := nnx.Param(jnp.zeros(()), axes=axes), shape, fan_in))
                return param
            return nnx.Param(jnp.full(shape, 1.0 if fan_in is None else 0.0, jnp.float32), axes=axes)

        D, V = config.hidden_size, config.vocab_size
        self.embed = make((V, D), ("vocab", "embed"), D)
        self.layers = Layers(config, make)
        self.norm = make((D,), ("norm",), None)
        self.head = None if config.tie_word_embeddings else make((V, D), ("vocab", "embed"), D)
        drawn = _draw(jax.random.key(seed), tuple((shape, fan_in) for _, shape, fan_in in random))
        for (param, *_), x in zip(random, drawn, strict=True):
            param.set_value(x)

    # One layer

    def _project(
        self,
        w: Mapping[str, jax.Array],
        x: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        dtype: Any,
        product: Callable[..., jax.Array] = matmul,
    ):
        """x [..., D] -> rotated q [..., K, G, h] and k [..., K, h], and v [..., K, h]."""
        c = self.config
        y = product(rms_norm(x, w["attn_norm"], c.rms_norm_eps), w["qkv"], dtype)
        y = checkpoint_name(y, "qkv")
        y = y.reshape(*x.shape[:-1], c.num_key_value_heads, c.groups + 2, c.head_dim)
        if c.qkv_bias:
            y = y + w["qkv_bias"].reshape(y.shape[-3:])
        if c.qk_norm:
            norms = (w["q_norm"][None].repeat(c.groups, 0), w["k_norm"][None])
            qk = rms_norm(y[..., :-1, :], jnp.concatenate(norms), c.rms_norm_eps)
            y = jnp.concatenate([qk, y[..., -1:, :]], axis=-2)
        qk = rotate(y[..., :-1, :], cos[..., None, :], sin[..., None, :])
        return qk[..., :-1, :], qk[..., -1, :], y[..., -1, :]

    def _finish(
        self,
        w: Mapping[str, jax.Array],
        x: jax.Array,
        attended: jax.Array,
        dtype: Any,
        recorded: jax.Array | None = None,
        mesh: Mesh | None = None,
        product: Callable[..., jax.Array] = matmul,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Adds the output projection of `attended` [..., K, G, h] to x [..., D], then the MLP, or that of
        the experts, `recorded` ones where there are some. Also the experts, [..., k]; None of a dense
        model."""
        c = self.config
        x = x + product(attended.reshape(*x.shape[:-1], -1), w["out"], dtype)
        x = checkpoint_name(x, "middle")
        y = rms_norm(x, w["mlp_norm"], c.rms_norm_eps)
        if c.num_experts:
            logits = matmul(y, w["router"], jnp.float32)
            chosen = experts.choose(logits, c.num_experts_per_tok, recorded)
            gates = experts.gates(logits, chosen, c.norm_topk_prob)
            y = experts.mlps(y, chosen, gates, w["gate_up"], w["down"], dtype=dtype, mesh=mesh)
            return x + y, chosen
        y = checkpoint_name(product(y, w["gate_up"], dtype), "gate_up")
        gate, up = jnp.split(y, 2, axis=-1)
        return x + product(jax.nn.silu(gate) * up, w["down"], dtype), None

    def _params(self) -> dict[str, nnx.Param]:
        return {name: p for name, p in vars(self.layers).items() if isinstance(p, nnx.Param)}

    def _own(self) -> dict[str, jax.Array]:
        """The weights of the layers, each [N, ...]."""
        return {name: p[...] for name, p in self._params().items()}

    def _stacked(self) -> dict[str, jax.Array]:
        """The same with the adapter added, if there is one."""
        if self.config.lora is None:
            return self._own()
        return jax.vmap(lambda w: lora.merged(self.config, w))(self._own())

    def _embed(self, tokens: jax.Array, mesh: Mesh | None = None) -> jax.Array:
        """f32 [B, L, D]. On a mesh every device looks all tokens up in its part of the table, and the parts
        are exchanged: the table is gathered nowhere."""
        table = self.embed[...]
        if mesh is None:
            return jnp.take(table, tokens, axis=0, mode="clip").astype(jnp.float32)
        own = sharding.spec(("batch", "length"), mesh, tokens.shape)
        vocab, embed = sharding.spec(("vocab", "embed"), mesh, table.shape)

        def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
            if embed is not None:
                tokens = lax.all_gather(tokens, embed)  # [n, B, L]
            V = table.shape[0]
            if vocab is not None:
                tokens = jnp.clip(tokens, 0, self.config.vocab_size - 1) - lax.axis_index(vocab) * V
            x = jnp.take(table, tokens, axis=0, mode="clip").astype(jnp.float32)
            if vocab is not None:
                x = lax.psum(jnp.where(((tokens >= 0) & (tokens < V))[..., None], x, 0.0), vocab)
            return x if embed is None else lax.all_to_all(x, embed, 0, x.ndim - 1, tiled=True)[0]

        return jax.shard_map(
            local, mesh=mesh, in_specs=(jax.P(vocab, embed), own), out_specs=own, check_vma=False
        )(table, tokens)

    def _head(self) -> jax.Array:
        return (self.embed if self.head is None else self.head)[...]

    # Training

    def hidden(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        segments: jax.Array,
        routing: jax.Array | None = None,
        *,
        compute_dtype: Any = jnp.float32,
        memory: int = MEMORY,
        offload: bool = False,
        trees: bool = False,
        mesh: Mesh | None = None,
    ) -> jax.Array:
        """The normalised last hidden states, f32 `[B, L, D]`.

        tokens, positions (from 0 in each segment), segments: i32 `[B, L]`. Tokens of a segment are adjacent
        and see the earlier ones of the same segment; segment 0 is padding, its rows are finite and mean
        nothing. routing, i32 `[B, L, N k]`: experts to send each token to, layer by layer, -1 where the
        router shall choose. `memory`: see `kept`; `offload`: the inputs of the layers wait for the backward
        pass in the host's memory; `trees`: segments may be branches of a prompt, see `metagym.models.trees`.
        Where the mesh splits L, tokens are in the order of `sharding.zigzag`.
        """
        c, (B, L) = self.config, tokens.shape
        assert tokens.shape == positions.shape == segments.shape, (tokens.shape, positions.shape)
        cos, sin = rotary(c, positions)
        seen = tree_mask(segments, positions) if trees else None
        axes = {name: p.get_metadata()["axes"][1:] for name, p in self._params().items()}
        matrices = {name for name, names in axes.items() if "embed" in names}
        recorded = None
        if routing is not None:
            recorded = jnp.moveaxis(routing.reshape(B, L, c.num_hidden_layers, -1), 2, 0)

        def layer(x: jax.Array, xs: Any) -> tuple[jax.Array, None]:
            w, recorded = xs
            x = checkpoint_name(sharding.constrain(x, ("batch", "length", None), mesh), "input")
            w = lora.merged(c, w)
            w = {
                k: sharding.gathered(v, axes[k], compute_dtype, mesh) if k in matrices else v
                for k, v in w.items()
            }
            q, k, v = self._project(w, x, cos, sin, compute_dtype)
            if seen is None:
                attended = packed_attention(q, k, v, segments, dtype=compute_dtype, mesh=mesh)
            else:
                attended = tree_attention(q, k, v, seen, dtype=compute_dtype)
            return self._finish(w, x, attended, compute_dtype, recorded, mesh)[0], None

        own = math.ceil(B / sharding.parts("batch", mesh)) * math.ceil(L / sharding.parts("length", mesh))
        names = kept(c, own, memory)
        policies = jax.checkpoint_policies
        policy = policies.save_only_these_names(*names)
        if offload:
            policy = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=names,
                names_which_can_be_offloaded=["input"],
                offload_src="device",
                offload_dst="pinned_host",
            )
        layer = jax.checkpoint(layer, prevent_cse=False, policy=policy)
        x, _ = lax.scan(layer, self._embed(tokens, mesh), (self._own(), recorded))
        return rms_norm(x, self.norm[...], c.rms_norm_eps)

    def token_logprobs(
        self,
        hidden: jax.Array,
        targets: jax.Array,
        mask: jax.Array | None = None,
        *,
        chunk: int = 512,
        compute_dtype: Any = jnp.float32,
        mesh: Mesh | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Log-probability of each target and entropy of each distribution, f32 `[B, L]`, from hidden `[B, L,
        D]`. About `chunk` tokens of a device have their logits in memory, forward and backward."""
        return token_logprobs(
            hidden, self._head(), targets, mask, chunk=chunk, compute_dtype=compute_dtype, mesh=mesh
        )

    # Generation

    def extend(
        self,
        cache: Cache,
        tokens: jax.Array,
        positions: jax.Array,
        page_table: jax.Array,
        *,
        compute_dtype: Any = jnp.float32,
    ) -> tuple[jax.Array, Cache]:
        """Reads C new tokens of each of S sequences: hidden f32 `[S, C, D]`, and the cache with them in it.

        tokens, positions: i32 `[S, C]`; the new tokens of a sequence have adjacent, rising positions; padding
        has a negative position and comes last. page_table i32 `[S, P]`: position p lives in page
        `page_table[s, p // page_size]`. A token sees every earlier position of its sequence; the cost grows
        with P, so pass no more than needed. Donate the cache to the jit around this, or it is copied.
        """
        c, (S, C) = self.config, tokens.shape
        page_size = cache.k.shape[2]
        T = page_table.shape[1] * page_size
        valid = positions >= 0
        page = jnp.take_along_axis(page_table, jnp.maximum(positions, 0) // page_size, axis=1)
        slot = (jnp.where(valid, page, 0), jnp.where(valid, positions % page_size, 0))
        # Which of the new tokens, if any, sits at each position of the context.
        key_positions = jnp.arange(T)
        last = jnp.max(
            jnp.where(valid, jnp.arange(C), -1), axis=1, keepdims=True
        )  # index of the last new token
        first_position = jnp.max(positions, axis=1, keepdims=True) - last  # where token 0 is, or would be
        which = key_positions[None, :] - first_position
        is_new = (which >= 0) & (which <= last)  # [S, T]; none for a sequence of padding only
        which = jnp.clip(which, 0, C - 1)
        visible = key_positions[None, None, :] <= positions[:, :, None]  # [S, C, T]
        cos, sin = rotary(c, positions)

        before = jax.tree.map(to_bits, cache)

        def context(pages: jax.Array, n: jax.Array, new: jax.Array) -> jax.Array:
            old = pages[n, page_table].reshape(S, T, *new.shape[2:])
            fresh = new if C == 1 else jnp.take_along_axis(new, which[:, :, None, None], axis=1)
            return from_bits(jnp.where(is_new[:, :, None, None], fresh, old).swapaxes(1, 2))  # [S, K, T, h]

        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, tuple[Any, ...]]:
            w, n = w
            w = jax.tree.map(from_bits, w)
            q, k, v = self._project(w, x, cos, sin, compute_dtype)
            k, v = to_bits(k.astype(cache.k.dtype)), to_bits(v.astype(cache.v.dtype))
            keys, values = context(before.k, n, k), context(before.v, n, v)
            attended = _cached_attention(q * c.head_dim**-0.5, keys, values, visible, compute_dtype)
            x, chosen = self._finish(w, x, attended, compute_dtype)
            return x, (k, v, chosen)

        weights = jax.tree.map(to_bits, self._stacked())
        x, new = lax.scan(layer, self._embed(tokens), (weights, jnp.arange(c.num_hidden_layers)))
        cache = jax.tree.map(lambda old, x: from_bits(old.at[:, *slot].set(x)), before, Cache(*new))
        return rms_norm(x, self.norm[...], c.rms_norm_eps), cache

    def logits(self, hidden: jax.Array, *, compute_dtype: Any = jnp.float32) -> jax.Array:
        """f32 `[..., V]` from hidden `[..., D]`: for sampling, where only the last token of a sequence
        counts."""
        return matmul(hidden, self._head().T, compute_dtype)


def _cached_attention(q: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array, dtype: Any):
    """q [S, C, K, G, h] over keys and values [S, K, T, h]; visible [S, C, T] -> [S, C, K, G, h]."""
    S, C, K, G, h = q.shape
    T = keys.shape[2]
    q = jnp.moveaxis(q, 1, 3).reshape(S * K, G * C, h)
    s = dot_batched(q, keys.reshape(S * K, T, h), (2, 2), dtype).reshape(S, K, G, C, T)
    s = jnp.where(visible[:, None, None], s, MASKED)
    p = jnp.exp(s - s.max(-1, keepdims=True))
    out = dot_batched(p.reshape(S * K, G * C, T), values.reshape(S * K, T, h), (2, 1), dtype)
    out = out.reshape(S, K, G, C, h) / p.sum(-1)[..., None]
    return jnp.moveaxis(out, 3, 1)


class HasTokens(Protocol):
    """What `make_policy` reads of a batch: i32 `[B, L]` each, and which targets matter. For a replay also
    `routing`, i32 `[B, L, R]`."""

    @property
    def tokens(self) -> Any: ...
    @property
    def targets(self) -> Any: ...
    @property
    def mask(self) -> Any: ...
    @property
    def positions(self) -> Any: ...
    @property
    def segments(self) -> Any: ...


Policy = Callable[[Any, HasTokens], tuple[jax.Array, jax.Array]]


def make_policy(
    graphdef: Any,
    *,
    compute_dtype: Any = jnp.float32,
    chunk: int = 512,
    memory: int = MEMORY,
    offload: bool = False,
    trees: bool = False,
    replay: bool = False,
    mesh: Mesh | None = None,
) -> Policy:
    """The model as a pure function `policy(params, batch) -> (logprobs, entropy)`, each f32 `[B, L]`: how
    likely `batch.targets` are, 0 where `batch.mask` is. `graphdef, params = nnx.split(model)`. `chunk`: see
    `Decoder.token_logprobs`; `memory`, `offload` and `trees`: see `Decoder.hidden`.

    `replay`: tokens go to the experts that `batch.routing`, i32 `[B, L, N k]`, recorded; where it is -1, and
    in a batch without any (width 0, which is logged once), the router chooses. Raises ModelError for a
    replay on a dense model, for a recording of another width, and for rows that the mesh cannot split.
    """

    def policy(params: Any, batch: HasTokens) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graphdef, lora.frozen(params))
        routing = _recorded(model.config, batch) if replay else None
        inputs = (batch.tokens, batch.positions, batch.segments, routing)
        targets, mask = batch.targets, batch.mask
        parts, L = sharding.parts("length", mesh), batch.tokens.shape[1]
        if L % (step := 2 * parts * BLOCK) and parts > 1:
            raise ModelError(
                f"rows of {L} tokens can't be split over {parts} devices: use a multiple of {step}"
            )
        order = sharding.zigzag(parts)
        if parts > 1:

            def turn(x: Any) -> Any:
                x = sharding.reorder(jnp.asarray(x), order)
                return sharding.constrain(x, ("batch", "length", *[None] * (x.ndim - 2)), mesh)

            inputs, targets, mask = jax.tree.map(turn, (inputs, targets, mask))
        how = {"memory": memory, "offload": offload, "trees": trees, "mesh": mesh}
        hidden = model.hidden(*inputs, compute_dtype=compute_dtype, **how)
        out = model.token_logprobs(hidden, targets, mask, chunk=chunk, compute_dtype=compute_dtype, mesh=mesh)
        if parts > 1:
            inverse = np.argsort(order)
            back = [sharding.constrain(sharding.reorder(x, inverse), ("batch", "length"), mesh) for x in out]
            return back[0], back[1]
        return out

    return policy


def _recorded(config: ModelConfig, batch: Any) -> jax.Array | None:
    if not config.num_experts:
        raise ModelError("a dense model has no experts: there is no routing to replay")
    width = batch.routing.shape[-1]
    if width == 0:
        _LOG.warning("no routing was recorded: the router chooses the experts anew")
        return None
    if width != config.routing_width:
        raise ModelError(
            f"the batch records {width} experts of a token; this model has {config.num_hidden_layers} layers "
            f"with {config.num_experts_per_tok} each"
        )
    return batch.routing

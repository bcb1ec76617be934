"""The training step: jitted programs under a mesh, one gradient buffer, state donated.

One gradient program serves every micro-batch, and scoring too (with weights of 0, its gradient thrown away):
a scoring program compiled apart from it would match its log-probs in most bits only, and then a ratio is not
1 when nothing has changed. A step of one minibatch needs no scoring: the old log-probs are the gradient
program's own, detached.

A minibatch is as many micro-batches as it takes. Their weights carry the minibatch's denominator, so losses
and gradients just add up. An update whose loss or gradient norm is not finite is skipped before the optimizer
sees it.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from metagym.errors import InputError
from metagym.rl.losses import loss_terms
from metagym.rl.metrics import token_metrics
from metagym.rl.types import Algorithm, Array, Batch, TrainState

# (params, batch) -> (log-probs of the targets f32[B, L], entropy f32[B, L])
Policy = Callable[[Any, Batch], tuple[jax.Array, jax.Array]]
BATCH_AXES = ("data", "fsdp", "expert")  # of a mesh: the rows of a batch lie over them
HOST = "pinned_host"  # the kind of memory that moments wait in, if they are offloaded
LENGTH_AXES = ("context",)  # and the tokens of a row over these


def make_optimizer(
    learning_rate: float | optax.Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_norm: float = 1.0,
) -> optax.GradientTransformation:
    """AdamW behind a clip of the global gradient norm."""
    return optax.chain(
        _clip(max_norm),
        optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay),
    )


def _clip(max_norm: float) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm`, with one factor for all: it divides each gradient by the norm, and XLA
    keeps the quotients, a second buffer of the gradients' size."""

    def update(grads: Any, _: Any) -> Any:
        norm = optax.tree_utils.tree_norm(grads)
        factor = jnp.where(norm < max_norm, 1.0, max_norm / norm)
        return jax.tree.map(lambda g: g * factor, grads)

    return optax.stateless(update)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of the arrays `[B, L, ...]` of a micro-batch."""
    rows, tokens = (tuple(a for a in axes if a in mesh.shape) for axes in (BATCH_AXES, LENGTH_AXES))
    return NamedSharding(mesh, P(rows, tokens))


def init_state(
    params: Any, optimizer: optax.GradientTransformation, rng: jax.Array, mesh: Mesh, *, offload: bool = False
) -> TrainState:
    """A fresh state: parameters where they are if they lie on `mesh`, else replicated over it; the moments
    lie like the parameters, with `offload` in the host's memory; `rng` is a typed key."""
    whole = NamedSharding(mesh, P())

    def place(x: Any) -> NamedSharding:
        sharding = getattr(x, "sharding", None)
        return sharding if isinstance(sharding, NamedSharding) and sharding.mesh == mesh else whole

    shardings = jax.tree.map(place, params)
    params = jax.device_put(params, shardings)
    opt_shardings = _moments(params, optimizer, shardings, whole, offload)[1]
    opt_state = jax.jit(optimizer.init, out_shardings=opt_shardings)(params)
    zero = np.zeros((), np.int32)
    step, version, rng = jax.device_put((zero, zero, rng), whole)
    return TrainState(params, opt_state, step, version, rng)


def _moments(
    params: Any, optimizer: Any, shardings: Any, whole: NamedSharding, offload: bool
) -> tuple[Any, Any]:
    """The optimizer's state as shapes, and its shardings: moments lie like their parameters."""
    shapes = jax.eval_shape(optimizer.init, params)
    if offload:
        shardings = jax.tree.map(lambda s: s.with_memory_kind(HOST), shardings)

    def masked(x: Any) -> bool:  # in place of a parameter that this part of the optimizer does not train
        return isinstance(x, optax.MaskedNode)

    found = optax.tree_utils.tree_map_params(
        optimizer,
        lambda x, sharding: x if masked(x) else sharding,
        shapes,
        shardings,
        transform_non_params=lambda _: whole,
        is_leaf=masked,
    )
    return shapes, found


def abstract_state(
    params: Any, optimizer: optax.GradientTransformation, mesh: Mesh, *, offload: bool = False
) -> TrainState:
    """The state that `init_state` makes, as shapes with shardings; so are `params`, on `mesh`."""
    whole = NamedSharding(mesh, P())

    def on(shape: Any, sharding: NamedSharding) -> Any:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    where = jax.tree.map(lambda x: x.sharding, params)
    shapes, shardings = _moments(params, optimizer, where, whole, offload)
    zero = on(jax.ShapeDtypeStruct((), np.int32), whole)
    rng = on(jax.eval_shape(lambda: jax.random.key(0)), whole)
    return TrainState(params, jax.tree.map(on, shapes, shardings), zero, zero, rng)


def state_shardings(state: TrainState) -> Any:
    """The state's tree with the sharding of every leaf in its place."""
    return jax.tree.map(lambda x: x.sharding, state)


@dataclass(frozen=True)
class TrainStep:
    """Made by `make_train_step`. Calling it makes one update for each minibatch."""

    gradient: Callable[
        ..., Any
    ]  # (params, batch, on_policy) -> (grads, loss f32[], (logprobs, entropy, clipped))
    add: Callable[..., Any]  # (grads, grads) -> grads; the first is donated
    norm: Callable[..., Any]  # grads -> f32[]
    apply: Callable[..., Any]  # (state, grads) -> state; the state is donated
    skip: Callable[..., Any]  # step -> step + 1
    algorithm: Algorithm
    mesh: Mesh

    def put(self, batch: Batch) -> Batch:
        """The micro-batch on the mesh, laid out as `batch_sharding` says."""
        sizes = zip(batch.tokens.shape, (BATCH_AXES, LENGTH_AXES), ("rows", "tokens a row"), strict=True)
        for size, axes, what in sizes:
            parts = math.prod(self.mesh.shape.get(a, 1) for a in axes)
            if size % parts:
                raise InputError(
                    f"micro-batches of {size} {what} cannot be split over {parts} devices "
                    f"({dict(self.mesh.shape)}); use a multiple of {parts} {what}"
                )
        return jax.device_put(batch, batch_sharding(self.mesh))

    def score(self, params: Any, batch: Batch) -> np.ndarray:
        """Log-probs f32[B, L] of a micro-batch's targets, by the gradient program; NaN off the mask."""
        nothing = dataclasses.replace(batch, weight=np.zeros_like(batch.weight))
        with jax.set_mesh(self.mesh), jax.transfer_guard("disallow"):
            _, _, (logprobs, _, _) = self.gradient(params, self.put(nothing), self._flag(True))
            return np.where(np.asarray(batch.mask) > 0, jax.device_get(logprobs), np.nan).astype(np.float32)

    def __call__(
        self,
        state: TrainState,
        minibatches: Sequence[Sequence[Batch]],
        *,
        reference: Any = None,
        check: Callable[[], None] = lambda: None,
    ) -> tuple[TrainState, dict[str, float]]:
        """One update for each minibatch that is not empty. `state` is donated; `reference` are the parameters
        that the algorithm's KL is measured against. Several minibatches: the old log-probs are those of the
        weights that came in, stored. `check` is called before each micro-batch for as long as `state` is not
        changed: what it raises gives the step up. Raises InputError if a reference is needed and absent.

        Metrics: `update/applied`, `update/skipped` (not finite), `update/grad_norm`, `loss`, and those of
        `metrics.token_metrics`.
        """
        if self.algorithm.kl is not None and self.algorithm.kl_in == "loss":
            if reference is None:
                raise InputError(
                    f"algorithm {self.algorithm.name} has a KL term and needs reference parameters"
                )
            minibatches = [
                [dataclasses.replace(b, ref_logprobs=self.score(reference, b)) for b in m]
                for m in minibatches
            ]
        minibatches = [m for m in minibatches if m]
        version = int(jax.device_get(state.version))

        def score(params: Any, batch: Batch) -> np.ndarray:
            check()
            return self.score(params, batch)

        on_policy = len(minibatches) == 1
        if not on_policy:
            minibatches = [
                [dataclasses.replace(b, old_logprobs=score(state.params, b)) for b in m] for m in minibatches
            ]
        seen: list[tuple[Batch, Array, Array, Array]] = []
        losses: list[float] = []
        norms: list[float] = []
        skipped = 0
        for minibatch in minibatches:
            with jax.set_mesh(self.mesh), jax.transfer_guard("disallow"):
                before = check if not losses else lambda: None
                state, loss, norm, tokens = self._update(state, minibatch, on_policy, before)
            losses.append(loss)
            norms.append(norm)
            skipped += not np.isfinite(loss + norm)
            seen += tokens
        metrics = {
            "update/applied": float(len(minibatches) - skipped),
            "update/skipped": float(skipped),
        }
        if minibatches:
            metrics |= {"loss": float(np.mean(losses)), "update/grad_norm": float(np.mean(norms))}
            metrics |= token_metrics(seen, version)
        return state, metrics

    def _flag(self, value: bool) -> jax.Array:
        return jax.device_put(np.asarray(value), NamedSharding(self.mesh, P()))

    def _update(
        self,
        state: TrainState,
        minibatch: Sequence[Batch],
        on_policy: bool,
        check: Callable[[], None],
    ) -> tuple[TrainState, float, float, list[tuple[Batch, Array, Array, Array]]]:
        grads, loss, tokens = None, 0.0, []
        for batch in minibatch:
            check()
            own, value, outputs = self.gradient(state.params, self.put(batch), self._flag(on_policy))
            grads = own if grads is None else self.add(grads, own)
            del own
            logprobs, entropy, clipped, value = jax.device_get((*outputs, value))
            loss += float(value)
            tokens.append(
                (
                    batch if not on_policy else dataclasses.replace(batch, old_logprobs=logprobs),
                    logprobs,
                    entropy,
                    clipped,
                )
            )
        norm = float(jax.device_get(self.norm(grads)))
        if np.isfinite(loss) and np.isfinite(norm):
            state = self.apply(state, grads)
        else:
            state = dataclasses.replace(state, step=self.skip(state.step))
        return state, loss, norm, tokens


def make_train_step(
    policy: Policy, algorithm: Algorithm, optimizer: optax.GradientTransformation, mesh: Mesh, shardings: Any
) -> TrainStep:
    """The programs of a training step. `shardings` is the `state_shardings` of the state it will be given.

    The rows of a micro-batch lie over the mesh axes of BATCH_AXES, so their number is a multiple of their
    sizes' product. Memory beyond state and activations: one f32 gradient, a second one while a minibatch of
    several micro-batches adds up.
    """
    rows, whole = batch_sharding(mesh), NamedSharding(mesh, P())

    def gradient(
        params: Any, batch: Batch, on_policy: jax.Array
    ) -> tuple[Any, jax.Array, tuple[jax.Array, ...]]:
        def loss(p: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            logprobs, entropy = policy(p, batch)
            value, clipped = loss_terms(algorithm, logprobs, entropy, batch, on_policy)
            return value, (logprobs, entropy, clipped)

        (value, tokens), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda g: g.astype(jnp.float32), grads), value, tokens

    def here(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        if sharding.memory_kind != HOST:
            return x
        return jax.device_put(x, sharding.with_memory_kind("device"))

    def apply(state: TrainState, grads: Any) -> TrainState:
        moments = jax.tree.map(here, state.opt_state, shardings.opt_state)
        updates, opt_state = optimizer.update(grads, moments, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        return dataclasses.replace(
            state, params=params, opt_state=opt_state, step=state.step + 1, version=state.version + 1
        )

    return TrainStep(
        gradient=jax.jit(
            gradient,
            in_shardings=(shardings.params, rows, whole),
            out_shardings=(shardings.params, whole, rows),
        ),
        add=jax.jit(
            lambda a, b: jax.tree.map(jnp.add, a, b), out_shardings=shardings.params, donate_argnums=0
        ),
        norm=jax.jit(optax.tree_utils.tree_norm, out_shardings=whole),
        apply=jax.jit(
            apply,
            in_shardings=(shardings, shardings.params),
            out_shardings=shardings,
            donate_argnums=0,
        ),
        skip=jax.jit(lambda step: step + 1, out_shardings=whole),
        algorithm=algorithm,
        mesh=mesh,
    )

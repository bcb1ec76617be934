"""A tiny pure-jax policy, and builders of random episodes, for the tests of rl."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import AxisType, Mesh, PartitionSpec

from metagym.rl.train_step import init_state, make_optimizer
from metagym.types import Group, StopReason, Task, TokenTrace, Trajectory

VOCAB, WIDTH = 13, 16


def params(seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = {
        "token": (VOCAB, WIDTH),
        "previous": (VOCAB, WIDTH),
        "position": (64, WIDTH),
        "out": (WIDTH, VOCAB),
    }
    return {n: 0.5 * jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=True)}


def logits(params, tokens, positions, segments):
    """Sees the token, the one before it in its segment, and the position. Weights are gathered when used
    (FSDP)."""
    if not jax.sharding.get_abstract_mesh().empty:
        params = jax.lax.with_sharding_constraint(params, PartitionSpec())
    same = segments[:, 1:] == segments[:, :-1]
    before = jnp.where(same[..., None], params["previous"][tokens[:, :-1]], 0.0)
    before = jnp.pad(before, ((0, 0), (1, 0), (0, 0)))
    hidden = jnp.tanh(params["token"][tokens] + before + params["position"][positions])
    return hidden @ params["out"]


def policy(params, batch):
    logp = jax.nn.log_softmax(logits(params, batch.tokens, batch.positions, batch.segments))
    chosen = jnp.take_along_axis(logp, batch.targets[..., None], axis=-1)[..., 0]
    return chosen, -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def make_mesh(data=1, fsdp=1, tensor=1):
    devices = np.asarray(jax.devices()[: data * fsdp * tensor]).reshape(data, fsdp, tensor)
    return Mesh(devices, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def state(mesh, optimizer=None, seed=0):
    optimizer = make_optimizer(1e-2) if optimizer is None else optimizer
    return init_state(params(seed), optimizer, jax.random.key(7), mesh)


def trace(rng, prompt=3, reply=2, turns=1):
    """Turns of `prompt` given tokens and `reply` sampled ones."""
    sampled = np.tile(np.repeat([False, True], [prompt, reply]), turns)
    n = len(sampled)
    return TokenTrace(
        tokens=rng.integers(0, VOCAB, n).astype(np.int32),
        sampled=sampled,
        trainable=sampled.copy(),
        logprobs=np.where(sampled, -rng.exponential(2.0, n), np.nan).astype(np.float32),
        version=np.where(sampled, 0, -1).astype(np.int32),
        turn=np.repeat(np.arange(turns), prompt + reply).astype(np.int32),
    )


def trajectory(traces, outcome=0.0, stop=StopReason.TERMINATED, task="a", seed=0):
    return Trajectory(
        task=Task(task, "tiny", "train"),
        seed=seed,
        turns=(),
        traces=tuple(traces),
        reward=float(outcome),
        outcome=float(outcome),
        stop=stop,
    )


def groups(rng, count=3, size=4, prompt=(1, 5), reply=(1, 4), turns=(1, 3), traces=(1, 3)):
    """Random ragged groups."""

    def one():
        return [
            trace(rng, rng.integers(*prompt), rng.integers(*reply), rng.integers(*turns))
            for _ in range(rng.integers(*traces))
        ]

    return [
        Group([trajectory(one(), rng.integers(0, 2), task=str(g)) for _ in range(size)]) for g in range(count)
    ]


def namespace():
    """The helpers above, as one namespace: tests cannot import each other."""
    return SimpleNamespace(
        VOCAB=VOCAB,
        params=params,
        logits=logits,
        policy=policy,
        make_mesh=make_mesh,
        state=state,
        trace=trace,
        trajectory=trajectory,
        groups=groups,
    )


@pytest.fixture(scope="session")
def tiny():
    return namespace()


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module", autouse=True)
def compiled_once(compiled):
    """Many tests compile the same programs: keep them."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], str(compiled))
    jax.config.update(names[1], 0)
    reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()

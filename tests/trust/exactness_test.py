"""Exactness of the real model in the whole loop: ratios of 1; the sampler's log-probs are the trainer's."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from metagym import cli
from metagym.errors import InputError, TrainingError
from metagym.experiments import config as config_lib
from metagym.experiments import train as train_lib
from metagym.models import EXACT_ALIGNMENT, Llama, ModelConfig, make_mesh, make_policy, make_tiled_policy
from metagym.models import param_shardings as shardings_of
from metagym.proxy.backends.embedded import EmbeddedBackend
from metagym.rl import batching, loop
from metagym.rl.algorithms import grpo
from metagym.rl.metrics import read_jsonl
from metagym.rl.rollouts import TaskStream
from metagym.rl.train_step import init_state, make_optimizer, make_train_step, state_shardings
from metagym.types import Group, Sampling, StopReason, Task, TokenTrace, Trajectory


def debug(**fields):
    """The debug config, with fields replaced by their dotted path ("__" for the dot)."""
    config = config_lib.load("debug")
    for name, value in fields.items():
        *path, last = name.split("__")
        section = config
        for part in path:
            section = section[part]
        section[last] = value
    return config


EXACT = {
    "engine__deterministic": True,
    "engine__page_size": 4,
    "model__tiled": True,
    "batch__align": 4,
    "sampling__context": 128,
    "batch__length": 128,
}


def train(config, workdir, steps=2, **more):
    """The loop on what a config builds; every other member of a group is rewarded. Returns the records."""
    with train_lib.parts(config, workdir) as p:

        def episode(request):
            reward = float(request.member % 2)
            return dataclasses.replace(p.episode(request), reward=reward, outcome=reward)

        settings = {
            "algorithm": p.algorithm,
            "minibatches": config.batch.minibatches,
            "max_distance": config.max_distance,
        } | more
        loop.train(
            policy=p.policy,
            state=p.state,
            optimizer=p.optimizer,
            mesh=p.mesh,
            backend=p.backend,
            episode=episode,
            tasks=TaskStream(p.pool.tasks, seed=0),
            steps=steps,
            groups_per_step=config.groups_per_step,
            group_size=config.group_size,
            rows=config.batch.rows,
            length=config.batch.length,
            align=config.batch.align,
            workdir=workdir,
            **settings,
        )
    return [r for r in read_jsonl(workdir / "metrics.jsonl") if "loss" in r]


def test_stored_old_logprobs_give_ratio_1_exactly(tmp_path):
    config = debug(optimizer__learning_rate=0.0, batch__minibatches=2)
    records = train(config, tmp_path)
    for r in records:
        assert r["update/applied"] == 2
        assert r["policy/ratio_min"] == r["policy/ratio_max"] == 1.0
        assert r["policy/clip_fraction"] == r["policy/kl_old"] == 0.0
        assert r["update/grad_norm"] > 0
        assert 0 < r["sampler/max"] < 1e-4
        assert {"sampler/p99", "sampler/pearson", "sampler/ess"} <= set(r)
    moved = train(debug(optimizer__learning_rate=0.1, batch__minibatches=2), tmp_path / "moved", steps=1)
    assert moved[0]["policy/ratio_max"] > 1.001, "the same run at another learning rate is off 1"


@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_samplers_logprobs_are_the_trainers_bit_for_bit(tmp_path, minibatches):
    config = debug(**EXACT, optimizer__learning_rate=1e-2, batch__minibatches=minibatches)
    for r in train(config, tmp_path, steps=3, max_distance=0.0):
        assert r["update/applied"] == minibatches
        assert r["sampler/max"] == r["sampler/p99"] == 0.0
        assert r["sampler/ess"] == 1.0


def test_a_run_stops_when_the_sampler_leaves_the_bound(tmp_path, capsys):
    arguments = ["--config=debug", f"--workdir={tmp_path / 'run'}", "--config.evaluate_every=0"]
    assert cli.main(["train", *arguments, "--config.max_distance=1e-12"]) != 0
    said = capsys.readouterr().err
    assert "sampler/max is " in said
    assert "outside of [-inf, 1e-12]" in said
    assert "The engine serves other weights, or computes otherwise than the trainer." in said


def test_so_does_a_run_whose_engine_serves_other_weights(tmp_path, monkeypatch):
    load = EmbeddedBackend.load

    def wrong(self, params, version):
        load(self, jax.tree.map(lambda x: 1.5 * x, params) if version else params, version)

    monkeypatch.setattr(EmbeddedBackend, "load", wrong)
    with pytest.raises(TrainingError, match=r"step 2: sampler/max is .* other weights"):
        train(debug(), tmp_path, steps=3, max_distance=0.01)


@pytest.mark.parametrize(
    ("change", "needs"),
    [
        ({"engine__deterministic": False}, "config.engine.deterministic"),
        ({"model__compute_dtype": "bfloat16"}, "compute_dtype and engine_dtype"),
        ({"mesh__fsdp": 8, "batch__rows": 8}, "a mesh of one device"),
        ({"batch__align": 2}, "multiple of config.engine.page_size, 4"),
    ],
)
def test_what_tiles_need_is_said(tmp_path, change, needs):
    with pytest.raises(InputError, match=needs), train_lib.parts(debug(**EXACT | change), tmp_path):
        pass


# The policy of tiles, and scores by the gradient program, with a model of more heads and layers

CONFIG = ModelConfig(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="module")
def model():
    return Llama(CONFIG, seed=1)


def trace(rng, n):
    sampled = rng.random(n) < 0.6
    sampled[0], sampled[-1] = False, True
    return TokenTrace(
        tokens=rng.integers(0, 320, n).astype(np.int32),
        sampled=sampled,
        trainable=sampled,
        logprobs=np.where(sampled, -1.0, np.nan).astype(np.float32),
        version=np.where(sampled, 0, -1).astype(np.int32),
        turn=np.zeros(n, np.int32),
    )


def packed(traces, **shape):
    task = Task("a", "t", "train")
    stop = StopReason.TERMINATED
    trajectories = [Trajectory(task, 0, (), (t,), float(i), 0.0, stop) for i, t in enumerate(traces)]
    advantages = np.linspace(-1, 1, len(traces))
    found = batching.pack([Group(trajectories)], [advantages], grpo(), **shape).minibatches[0]
    return found


def by_rollout(batches, scores):
    """Log-probs at the trained tokens of each episode."""
    found = {}
    for batch, score in zip(batches, scores, strict=True):
        for row in range(len(batch.rollout)):
            for rollout in np.unique(batch.rollout[row][batch.mask[row] > 0]):
                at = (batch.rollout[row] == rollout) & (batch.mask[row] > 0)
                found[int(rollout)] = np.asarray(score)[row][at]
    return [found[i].tobytes() for i in sorted(found)]


def test_the_gradient_program_scores_alike_in_every_packing_and_on_every_mesh(model):
    """CASES 93, for the trainer."""
    rng = np.random.default_rng(0)
    traces = [trace(rng, n) for n in (120, 90, 128, 77, 100, 64, 129, 30)]
    graphdef, params = nnx.split(model)

    def score(mesh_shape=(1, 1, 1), **shape):
        mesh = make_mesh(mesh_shape, devices=jax.devices()[: int(np.prod(mesh_shape))])
        optimizer = make_optimizer(1e-3)
        placed = jax.device_put(params, shardings_of(model, mesh))
        state = init_state(placed, optimizer, jax.random.key(0), mesh)
        policy = make_policy(graphdef, chunk=2048, mesh=mesh)
        step = make_train_step(policy, grpo(), optimizer, mesh, state_shardings(state))
        batches = packed(traces, **shape)
        return by_rollout(batches, [step.score(state.params, b) for b in batches])

    reference = score(rows=8, length=128, align=128)  # one trace a row
    assert len(reference) == 8
    assert score(rows=1, length=128, align=128) == reference
    assert score(rows=8, length=192, align=192) == reference, "padding"
    assert score(rows=2, length=512, align=EXACT_ALIGNMENT) == reference, "packing"
    for mesh in ((8, 1, 1), (1, 8, 1), (2, 4, 1)):
        assert score(mesh, rows=8, length=128, align=128) == reference, mesh


def test_tiles_are_the_engines_and_their_gradient_is_the_models(model):
    """Replies of a deterministic engine, packed at odd places of rows, against the policy of tiles."""
    rng = np.random.default_rng(1)
    backend = EmbeddedBackend(model, slots=4, context=96, page_size=8, deterministic=True)
    prompts = [rng.integers(0, 320, n).tolist() for n in (3, 8, 21, 40, 55, 16, 9)]
    futures = [backend.submit(p, Sampling(max_tokens=30, seed=i)) for i, p in enumerate(prompts)]
    replies = [f.result(300) for f in futures]
    backend.close()
    traces = []
    for p, g in zip(prompts, replies, strict=True):
        sampled = np.repeat([False, True], [len(p), len(g.tokens)])
        tokens = np.concatenate([p, g.tokens]).astype(np.int32)
        logprobs = np.concatenate([np.full(len(p), np.nan), g.logprobs]).astype(np.float32)
        version = np.where(sampled, 0, -1).astype(np.int32)
        traces.append(TokenTrace(tokens, sampled, sampled, logprobs, version, np.zeros_like(version)))
    (batch,) = packed(traces, rows=3, length=200, align=8)
    graphdef, params = nnx.split(model)
    tiled = make_tiled_policy(graphdef, rows=4, page_size=8, context=96)
    plain = make_policy(graphdef)
    weight = np.where(batch.mask > 0, rng.normal(size=batch.mask.shape), 0).astype(np.float32)

    def loss(policy, params):
        logprobs, entropy = policy(params, batch)
        return (weight * (logprobs + 0.3 * entropy)).sum(), (logprobs, entropy)

    def gradient(policy):
        return jax.jit(jax.value_and_grad(lambda x: loss(policy, x), has_aux=True))(params)

    (_, (logprobs, entropy)), grads = gradient(tiled)
    on = batch.mask > 0
    np.testing.assert_array_equal(np.asarray(logprobs)[on], batch.behavior_logprobs[on])
    (_, (expected, expected_entropy)), expected_grads = gradient(plain)
    np.testing.assert_allclose(np.asarray(logprobs)[on], np.asarray(expected)[on], atol=1e-5, rtol=0)
    np.testing.assert_allclose(np.asarray(entropy)[on], np.asarray(expected_entropy)[on], atol=1e-5, rtol=0)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(np.abs(b).max()))

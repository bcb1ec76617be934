"""Sessions that were exported are scored again and trained from their rows alone; nothing generates."""

import json
import urllib.request
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from metagym.errors import InputError
from metagym.experiments.build import random_model
from metagym.models import load, make_policy
from metagym.proxy import export
from metagym.proxy.backends.embedded import EmbeddedBackend
from metagym.proxy.render import Renderer
from metagym.proxy.server import Proxy
from metagym.rl.advantages import of_group
from metagym.rl.algorithms import grpo
from metagym.rl.batching import pack
from metagym.rl.train_step import init_state, make_train_step, state_shardings
from metagym.types import Group, Sampling, StopReason, Task, Trajectory

GROUPS, MEMBERS = 2, 4


def ask(method, url, key, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, method=method)
    request.add_header("authorization", f"Bearer {key}")
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Two tasks, four episodes of two turns each, over HTTP from random weights; then the model is gone."""
    folder = tmp_path_factory.mktemp("offline")
    directory = random_model(folder / "model", seed=3)
    renderer = Renderer.from_dir(directory)
    engine = EmbeddedBackend(load(directory)[0], slots=4, context=256, page_size=8)
    proxy = Proxy(engine, renderer, control_port=0, context=256, sampling=Sampling(max_tokens=6)).start()
    rows, live = [], {}
    try:
        control, key = f"{proxy.control_url}/sessions", proxy.control_key
        for i in range(GROUPS * MEMBERS):
            task = f"task {i // MEMBERS}"
            opened = ask("POST", control, key, {"name": f"e{i}", "task": task, "seed": i})
            talk = [{"role": "user", "content": task}]
            for text in ("and?", "so?"):
                url = f"{opened['url']}/v1/chat/completions"
                answer = ask("POST", url, opened["key"], {"messages": talk})
                talk += [answer["choices"][0]["message"], {"role": "user", "content": text}]
            ask("POST", f"{control}/{opened['id']}/score", key, {"reward": float(i % 2)})
            rows += ask("GET", f"{control}/{opened['id']}/export?format=native", key)
            live[opened["id"]] = (task, proxy.session(opened["id"]).session.traces)
    finally:
        proxy.close()
        engine.close()
    export.write_rows(folder / "rows.jsonl", rows)
    return SimpleNamespace(folder=folder, directory=directory, live=live, renderer=renderer)


class Trainer:
    """A model from its files, and a training step; no backend, no renderer."""

    def __init__(self, directory):
        mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        model, _ = load(directory, mesh=mesh)
        graphdef, params = nnx.split(model)
        optimizer = optax.adam(1e-2)
        self.state = init_state(params, optimizer, jax.random.key(0), mesh)
        policy = make_policy(graphdef, mesh=mesh)
        self.algorithm = grpo()
        self.step = make_train_step(policy, self.algorithm, optimizer, mesh, state_shardings(self.state))

    def pack(self, groups):
        advantages = [of_group(self.algorithm, g) for g in groups]
        return pack(groups, advantages, self.algorithm, rows=2, length=256).minibatches

    def train(self, groups):
        self.state, metrics = self.step(self.state, self.pack(groups))
        return metrics, jax.device_get(self.state.params)


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def test_training_from_rows_is_training_from_the_sessions(recorded):
    groups = export.groups_of_rows(export.read_rows(recorded.folder / "rows.jsonl"))
    assert [[t.reward for t in g.trajectories] for g in groups] == [[0.0, 1.0, 0.0, 1.0]] * GROUPS
    played: dict[str, list[Trajectory]] = {}
    for i, (task, traces) in enumerate(recorded.live.values()):
        about = (Task(task, "live", "train"), 0, (), traces, float(i % 2), float(i % 2), StopReason.SUBMITTED)
        played.setdefault(task, []).append(Trajectory(*about))
    from_rows, from_live = Trainer(recorded.directory), Trainer(recorded.directory)
    before = leaves(jax.device_get(from_rows.state.params))
    metrics, after = from_rows.train(groups)
    _, expected = from_live.train([Group(tuple(members)) for members in played.values()])
    assert metrics["update/applied"] == 1
    assert metrics["sampler/max"] < 1e-3, "the trainer computes what was sampled"
    assert any(not np.array_equal(a, b) for a, b in zip(before, leaves(after), strict=True))
    for a, b in zip(leaves(after), leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_rows_are_scored_again(recorded):
    """By another reward, and by other weights."""
    rows = export.read_rows(recorded.folder / "rows.jsonl")

    def vowels(traces):
        said = recorded.renderer.decode(np.concatenate([t.tokens[t.sampled] for t in traces]).tolist())
        return float(sum(c in "aeiou" for c in said.lower()))

    groups = export.groups_of_rows(rows, vowels)
    rewards = [t.reward for g in groups for t in g.trajectories]
    assert rewards == [vowels(traces) for _, traces in recorded.live.values()]
    assert len(set(rewards)) > 1
    trainer = Trainer(recorded.directory)
    (minibatch,) = trainer.pack(groups)
    for batch in minibatch:
        scored = trainer.step.score(trainer.state.params, batch)
        kept = batch.mask > 0
        np.testing.assert_allclose(scored[kept], batch.behavior_logprobs[kept], atol=1e-3)
    _, params = trainer.train(groups)
    moved = trainer.step.score(jax.device_put(params, trainer.step.mesh.devices.flat[0]), minibatch[0])
    kept = minibatch[0].mask > 0
    assert np.abs(moved[kept] - minibatch[0].behavior_logprobs[kept]).max() > 1e-3


def test_what_can_not_be_trained_on_is_told(recorded):
    rows = export.read_rows(recorded.folder / "rows.jsonl")
    with pytest.raises(InputError, match=r"session '\w+-\w+' has no reward"):
        export.groups_of_rows([{**rows[0], "reward": None}])
    with pytest.raises(InputError, match="not a list"):
        export.groups_of_rows([[]])

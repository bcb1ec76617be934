"""A real SGLang server, on the CPU. `make test-sglang` installs it and sets METAGYM_TEST_SGLANG, the
interpreter that has it; without that these tests are skipped."""

import contextlib
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from metagym.experiments.build import random_model
from metagym.models import load, make_policy, save
from metagym.proxy.backends.sglang import SGLangBackend
from metagym.proxy.backends.sglang_server import SGLangProcess
from metagym.rl.batching import empty_batch

HERE = Path(__file__).parent
INTERPRETER = os.environ.get("METAGYM_TEST_SGLANG", "")
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
QWEN2 = {**SHAPE, "model_type": "qwen2", "qkv_bias": True}
QWEN3_MOE = {
    **SHAPE,
    "model_type": "qwen3_moe",
    "qk_norm": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
CPU = (
    *("--device=cpu", "--dtype=float32", "--attention-backend=torch_native", "--sampling-backend=pytorch"),
    *("--mem-fraction-static=0.1", "--max-total-tokens=65536", "--disable-overlap-schedule"),
    *("--grammar-backend=none", "--log-level-http=warning", "--sleep-on-idle"),
)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.timeout(900))  # a server takes a minute to start, and its time to end
            if not INTERPRETER and item.path.name != "jax_test.py":
                item.add_marker(pytest.mark.skip(reason="no SGLang here: make test-sglang installs it"))


@pytest.fixture(scope="session")
def python(tmp_path_factory) -> str:
    """SGLang's interpreter, with what it needs on a CPU."""
    path = tmp_path_factory.mktemp("bin") / "python"
    path.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={HERE / 'stubs'} SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1\n"
        f'exec "{INTERPRETER}" "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="session")
def flags():
    """Of a server on a CPU."""
    return CPU


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Writes a tiny model with our exporter: (model, folder). Its biases are not zero."""

    def make(**fields):
        folder = tmp_path_factory.mktemp("model")
        base = random_model(folder / "base", 1, **fields)
        model, _ = load(base)
        rng = np.random.default_rng(0)
        for path, param in vars(model.layers).items():
            if path.endswith("_bias"):
                param.set_value(jnp.asarray(rng.normal(size=param[...].shape) / 4, jnp.float32))
        return model, save(model, folder / "model", source=base)

    return make


@pytest.fixture(scope="module")
def qwen2(made):
    return made(**QWEN2)


@pytest.fixture(scope="module")
def moe(made):
    return made(**QWEN3_MOE)


@pytest.fixture(scope="session")
def serve(python, tmp_path_factory):
    """Starts a server of a folder's model: a process that answers."""

    def start(folder, *args):
        process = SGLangProcess(
            folder, tmp_path_factory.mktemp("log") / "sglang.log", args=(*CPU, *args), python=python
        )
        try:
            process.start()
            SGLangBackend([process.url], folder, start_s=600).close()
        except BaseException:
            process.stop()
            raise
        return process

    return start


@pytest.fixture(scope="session")
def server_of():
    """The process that serves, in a group of processes."""

    def find(group):
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                mine = int(stat.read_text().rsplit(")", 1)[1].split()[2]) == group
                command = (stat.parent / "cmdline").read_bytes() if mine else b""
                if b"sglang.launch_server\0" in command and not command.startswith(b"/bin/sh"):
                    return int(stat.parent.name)
        raise AssertionError(f"no server in the group {group}")

    return find


@pytest.fixture(scope="session")
def score():
    """The trainer's log-probs of a generation, in one forward pass."""

    def logprobs(model, prompt, generation, *, params=None, replay=False):
        ids = [*prompt, *generation.tokens.tolist()]
        n, R = len(ids) - 1, model.config.routing_width
        batch = empty_batch(1, 512, R)
        batch.tokens[0, :n], batch.targets[0, :n] = ids[:-1], ids[1:]
        batch.positions[0, :n], batch.segments[0, :n] = np.arange(n), 1
        batch.mask[0, len(prompt) - 1 : n] = 1
        batch.routing[:] = -1
        if R and replay:
            batch.routing[0, :n] = np.concatenate([generation.prompt_routing, generation.routing])[:-1]
        graphdef, own = nnx.split(model)
        policy = _policy(graphdef, replay)
        return np.asarray(policy(own if params is None else params, batch)[0])[0, len(prompt) - 1 : n]

    return logprobs


_POLICIES = {}


def _policy(graphdef, replay):
    if (graphdef, replay) not in _POLICIES:
        _POLICIES[graphdef, replay] = jax.jit(make_policy(graphdef, chunk=64, replay=replay))
    return _POLICIES[graphdef, replay]

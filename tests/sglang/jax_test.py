"""The backend on a real sglang-jax server, which has no routes for weights. `make test-sglang-jax` installs
it, and sets METAGYM_TEST_SGLANG_JAX, the interpreter that has it; without that these tests are skipped."""

import os
import signal
import socket
import subprocess

import numpy as np
import pytest
from flax import nnx

from metagym.errors import EngineError, InputError
from metagym.proxy.backends.sglang import SGLangBackend
from metagym.types import Sampling

INTERPRETER = os.environ.get("METAGYM_TEST_SGLANG_JAX", "")
pytestmark = pytest.mark.skipif(
    not INTERPRETER, reason="no sglang-jax here: make test-sglang-jax installs it"
)
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 256,
    "head_dim": 128,
    "qk_norm": True,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
CPU = (
    *("--device=cpu", "--dtype=float32", "--attention-backend=native", "--max-total-tokens=4096"),
    *("--mem-fraction-static=0.2", "--max-running-requests=4", "--disable-jax-precompile"),
    *("--skip-server-warmup", "--max-prefill-tokens=256", "--chunked-prefill-size=256"),
    *("--grammar-backend=none", "--disable-overlap-schedule"),
)


@pytest.fixture(scope="module")
def qwen3(made):
    return made(**QWEN3)


@pytest.fixture(scope="module")
def backend(qwen3, tmp_path_factory):
    model, folder = qwen3
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    log = tmp_path_factory.mktemp("log") / "server.log"
    command = [INTERPRETER, "-m", "sgl_jax.launch_server", f"--model-path={folder}", f"--port={port}", *CPU]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
    made = None
    try:
        made = SGLangBackend([f"http://127.0.0.1:{port}"], folder, model=model, start_s=800)
        yield made
    except EngineError as error:
        raise AssertionError(log.read_text()[-4000:]) from error
    finally:
        if made is not None:
            made.close()
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_it_generates(backend, qwen3, score):
    model, rng = qwen3[0], np.random.default_rng(0)
    prompts = [rng.integers(0, 256, 20).tolist() for _ in range(3)]
    worst = []
    for ids, future in [(p, backend.submit(p, Sampling(12))) for p in prompts]:
        generation = future.result()
        assert len(generation.tokens) == 12
        assert set(generation.version) == {0}
        worst.append(np.abs(generation.logprobs - score(model, ids, generation)).max())
    ids = [*prompts[0], *generation.tokens.tolist()]
    worst.append(
        np.abs((g := backend.submit(ids, Sampling(12)).result()).logprobs - score(model, ids, g)).max()
    )
    print(f"log-probs differ by {max(worst):.1e}")
    assert max(worst) < 1e-5


def test_it_takes_no_weights(backend, qwen3):
    with pytest.raises(InputError, match="sglang-jax has no route for new weights"):
        backend.load(nnx.split(qwen3[0])[1], 1)

"""The backend on a real SGLang server: a mixture of experts, whose routing the trainer replays."""

import jax
import numpy as np
import pytest
from flax import nnx

from metagym.errors import InputError
from metagym.proxy.backends.embedded import EmbeddedBackend
from metagym.proxy.backends.sglang import SGLangBackend
from metagym.types import Sampling

PROMPT = np.random.default_rng(0).integers(0, 256, 40).tolist()


@pytest.fixture(scope="module")
def server(moe, serve):
    process = serve(moe[1], "--enable-return-routed-experts")
    yield process
    process.stop()


@pytest.fixture
def backend(server, moe):
    model, folder = moe
    backend = SGLangBackend([server.url], folder, model=model)
    backend.load(nnx.split(model)[1], 1)
    yield backend
    backend.close()


def sets(rows, k=2):
    """The experts of each token in each layer, in an order that does not matter."""
    return np.sort(rows.reshape(len(rows), -1, k), axis=-1)


def test_routing_and_log_probs(backend, moe, score):
    model = moe[0]
    fresh = backend.submit(PROMPT, Sampling(40, seed=1)).result()
    cached = backend.submit([*PROMPT, *fresh.tokens.tolist()], Sampling(30)).result()
    assert backend.stats()["cached_tokens"] > 40
    for prompt, said in ((PROMPT, fresh), ([*PROMPT, *fresh.tokens.tolist()], cached)):
        found = np.concatenate([said.prompt_routing, said.routing])
        assert found.shape == (len(prompt) + len(said.tokens), 4)
        assert (found[-1] == -1).all()  # read by nobody
        own = EmbeddedBackend(model, slots=1, context=256)
        try:
            whole = [*prompt, *said.tokens.tolist()]
            want = own.submit(whole, Sampling(1)).result().prompt_routing
        finally:
            own.close()
        np.testing.assert_array_equal(sets(found[:-1]), sets(want[:-1]))
        free = np.abs(said.logprobs - score(model, prompt, said)).max()
        bound = np.abs(said.logprobs - score(model, prompt, said, replay=True)).max()
        print(f"log-probs differ by {free:.1e}, with the routing replayed by {bound:.1e}")
        assert max(free, bound) < 1e-5


def test_routing_over_a_token_that_ends_turns_for_the_server(backend, moe, score):
    said = [f.result() for f in [backend.submit(PROMPT, Sampling(100)) for _ in range(8)]]
    assert backend.stats()["continued"] > 0
    for g in said:
        assert g.prompt_routing.shape == (40, 4)
        assert (g.routing[:-1] >= 0).all()
        assert np.abs(g.logprobs - score(moe[0], PROMPT, g, replay=True)).max() < 1e-5


def test_a_push(backend, moe, score):
    model = moe[0]
    other = jax.tree.map(lambda x: x * 1.1, nnx.split(model)[1])
    backend.load(other, 2)
    said = backend.submit(PROMPT, Sampling(30)).result()
    assert np.abs(said.logprobs - score(model, PROMPT, said, params=other, replay=True)).max() < 1e-5


def test_routing_is_there_on_request(server, moe):
    backend = SGLangBackend([server.url], moe[1], model=moe[0], routing=False)
    try:
        assert backend.submit(PROMPT, Sampling(4)).result().routing.shape == (4, 0)
    finally:
        backend.close()


def test_a_server_that_records_none_is_refused(server, moe, monkeypatch):
    from metagym.proxy.backends.sglang_remote import Remote

    get = Remote.get

    async def without(self, path):
        answer = await get(self, path)
        return {**answer, "enable_return_routed_experts": False} if path == "/server_info" else answer

    monkeypatch.setattr(Remote, "get", without)
    with pytest.raises(InputError, match="--enable-return-routed-experts"):
        SGLangBackend([server.url], moe[1], model=moe[0])

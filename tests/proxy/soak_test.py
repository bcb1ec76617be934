"""Programs that hang up, repeat themselves and send rubbish, for a moment: nothing is lost or trained twice.

`python benchmarks/proxy.py soak` does it for minutes, and looks at memory.
"""

import asyncio
import json
import random

import aiohttp
import pytest

from metagym.proxy.render import Renderer
from metagym.proxy.server import Proxy
from metagym.testing import FaultyBackend, ScriptedBackend


@pytest.mark.parametrize("delay_s", [0.0, 0.005])
def test_hang_ups_repetitions_and_rubbish(model_dir, delay_s):
    renderer = Renderer.from_dir(model_dir)
    inner = ScriptedBackend(lambda prompt: [*renderer.encode_text(f"said {sum(prompt) % 97}"), 2])
    backend = FaultyBackend(inner, "slow", delay_s=delay_s) if delay_s else inner
    proxy = Proxy(backend, renderer, context=100_000)
    rng = random.Random(7)

    async def play(opened, client, rounds=12):
        talk, got = [], 0
        url = f"{opened.url}/v1/chat/completions"
        headers = {"authorization": f"Bearer {opened.key}"}

        async def ask(messages):
            async with client.post(url, json={"messages": messages}, headers=headers) as answer:
                assert answer.status == 200
                return (await answer.json())["choices"][0]["message"]

        for i in range(rounds):
            request = [*talk, {"role": "user", "content": f"turn {i} " + "x" * rng.randrange(40)}]
            kind = rng.random()
            if kind < 0.2:
                rubbish = rng.choice([b"{", b"[1]", b"\xff", json.dumps({"messages": [i]}).encode()])
                async with client.post(url, data=rubbish, headers=headers) as answer:
                    assert answer.status == 400
                continue
            if kind < 0.45:
                task = asyncio.create_task(ask(request))
                await asyncio.sleep(rng.random() * 0.01)
                task.cancel()
                (said,) = await asyncio.gather(task, return_exceptions=True)
                if isinstance(said, BaseException):
                    continue
            elif kind < 0.65:
                said, again = await asyncio.gather(ask(request), ask(request))
                if said != again:  # one had been delivered when the other came: a retry that is answered anew
                    said = rng.choice([said, again])
            else:
                said = await ask(request)
            talk, got = [*request, said], got + 1
        return talk, got

    async def main():
        async with proxy.serving(), aiohttp.ClientSession() as client:
            opened = [proxy.open(seed=i) for i in range(12)]
            played = await asyncio.gather(*(play(o, client) for o in opened))
            return [(o.session, talk, got) for o, (talk, got) in zip(opened, played, strict=True)]

    for session, talk, got in asyncio.run(main()):
        traces, nodes = session.traces, session.nodes
        trained = [t for trace in traces for t in set(trace.turn[trace.trainable].tolist())]
        assert len(trained) == len(set(trained)), "trained twice"
        used = [n for n in nodes if not session._tree.superseded(n)]
        assert sorted(n.turn for n in used) == sorted(trained), "what was used trains, nothing else does"
        assert len(nodes) >= got
        if not talk:
            continue
        # The conversation that the program has in its hands is one unbroken path.
        said = [m["content"] for m in talk if m["role"] == "assistant"]
        assert any([x.messages[-1].content for x in n.path()] == said for n in nodes)
        assert not session._running

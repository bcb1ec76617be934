"""A `Chat` at any OpenAI-compatible endpoint, with the standard library alone.

For actors and baselines that are measured, not trained: the tokens are not seen. What trains is a session of
`metagym.proxy`.
"""

import functools
import json
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from metagym.errors import ContextOverflowError, EngineError, InputError
from metagym.live import Live
from metagym.types import Message

_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)  # statuses that are worth another try
_TOO_LONG = ("context length", "context_length", "maximum context", "too many tokens", "input is too long")


class Endpoint(Live):
    """Asks `<url>/chat/completions`. Thread-safe; keeps no state.

    Args:
        url: up to and without `/chat/completions`, such as "http://127.0.0.1:8000/v1".
        model: the model's name there.
        key: an API key, sent as a bearer token; it is in no message and no record.
        sampling: what else the body holds: temperature, top_p, max_tokens, seed, ...
        timeout_s: longest wait for one answer.
        retries: further tries after an answer that says "later" (408, 409, 425, 429, 5xx) or none at all; the
            wait doubles from `wait_s`, or is what Retry-After says, 60 s at most.

    A begun reply goes as a last assistant message with `continue_final_message`, as vLLM and SGLang take it.
    There is a system message only if the caller gives one; whether the server's own chat template then adds a
    default one is the server's doing (vLLM takes `{"chat_template": ...}` in `sampling`).
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
        retries: int = 4,
        wait_s: float = 1.0,
    ):
        if not url.startswith(("http://", "https://")):
            raise InputError(f"an endpoint's url begins with http:// or https://, got {url!r}.")
        self.url, self.model, self.sampling = url.rstrip("/"), model, dict(sampling or {})
        self._key, self._timeout_s, self._retries, self._wait_s = key, timeout_s, retries, wait_s

    def chat(self, messages: Sequence[Message], *, prefix: str = "") -> Message:
        """See `metagym.protocols.Chat`. Raises ContextOverflowError, EngineError."""
        said = [_plain(m) for m in messages]
        body: dict[str, Any] = {"model": self.model, **self.sampling, "messages": said}
        if prefix:
            body["messages"] = [*said, {"role": "assistant", "content": prefix}]
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        answer = self._ask(body)
        try:
            content = answer["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError) as error:
            raise EngineError(f"{self.url} answered without a choice: {json.dumps(answer)[:300]}") from error
        return Message("assistant", content if content.startswith(prefix) else prefix + content)

    def about(self) -> dict[str, Any]:
        """What is recorded of it."""
        return {"endpoint": self.url, "model": self.model, "sampling": dict(self.sampling)}

    def _ask(self, body: Mapping[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(
            f"{self.url}/chat/completions", json.dumps(body).encode(), headers, method="POST"
        )
        wait = self._wait_s
        for attempt in range(self._retries + 1):
            try:
                with urllib.request.urlopen(request, timeout=self._timeout_s) as reply:
                    return json.loads(reply.read())
            except urllib.error.HTTPError as error:
                text = error.read().decode("utf-8", "replace")[:500]
                if error.code in (400, 413, 422) and any(words in text.lower() for words in _TOO_LONG):
                    raise ContextOverflowError(f"{self.url} says: {text}") from error
                problem: Exception = EngineError(f"{self.url} answered {error.code}: {text}")
                if error.code not in _AGAIN:
                    raise problem from error
                after = error.headers.get("Retry-After", "")
                if after.isdigit():
                    wait = float(after)
            except (OSError, ValueError) as error:  # unreachable, cut off, too slow, no JSON
                problem = EngineError(f"{self.url} can't be used: {type(error).__name__}: {error}")
            if attempt == self._retries:
                raise problem
            time.sleep(min(60.0, wait) * random.uniform(0.75, 1.25))
            wait *= 2
        raise AssertionError("unreachable")


def _plain(message: Message) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        out["tool_calls"] = [dict(c) for c in message.tool_calls]
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    return out


def _seeded(
    url: str, model: str, key_name: str, sampling: Mapping[str, Any], how: Mapping[str, Any], seed: int
) -> Endpoint:
    key = os.environ.get(key_name) if key_name else None
    return Endpoint(url, model, key=key, sampling={"seed": seed, **sampling}, **how)


def endpoints(
    url: str, model: str, *, key_name: str = "", sampling: Mapping[str, Any] | None = None, **how: Any
) -> Callable[[int], Endpoint]:
    """A function that makes the endpoint of one episode from the seed of its sampling: what
    `metagym.meta.Actor` takes. `key_name` is the environment variable that holds the API key; `how` goes to
    `Endpoint`. Raises InputError if the variable is not set."""
    if key_name and not os.environ.get(key_name):
        raise InputError(f"the environment variable {key_name} is not set: it must hold the API key.")
    Endpoint(url, model, sampling=sampling, **how)  # so that a wrong argument fails here
    return functools.partial(_seeded, url, model, key_name, dict(sampling or {}), how)

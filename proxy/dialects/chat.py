"""OpenAI chat completions: `POST /v1/chat/completions`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from metagym.errors import InputError
from metagym.proxy.dialects import (
    Asked,
    Memory,
    Stamp,
    call,
    chunks,
    conversation,
    dump,
    function,
    listed,
    mapped,
    most_tokens,
    read_body,
    sampling_asked,
    text_of,
)
from metagym.proxy.session import Reply, Request
from metagym.types import Message

KEEP_ALIVE = b": keep-alive\n\n"
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_ROLES["function"] = "tool"


def read(body: Any, memory: Memory) -> Asked:
    body = read_body(body, "messages")
    if body.get("n") not in (None, 1):
        raise InputError(f"n must be 1, not {body['n']!r}: one answer a request")
    options = body.get("stream_options")
    request = Request(
        messages=conversation(memory.read(listed(body["messages"], "messages"), _message)),
        tools=tuple(filter(None, memory.read(listed(body.get("tools"), "tools"), _tool))),
        max_tokens=most_tokens(body.get("max_completion_tokens"), body.get("max_tokens")),
        asked=sampling_asked(body),
    )
    wanted = {
        "usage": isinstance(options, dict) and bool(options.get("include_usage")),
        "logprobs": bool(body.get("logprobs")),
        "token_ids": bool(body.get("return_token_ids")),
    }
    return Asked(request, str(body.get("model", "")), bool(body.get("stream")), wanted)


def _message(message: Any) -> Message:
    message = mapped(message, "a message")
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        raise InputError(f"a message has role {message.get('role')!r}; roles are {', '.join(_ROLES)}")
    content = text_of(message.get("content"))
    if role == "assistant":
        calls = []
        for c in listed(message.get("tool_calls"), "tool_calls"):
            f = mapped(mapped(c, "a tool call").get("function", {}), "function")
            calls.append(call(c.get("id"), f.get("name"), f.get("arguments")))
        thoughts = message.get("reasoning_content", message.get("reasoning"))
        thoughts = thoughts if isinstance(thoughts, str) else None
        return Message("assistant", content, tuple(calls), reasoning=thoughts)
    if role == "tool":
        id = message.get("tool_call_id")
        return Message("tool", content, tool_call_id=id if isinstance(id, str) else "")
    return Message(role, content)  # type: ignore[arg-type]


def _tool(tool: Any) -> dict[str, Any] | None:
    f = mapped(tool, "a tool").get("function")
    return function(f.get("name"), f.get("description"), f.get("parameters")) if isinstance(f, dict) else None


def write(asked: Asked, reply: Reply, stamp: Stamp, pieces: Sequence[str] | None) -> dict[str, Any]:
    m = reply.message
    message: dict[str, Any] = {"role": "assistant", "content": m.content or (None if m.tool_calls else "")}
    message["refusal"] = None
    if m.reasoning is not None:
        message["reasoning_content"] = m.reasoning
    if m.tool_calls:
        message["tool_calls"] = [dict(c) for c in m.tool_calls]
    finish = "length" if reply.finish == "length" else "tool_calls" if m.tool_calls else "stop"
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    generation = reply.node.generation
    if pieces is not None and generation is not None and asked.options["logprobs"]:
        choice["logprobs"] = {
            "content": [
                {"token": t, "logprob": float(p), "bytes": list(t.encode()), "top_logprobs": []}
                for t, p in zip(pieces, generation.logprobs, strict=True)
            ],
            "refusal": None,
        }
    if asked.options["token_ids"] and generation is not None:
        choice["token_ids"] = generation.tokens.tolist()
    return {
        "id": f"chatcmpl-{stamp.id}",
        "object": "chat.completion",
        "created": stamp.created,
        "model": asked.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.completion_tokens,
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
        },
    }


def events(full: Mapping[str, Any], asked: Asked) -> Iterator[bytes]:
    base = {k: full[k] for k in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    choice = full["choices"][0]
    message = choice["message"]

    def chunk(delta: Mapping[str, Any], **more: Any) -> bytes:
        told = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return f"data: {dump({**base, 'choices': [told]})}\n\n".encode()

    yield chunk({"role": "assistant", "content": ""})
    for text in chunks(message.get("reasoning_content") or ""):
        yield chunk({"reasoning_content": text})
    for text in chunks(message["content"] or ""):
        yield chunk({"content": text})
    for i, c in enumerate(message.get("tool_calls", ())):
        head = {"index": i, "id": c["id"], "type": "function"}
        yield chunk({"tool_calls": [{**head, "function": {"name": c["function"]["name"], "arguments": ""}}]})
        for text in chunks(c["function"]["arguments"]):
            yield chunk({"tool_calls": [{"index": i, "function": {"arguments": text}}]})
    last = {"finish_reason": choice["finish_reason"], "logprobs": choice["logprobs"]}
    yield chunk({}, **last, **({"token_ids": choice["token_ids"]} if "token_ids" in choice else {}))
    if asked.options["usage"]:
        yield f"data: {dump({**base, 'choices': [], 'usage': full['usage']})}\n\n".encode()
    yield b"data: [DONE]\n\n"


def error(status: int, code: str, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status in (400, 404, 408, 413) else "server_error"
    kind = {401: "authentication_error", 403: "permission_error", 410: "permission_error"}.get(status, kind)
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_event(error: Mapping[str, Any]) -> bytes:
    return f"data: {dump(error)}\n\n".encode()

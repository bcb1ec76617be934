"""Anthropic messages: `POST /v1/messages`, and `POST /v1/messages/count_tokens`."""

import json
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

KEEP_ALIVE = b'event: ping\ndata: {"type": "ping"}\n\n'
_BILLING = "x-anthropic-billing-header:"  # a line for the provider's accounts, no part of the prompt


def read(body: Any, memory: Memory) -> Asked:
    body = read_body(body, "messages")
    messages = [Message("system", text)] if (text := _system(body.get("system"))) else []
    for read in memory.read(listed(body["messages"], "messages"), _messages):
        messages += read
    request = Request(
        conversation(messages),
        tuple(filter(None, memory.read(listed(body.get("tools"), "tools"), _tool))),
        max_tokens=most_tokens(body.get("max_tokens")),
        asked=sampling_asked(body),
    )
    return Asked(request, str(body.get("model", "")), bool(body.get("stream")))


def _system(system: Any) -> str:
    if isinstance(system, str) or system is None:
        return system or ""
    parts = [mapped(p, "a part of system") for p in listed(system, "system")]
    return text_of([p for p in parts if not str(p.get("text", "")).startswith(_BILLING)], "system")


def _messages(message: Any) -> list[Message]:
    """A message as ours: results of tools are messages of their own, in order."""
    message = mapped(message, "a message")
    role, content = message.get("role"), message.get("content")
    if role == "system":
        return [Message("system", text_of(content))]
    if role not in ("user", "assistant"):
        raise InputError(f"a message has role {role!r}; roles are user, assistant, system")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else listed(content, "content")
    parts = [mapped(p, "a part of content") for p in parts]
    if role == "assistant":
        calls = [
            call(p.get("id"), p.get("name"), p.get("input")) for p in parts if p.get("type") == "tool_use"
        ]
        texts = [p for p in parts if p.get("type") == "text"]
        thoughts = [str(p.get("thinking", "")) for p in parts if p.get("type") == "thinking"]
        reasoning = "\n".join(thoughts) if thoughts else None
        return [Message("assistant", text_of(texts), tuple(calls), reasoning=reasoning)]
    out: list[Message] = []
    pending: list[Mapping[str, Any]] = []
    for part in [*parts, None]:
        if part is not None and part.get("type") != "tool_result":
            pending.append(part)
            continue
        if pending:
            out.append(Message("user", text_of(pending)))
            pending = []
        if part is not None:
            id = part.get("tool_use_id")
            text = text_of(part.get("content"), "a tool's result")
            out.append(Message("tool", text, tool_call_id=id if isinstance(id, str) else ""))
    return out or [Message("user", "")]


def _tool(tool: Any) -> dict[str, Any] | None:
    tool = mapped(tool, "a tool")
    if "input_schema" not in tool:
        return None  # the provider's servers run it
    return function(tool.get("name"), tool.get("description"), tool["input_schema"])


def write(asked: Asked, reply: Reply, stamp: Stamp, pieces: Sequence[str] | None) -> dict[str, Any]:
    m = reply.message
    content: list[dict[str, Any]] = []
    if m.reasoning is not None:
        content.append({"type": "thinking", "thinking": m.reasoning, "signature": stamp.id})
    if m.content or not m.tool_calls:
        content.append({"type": "text", "text": m.content, "citations": None})
    for c in m.tool_calls:
        arguments = json.loads(c["function"]["arguments"])
        told = {"id": c["id"], "name": c["function"]["name"], "input": arguments}
        content.append({"type": "tool_use", **told, "caller": {"type": "direct"}})
    return {
        "id": f"msg_{stamp.id}",
        "type": "message",
        "role": "assistant",
        "model": asked.model,
        "content": content,
        "stop_reason": "max_tokens"
        if reply.finish == "length"
        else "tool_use"
        if m.tool_calls
        else "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": reply.prompt_tokens - reply.cached_tokens,
            "cache_read_input_tokens": reply.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": reply.completion_tokens,
        },
    }


def events(full: Mapping[str, Any], asked: Asked) -> Iterator[bytes]:
    def event(kind: str, **more: Any) -> bytes:
        return f"event: {kind}\ndata: {dump({'type': kind, **more})}\n\n".encode()

    begun = {**full, "content": [], "stop_reason": None, "usage": {**full["usage"], "output_tokens": 0}}
    yield event("message_start", message=begun)
    for i, block in enumerate(full["content"]):
        kind = block["type"]
        if kind == "text":
            empty, deltas = (
                {**block, "text": ""},
                [{"type": "text_delta", "text": t} for t in chunks(block["text"])],
            )
        elif kind == "thinking":
            empty = {**block, "thinking": "", "signature": ""}
            deltas = [{"type": "thinking_delta", "thinking": t} for t in chunks(block["thinking"])]
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        else:
            empty = {**block, "input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": t} for t in chunks(dump(block["input"]))]
        yield event("content_block_start", index=i, content_block=empty)
        for delta in deltas:
            yield event("content_block_delta", index=i, delta=delta)
        yield event("content_block_stop", index=i)
    why = {"stop_reason": full["stop_reason"], "stop_sequence": None}
    yield event("message_delta", delta=why, usage=full["usage"])
    yield event("message_stop")


_KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error"}
_KINDS |= {404: "not_found_error", 410: "permission_error", 413: "request_too_large", 503: "overloaded_error"}


def error(status: int, code: str, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": _KINDS.get(status, "api_error"), "message": message}}


def error_event(error: Mapping[str, Any]) -> bytes:
    return f"event: error\ndata: {dump(error)}\n\n".encode()

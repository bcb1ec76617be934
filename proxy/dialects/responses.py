"""OpenAI responses: `POST /v1/responses`. Nothing is stored: the whole input comes with each request."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from metagym.errors import InputError
from metagym.proxy.dialects import (
    Asked,
    Memory,
    Stamp,
    call,
    chat,
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
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_ANSWERS = ("function_call_output", "custom_tool_call_output")
_JOIN = "__"  # between a namespace and the name of a tool in it


def read(body: Any, memory: Memory) -> Asked:
    body = read_body(body, "input")
    if body.get("previous_response_id"):
        raise InputError("previous_response_id: no response is stored here; send the whole input")
    if body.get("background"):
        raise InputError("background: an answer comes with its request here")
    instructions = body.get("instructions")
    messages = [Message("system", text_of(instructions, "instructions"))] if instructions else []
    given = body["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else listed(given, "input")
    for read in memory.read(_turns(items), _messages):
        messages += read
    tools, custom, spaces = _tools(listed(body.get("tools"), "tools"))
    request = Request(
        conversation(messages),
        tuple(tools),
        max_tokens=most_tokens(body.get("max_output_tokens")),
        asked=sampling_asked(body),
    )
    return Asked(
        request,
        str(body.get("model", "")),
        bool(body.get("stream")),
        {
            "custom": custom,
            "spaces": spaces,
            "instructions": instructions,
            "tools": body.get("tools") or [],
            "tool_choice": body.get("tool_choice") or "auto",
            "parallel": bool(body.get("parallel_tool_calls", True)),
        },
    )


def _turns(items: Sequence[Any]) -> list[list[Any]]:
    """The items of each of the assistant's turns together, the others alone."""
    turns: list[list[Any]] = []
    going = False
    for item in items:
        item = mapped(item, "an item of input")
        kind = item.get("type", "message")
        said = kind not in _ANSWERS and (kind != "message" or item.get("role") == "assistant")
        if said and going:
            turns[-1].append(item)
        else:
            turns.append([item])
        going = said
    return turns


def _messages(items: Sequence[Any]) -> list[Message]:
    """Input items as messages: thoughts, text and calls of one turn are items of their own."""
    out: list[Message] = []
    turn: Message | None = None  # the assistant's turn that is being put together

    def end() -> None:
        nonlocal turn
        if turn is not None:
            out.append(turn)
        turn = None

    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            role = _ROLES.get(str(item.get("role")))
            if role is None:
                raise InputError(f"an item has role {item.get('role')!r}; roles are {', '.join(_ROLES)}")
            content = text_of(item.get("content"))
            if role != "assistant":
                end()
                out.append(Message(role, content))  # type: ignore[arg-type]
            elif turn is not None and not turn.content and not turn.tool_calls:
                turn = Message("assistant", content, reasoning=turn.reasoning)
            else:
                end()
                turn = Message("assistant", content)
        elif kind == "reasoning":
            end()
            thoughts = item.get("content") or item.get("summary")
            turn = Message("assistant", "", reasoning=text_of(thoughts, "reasoning"))
        elif kind in ("function_call", "custom_tool_call"):
            name = item.get("name")
            if isinstance(item.get("namespace"), str) and item["namespace"]:
                name = f"{item['namespace']}{_JOIN}{name}"
            arguments = item.get("arguments") if kind == "function_call" else {"input": item.get("input")}
            made = call(item.get("call_id"), name, arguments)
            turn = turn or Message("assistant", "")
            turn = Message("assistant", turn.content, (*turn.tool_calls, made), reasoning=turn.reasoning)
        elif kind in _ANSWERS:
            end()
            output, id = item.get("output"), item.get("call_id")
            if isinstance(output, dict):
                output = output.get("content", dump(output))
            content = text_of(output, "output")
            out.append(Message("tool", content, tool_call_id=id if isinstance(id, str) else ""))
        # Other items belong to tools that a server runs, and none runs here.
    end()
    return out


def _tools(tools: Sequence[Any]) -> tuple[list[dict[str, Any]], frozenset[str], dict[str, tuple[str, str]]]:
    """(tools as functions, names of those that take free text, {name: (namespace, name in it)})."""
    found: list[dict[str, Any]] = []
    custom: set[str] = set()
    spaces: dict[str, tuple[str, str]] = {}
    for tool in tools:
        tool = mapped(tool, "a tool")
        kind, about = tool.get("type"), tool.get("description")
        if kind == "function":
            found.append(function(tool.get("name"), about, tool.get("parameters")))
        elif kind == "custom":
            form = tool.get("format")
            if isinstance(form, dict) and isinstance(form.get("definition"), str):
                about = f"{about or ''}\n\nThe input must follow this grammar:\n{form['definition']}".strip()
            text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
            found.append(function(tool.get("name"), about, text))
            custom.add(str(tool.get("name")))
        elif kind == "namespace":
            space = str(tool.get("name"))
            inner, inner_custom, _ = _tools(listed(tool.get("tools"), "tools"))
            for one in inner:
                name = one["function"]["name"]
                one["function"]["name"] = f"{space}{_JOIN}{name}"
                spaces[one["function"]["name"]] = (space, name)
                found.append(one)
            custom |= {f"{space}{_JOIN}{name}" for name in inner_custom}
    return found, frozenset(custom), spaces


def write(asked: Asked, reply: Reply, stamp: Stamp, pieces: Sequence[str] | None) -> dict[str, Any]:
    m = reply.message
    cut = reply.finish == "length"
    output: list[dict[str, Any]] = []
    if m.reasoning is not None:
        told = [{"type": "summary_text", "text": m.reasoning}]
        output.append({"type": "reasoning", "id": f"rs_{stamp.id}", "summary": told, "encrypted_content": ""})
    if m.content or not m.tool_calls:
        part = {"type": "output_text", "text": m.content, "annotations": [], "logprobs": []}
        status = "incomplete" if cut else "completed"
        output.append(
            {
                "type": "message",
                "id": f"msg_{stamp.id}",
                "role": "assistant",
                "status": status,
                "content": [part],
            }
        )
    for i, c in enumerate(m.tool_calls):
        output.append(_call_item(c, f"{stamp.id}{i}", asked))
    return {
        "id": f"resp_{stamp.id}",
        "object": "response",
        "created_at": stamp.created,
        "status": "incomplete" if cut else "completed",
        "model": asked.model,
        "output": output,
        "parallel_tool_calls": asked.options["parallel"],
        "tools": asked.options["tools"],
        "tool_choice": asked.options["tool_choice"],
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": asked.options["instructions"],
        "metadata": {},
        "temperature": 1.0,
        "top_p": 1.0,
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": reply.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        },
    }


def _call_item(c: Mapping[str, Any], id: str, asked: Asked) -> dict[str, Any]:
    name, arguments = c["function"]["name"], c["function"]["arguments"]
    space, short = asked.options["spaces"].get(name, (None, name))
    more = {} if space is None else {"namespace": space}
    base = {"call_id": c["id"], "name": short, **more, "status": "completed"}
    if name in asked.options["custom"]:
        text = json.loads(arguments).get("input")
        text = text if isinstance(text, str) else dump(text)
        return {"type": "custom_tool_call", "id": f"ctc_{id}", **base, "input": text}
    return {"type": "function_call", "id": f"fc_{id}", **base, "arguments": arguments}


def events(full: Mapping[str, Any], asked: Asked) -> Iterator[bytes]:
    number = 0

    def event(kind: str, **more: Any) -> bytes:
        nonlocal number
        told = {"type": kind, "sequence_number": number, **more}
        number += 1
        return f"event: {kind}\ndata: {dump(told)}\n\n".encode()

    begun = {**full, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for i, item in enumerate(full["output"]):
        at = {"item_id": item["id"], "output_index": i}
        if item["type"] == "message":
            part = item["content"][0]
            empty = {**item, "content": [], "status": "in_progress"}
            at["content_index"] = 0
            yield event("response.output_item.added", output_index=i, item=empty)
            yield event("response.content_part.added", **at, part={**part, "text": ""})
            for text in chunks(part["text"]):
                yield event("response.output_text.delta", **at, delta=text, logprobs=[])
            yield event("response.output_text.done", **at, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **at, part=part)
        elif item["type"] == "reasoning":
            part = item["summary"][0]
            at["summary_index"] = 0
            yield event("response.output_item.added", output_index=i, item={**item, "summary": []})
            yield event("response.reasoning_summary_part.added", **at, part={**part, "text": ""})
            for text in chunks(part["text"]):
                yield event("response.reasoning_summary_text.delta", **at, delta=text)
            yield event("response.reasoning_summary_text.done", **at, text=part["text"])
            yield event("response.reasoning_summary_part.done", **at, part=part)
        else:
            custom = item["type"] == "custom_tool_call"
            field = "input" if custom else "arguments"
            name = "response.custom_tool_call_input" if custom else "response.function_call_arguments"
            added = {**item, field: "", "status": "in_progress"}
            yield event("response.output_item.added", output_index=i, item=added)
            for text in chunks(item[field]):
                yield event(f"{name}.delta", **at, delta=text)
            named = {} if custom else {"name": item["name"]}
            yield event(f"{name}.done", **at, **{field: item[field]}, **named)
        yield event("response.output_item.done", output_index=i, item=item)
    yield event(f"response.{full['status']}", response=full)


error = chat.error


def error_event(error: Mapping[str, Any]) -> bytes:
    told = {
        "type": "error",
        "sequence_number": 0,
        **{k: error["error"][k] for k in ("code", "message", "param")},
    }
    return f"event: error\ndata: {dump(told)}\n\n".encode()

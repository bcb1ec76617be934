"""Tool calls in text: how models write them, and how they are read.

Reading never touches tokens: it makes the text view of a reply. What can't be read as a call stays text, and
is counted. Formats:

| name          | a call                                                                              |
|---------------|-------------------------------------------------------------------------------------|
| `hermes`      | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen2.5, Qwen3) |
| `qwen3_coder` | `<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>` |
| `llama3`      | `<|python_tag|>{"name": ..., "parameters": {...}}`, or that object alone (Llama 3)  |
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from metagym.types import Message

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}


@dataclass(frozen=True)
class Parsed:
    """The text view of a reply."""

    content: str
    reasoning: str | None = None
    calls: tuple[tuple[str, str], ...] = ()  # (name, arguments as a JSON text) in the order they were written
    malformed: int = 0  # calls that were begun and can't be read; they stay in `content`


def parse(text: str, format: str, tools: Sequence[Tool] = (), *, thinking: bool = False) -> Parsed:
    """Reads a reply. `thinking`: the prompt has begun its thoughts. Without `tools` there are no calls."""
    reasoning, content = split_thoughts(text, thinking)
    if not tools:
        return Parsed(content, reasoning)
    content, calls, malformed = FORMATS[format](content, tools)
    return Parsed(content, reasoning, tuple(calls), malformed)


def split_thoughts(text: str, begun: bool = False) -> tuple[str | None, str]:
    """(thoughts, the rest). Thoughts that were not ended are all there is."""
    start = text.lstrip()
    if not begun and not start.startswith("<think>"):
        return None, text
    start = start.removeprefix("<think>")
    thoughts, ended, rest = start.partition("</think>")
    if not ended:
        return (start.strip("\n"), "") if begun or start else (None, text)
    return thoughts.strip("\n"), rest.lstrip("\n")


_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
Read = tuple[str, list[tuple[str, str]], int]


def _blocks(text: str, read: Callable[[str], tuple[str, str] | None]) -> Read:
    """Calls in `<tool_call>` blocks: (text around them, calls, how many could not be read)."""
    calls: list[tuple[str, str]] = []

    def one(found: re.Match[str]) -> str:
        call = read(found[1])
        if call is None:
            return found[0]
        calls.append(call)
        return ""

    rest = _BLOCK.sub(one, text)
    malformed = rest.count("<tool_call>")
    return (rest.strip() if calls else rest), calls, malformed


def _hermes(text: str, tools: Sequence[Tool]) -> Read:
    return _blocks(text, lambda inside: _call(_json(inside)))


def _qwen3_coder(text: str, tools: Sequence[Tool]) -> Read:
    schemas = {_function(t).get("name"): _function(t).get("parameters") for t in tools}

    def read(inside: str) -> tuple[str, str] | None:
        found = _FUNCTION.fullmatch(inside)
        if found is None:
            return _call(_json(inside))
        name = found[1].strip()
        schema = schemas.get(name)
        known = schema.get("properties") if isinstance(schema, Mapping) else None
        arguments: dict[str, Any] = {}
        for key, value in _PARAMETER.findall(found[2]):
            value = value.removeprefix("\n").removesuffix("\n")
            about = known.get(key.strip()) if isinstance(known, Mapping) else None
            arguments[key.strip()] = _typed(value, about)
        if not name or _PARAMETER.sub("", found[2]).strip():
            return None
        return name, json.dumps(arguments, ensure_ascii=False)

    return _blocks(text, read)


def _typed(value: str, schema: Any) -> Any:
    """A parameter's text as a value of its type; the text where it is not one."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "string" in kinds and not ("null" in kinds and value.strip() == "null"):
        return value
    read = _json(value.lower() if value in ("True", "False", "None") else value)
    if value == "None":
        read = None
    if isinstance(schema, Mapping) and kinds == [None] and isinstance(read, str):
        return value
    return value if read is _BAD else read


def _llama3(text: str, tools: Sequence[Tool]) -> Read:
    marked = "<|python_tag|>" in text
    before, _, body = text.partition("<|python_tag|>") if marked else ("", "", text)
    body = body.strip()
    for end in ("<|eom_id|>", "<|eot_id|>"):
        body = body.removesuffix(end).rstrip()
    if not body.startswith("{"):
        return text, [], int(marked)
    calls: list[tuple[str, str]] = []
    decoder, at = json.JSONDecoder(), 0
    while at < len(body):
        try:
            value, at = decoder.raw_decode(body, at)
        except (ValueError, RecursionError):
            return text, [], int(marked or '"name"' in body)
        call = _call(value)
        if call is None:  # an object, but none that calls: a JSON answer
            return text, [], int(marked)
        calls.append(call)
        while at < len(body) and body[at] in " \n\t\r;,":
            at += 1
    return before.strip(), calls, 0


FORMATS: dict[str, Callable[[str, Sequence[Tool]], Read]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "llama3": _llama3,
}


def detect(rendered: str) -> str:
    """The format of a rendered call (or, failing that, of a rendered description of tools)."""
    if "<function=" in rendered:
        return "qwen3_coder"
    if "<tool_call>" in rendered:
        return "hermes"
    return "llama3" if '"parameters"' in rendered else "hermes"


_BAD = object()


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _BAD


def _call(value: Any) -> tuple[str, str] | None:
    """(name, arguments as a JSON text) of a call; they may be called parameters, or be a JSON text."""
    if not isinstance(value, dict):
        return None
    inner = value.get("function")
    if isinstance(inner, dict) and "name" not in value:
        value = inner
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    for _ in range(2):  # encoded once, or twice
        if isinstance(arguments, str):
            arguments = _json(arguments or "{}")
    if arguments is None:
        arguments = {}
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)


def _function(tool: Tool) -> Mapping[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, Mapping) else {}


def describe(tools: Sequence[Tool]) -> str:
    """What the system message says about tools to a model whose template leaves them out."""
    lines = "\n".join(json.dumps(dict(_function(t)), ensure_ascii=False) for t in tools)
    return (
        f"You can call functions. They are described here:\n<tools>\n{lines}\n</tools>\n"
        "To call one, write its name and arguments as JSON in these tags:\n"
        '<tool_call>\n{"name": "function", "arguments": {"key": "value"}}\n</tool_call>'
    )


def write(calls: Sequence[Mapping[str, Any]]) -> str:
    """Calls as text, in the format that `describe` asks for."""
    written = []
    for call in calls:
        function = _function(call)
        arguments = function.get("arguments")
        value = _json(arguments) if isinstance(arguments, str) else arguments
        told = {"name": function.get("name"), "arguments": arguments if value is _BAD else value}
        written.append(f"<tool_call>\n{json.dumps(told, ensure_ascii=False)}\n</tool_call>")
    return "\n".join(written)


def as_text(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The conversation for a template that knows no tools: all about them is in the texts.

    Tools stand in the system message, calls in the assistant's text, results of calls that follow each other
    in one message of the user.
    """
    out: list[Message] = []
    answering = False
    for m in messages:
        if m.role == "tool" and m.tool_call_id is not None:
            told = f"<tool_response>\n{m.content}\n</tool_response>"
            if answering:
                out[-1] = replace(out[-1], content=f"{out[-1].content}\n{told}")
            else:
                out.append(Message("user", told))
            answering = True
            continue
        answering = False
        if m.role == "assistant" and m.tool_calls:
            m = replace(m, content=f"{m.content}\n{write(m.tool_calls)}".lstrip("\n"), tool_calls=())
        out.append(m)
    if tools and out and out[0].role == "system":
        out[0] = replace(out[0], content=f"{out[0].content}\n\n{describe(tools)}".lstrip("\n"))
    elif tools:
        out.insert(0, Message("system", describe(tools)))
    return out

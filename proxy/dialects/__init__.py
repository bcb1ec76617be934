"""How programs ask and want to be answered: OpenAI chat completions and responses, Anthropic messages.

A dialect is a module that is a `Dialect`: it reads a body into a `Request`, writes a `Reply` as JSON, that
JSON as events, and errors. What a request may hold:

- unknown fields are ignored; wrong types are InputErrors, never a crash;
- images, sound and files become the text `NOT_SHOWN`: the model reads text;
- sampling settings are what the session says, whatever is asked; `Session.forced` records what was;
- system messages at the start are joined into one; later ones become messages of the user, since most
  templates know only one system message.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from metagym.errors import InputError
from metagym.proxy.body import Reader
from metagym.proxy.session import Reply, Request
from metagym.types import Message

T = TypeVar("T")
NOT_SHOWN = "[not shown: this model reads text only]"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_sequences", "logit_bias")
_OFF = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}


@dataclass(frozen=True)
class Asked:
    """A request as it was put."""

    request: Request
    model: str
    stream: bool
    options: Mapping[str, Any] = field(default_factory=dict)  # of the dialect's own


@dataclass(frozen=True)
class Stamp:
    """What a reply is called."""

    id: str  # 24 hexadecimal digits
    created: int  # seconds since 1970


class Memory:
    """The parts of a session's last request: those that come again, in the same place, are not read again."""

    def __init__(self):
        self._parts: dict[Any, tuple[list[Any], list[Any]]] = {}
        self.body = Reader()

    def read(self, raws: list[Any], one: Callable[[Any], T]) -> list[T]:
        """What `one` makes of each of these parts."""
        before, made = self._parts.get(one, ([], []))
        pairs = enumerate(zip(raws, before, strict=False))
        same = next((i for i, (a, b) in pairs if a is not b and a != b), min(len(raws), len(before)))
        made = [*made[:same], *map(one, raws[same:])]
        self._parts[one] = raws, made
        return made


class Dialect(Protocol):
    @property
    def KEEP_ALIVE(self) -> bytes:
        """Sent while a streamed answer is waited for."""
        ...

    def read(self, body: Any, memory: Memory) -> Asked: ...
    def write(self, asked: Asked, reply: Reply, stamp: Stamp, pieces: Sequence[str] | None) -> dict[str, Any]:
        """The whole answer. `pieces`: the text of each sampled token, where log-probs were asked for."""
        ...

    def events(self, full: Mapping[str, Any], asked: Asked) -> Iterator[bytes]: ...
    def error(self, status: int, code: str, message: str) -> dict[str, Any]: ...
    def error_event(self, error: Mapping[str, Any]) -> bytes: ...


def read_body(body: Any, *needed: str) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise InputError(f"the body must be a JSON object, not {type(body).__name__}")
    for name in needed:
        if name not in body:
            raise InputError(f"the body has no {name!r}")
    return body


def listed(value: Any, what: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise InputError(f"{what} must be a list, not {type(value).__name__}")
    return value


def mapped(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{what} must be an object, not {type(value).__name__}")
    return value


def text_of(content: Any, what: str = "content") -> str:
    """The text of a content: a text, or a list of parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in listed(content, what):
        if isinstance(part, str):
            texts.append(part)
            continue
        part = mapped(part, f"a part of {what}")
        kind = str(part.get("type", "text"))
        text = part.get("text", part.get("refusal"))
        if isinstance(text, str):
            texts.append(text)
        elif any(name in kind for name in ("image", "audio", "file", "document", "video")):
            texts.append(NOT_SHOWN)
    return "\n".join(texts)


def sampling_asked(body: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling settings in a body that would change what the model says."""
    asked = {k: body[k] for k in _SAMPLING if body.get(k) not in (None, [], {})}
    asked |= {k: body[k] for k, off in _OFF.items() if body.get(k) not in (None, off)}
    form = body.get("response_format")
    if isinstance(form, dict) and form.get("type") not in (None, "text"):
        asked["response_format"] = str(form.get("type"))
    if body.get("tool_choice") not in (None, "auto", {"type": "auto"}):
        asked["tool_choice"] = body["tool_choice"]
    return asked


def most_tokens(*values: Any) -> int | None:
    """The first limit that is given. Raises InputError if it is no positive number."""
    for value in values:
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"the limit of tokens must be a positive number, not {value!r}")
            return value
    return None


def function(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool in the one form that templates know."""
    if not isinstance(name, str) or not name:
        raise InputError(f"a tool needs a name, not {name!r}")
    told: dict[str, Any] = {"name": name, "description": description if isinstance(description, str) else ""}
    told["parameters"] = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    return {"type": "function", "function": told}


def call(id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """A tool call as `Message` holds it; `arguments` is a JSON text or a value."""
    if not isinstance(id, str) or not isinstance(name, str):
        raise InputError("a tool call needs an id and a name")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def conversation(messages: Iterable[Message]) -> tuple[Message, ...]:
    """The messages with one system message, at the start, or none."""
    messages = list(messages)
    if not messages:
        raise InputError("the request has no messages")
    first = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
    joined = "\n\n".join(m.content for m in messages[:first])
    rest = [Message("user", m.content) if m.role == "system" else m for m in messages[first:]]
    return (*([Message("system", joined)] if first else []), *rest)


def chunks(text: str, size: int = 512) -> Iterator[str]:
    """A text in pieces, as a stream brings it."""
    for i in range(0, len(text), size):
        yield text[i : i + size]


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

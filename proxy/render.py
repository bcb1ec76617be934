"""The one place where messages become token ids, and ids text.

A model's chat template is rendered as transformers renders it, with one difference: what people, tools and
worlds write can never become a control token. Before rendering, every occurrence of an added token in a
message is broken by a marker character that occurs nowhere in the conversation; the rendered text is split on
the added tokens, of which only the template's own are left; the marker is removed; each piece of text is
encoded by a copy of the tokenizer that knows no control tokens. For text without control tokens the result is
what the tokenizer makes of the rendered template.

A conversation goes on without being rendered again: only what is new is rendered, behind a short stand-in
for what came before, once `Renderer` has seen on sample conversations that this gives the same text.
Templates that rewrite what they rendered before (most drop the thoughts of earlier turns) are found so, too.

Templates that add a system message of their own when the conversation has none (SmolLM2, Qwen2.5, Llama 3.1)
are rendered without it: a conversation without a system message has none. `Renderer` finds the default block
when it is made, by comparing renderings of short conversations.
"""

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np
from tokenizers import Tokenizer

from metagym.errors import InputError
from metagym.proxy import tools as tool_formats
from metagym.spaces import clean
from metagym.types import Message

T = TypeVar("T")
PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
ROLES = ("system", "user", "assistant", "tool")
# Short texts that no template cares about, to see what a template puts around them.
_SYSTEM, _USER, _REPLY, _NEXT = (
    Message(r, f"qzx{r}{i}xzq") for i, r in enumerate(("system", "user", "assistant", "user"))
)  # type: ignore[arg-type]
# Probes with a tool: what a template makes of its description, of calls, of results and of thoughts.
_TOOL = {
    "type": "function",
    "function": {
        "name": "qzxtoolxzq",
        "description": "qzxdescxzq",
        "parameters": {"type": "object", "properties": {"qzxkxzq": {"type": "string"}}},
    },
}
_CALLS = tuple(
    {
        "id": f"qzxid{i}xzq",
        "type": "function",
        "function": {"name": "qzxtoolxzq", "arguments": '{"qzxkxzq": "v"}'},
    }
    for i in range(2)
)
_CALL = Message("assistant", "qzxsayxzq", _CALLS)
_RESULTS = [Message("tool", f"qzxout{i}xzq", tool_call_id=f"qzxid{i}xzq") for i in range(2)]
_THOUGHT = Message("assistant", "qzxsaidxzq", reasoning="qzxthoughtxzq")
_KEPT = "qzxkeptxzq"  # stands for a reply whose own text does not matter

History = Literal["branch", "keep"]


@dataclass(frozen=True)
class Contract:
    """What a template does with a conversation that goes on, seen on sample conversations.

    None where the template refuses such conversations.
    """

    plain: bool | None  # user and assistant turns: more messages render to a continuation
    tools: bool | None  # calls and results, with a tool described
    thoughts: bool | None  # replies with thoughts; False: the template drops them later
    local: bool  # what is new renders the same behind a short stand-in for what came before
    local_kept: bool  # likewise, where the tokens stay as they are whatever the template makes of them

    def describe(self, history: History) -> str:
        """One line: whether the conversation is extended token by token, and what happens where not."""
        broken = {
            "conversations": self.plain is False,
            "tool calls": self.tools is False,
            "thoughts of earlier turns": self.thoughts is False,
        }
        names = [name for name, wrong in broken.items() if wrong]
        if not names:
            return "the chat template is append-only: a conversation that goes on is one trace"
        what = f"the chat template rewrites {' and '.join(names)} when a conversation goes on; "
        if history == "keep":
            return what + 'with history="keep" the tokens stay as the model saw and said them'
        return what + 'with history="branch" a turn that it rewrites starts a new branch, rebuilt from text'


class Renderer:
    """Renders messages to token ids with a model's own chat template. Immutable, shared between threads.

    Attributes:
      stop_token_ids: tokens that end a reply: the model's end-of-sequence tokens and `end_of_turn`.
      end_of_turn: the token that the template puts after an assistant's content; None if it puts none.
      tail: text that the template puts between `end_of_turn` and the next message ("\\n" in ChatML).
      default_system: text of the system block that the template adds unasked, and that is left out; "" if
        none, None if there is one whose end can't be found (conversations then need a system message).
      append_only: whether short conversations with more messages always render to a continuation of the same.
      contract: the same in detail.
      tool_format: how the model writes tool calls, a key of `metagym.proxy.tools.FORMATS`, told by the
        template; "hermes" where the template knows no tools, whose description then goes into the system
        message.
      begins_thinking: whether the template itself begins each reply with "<think>".
    """

    def __init__(self, tokenizer_json: str, template: str, *, special: Mapping[str, Any], eos: Sequence[int]):
        """`special` holds the template's variables (bos_token, eos_token, enable_thinking, ...); `eos` the
        model's stop ids.

        Raises InputError if the template cannot render one user message.
        """
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._control, plain_json = _without_control_tokens(tokenizer_json)
        self._plain = Tokenizer.from_str(plain_json)
        # Pre-tokenisers that prepend a space to the first word only must not do so in the middle of a text.
        self._inner = Tokenizer.from_str(
            plain_json.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
        )
        # Members of a group begin with the same long prompts.
        self._ids = functools.lru_cache(maxsize=256)(self._encode_piece)
        self._split, self._occurs, self._prefixes = _patterns(self._control)
        self._longest = max(map(len, self._prefixes), default=0)
        self._special = dict(special)
        self._source = template
        try:
            self._template = _environment().from_string(template)
        except jinja2.TemplateError as e:
            raise InputError(f"the chat template is not valid jinja: {e}") from e
        self._own_tools = True
        self._head, self.default_system = self._find_default_system()
        self.end_of_turn, self.tail, self._turn_end = self._find_turn_end()
        ends = [*eos, *([] if self.end_of_turn is None else [self.end_of_turn])]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        self._opener = self._find_opener()
        own_format = self._find_tool_format()
        self._own_tools = own_format is not None
        self.tool_format = own_format or "hermes"
        self.contract = self._find_contract()
        self.append_only = self.contract.plain is True
        begun = self._tell(lambda: self._text([_USER], "", generation_prompt=True)) or ""
        self.begins_thinking = begun.rstrip().endswith("<think>")

    @classmethod
    def from_dir(cls, directory: str | Path, chat_template: str | None = None) -> "Renderer":
        """Reads the tokenizer, the chat template and the end-of-sequence tokens of a Hugging Face directory.

        `chat_template`: None for the model's own; "plain" for the contents joined without any marker; a path;
        or jinja source. Raises InputError if a file or the template is missing or malformed.
        """
        directory = Path(directory)
        config = (
            _json(directory / "tokenizer_config.json")
            if (directory / "tokenizer_config.json").exists()
            else {}
        )
        tokenizer_path = directory / "tokenizer.json"
        if not tokenizer_path.exists():
            raise InputError(
                f"{directory} holds no tokenizer.json; a model directory needs the fast tokenizer's file"
            )
        try:
            tokenizer_json = tokenizer_path.read_text(encoding="utf-8")
            tokenizer = Tokenizer.from_str(tokenizer_json)
        except Exception as e:  # the library raises bare exceptions
            raise InputError(f"{tokenizer_path} is not a tokenizer: {e}") from e
        special = {
            k: v["content"] if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")
        }
        special = {k: v for k, v in special.items() if isinstance(v, str)}
        eos: list[int] = []
        for name in ("generation_config.json", "config.json"):
            ids = _json(directory / name).get("eos_token_id") if (directory / name).exists() else None
            eos += ids if isinstance(ids, list) else [ids] if isinstance(ids, int) else []
        if "eos_token" in special and (found := tokenizer.token_to_id(special["eos_token"])) is not None:
            eos.append(found)
        source = _template_source(directory, config, chat_template)
        return cls(tokenizer_json, source, special=special, eos=eos)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of `text` as ordinary text: never a control token, whatever it says."""
        return self._plain.encode(clean(text), add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, keep_control: bool = True) -> str:
        """Text of token ids. Control tokens appear by name unless `keep_control` is False."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=not keep_control)

    def render(
        self,
        messages: Sequence[Message],
        *,
        generation_prompt: bool,
        prefix: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Token ids of a whole conversation: `[T]`. `prefix` begins the assistant's reply.

        `tools` are descriptions in the OpenAI chat format, `{"type": "function", "function": {...}}`.
        Raises InputError if the template refuses the conversation.
        """
        marker = self._marker(messages, prefix, tools)
        text = self._text(messages, marker, generation_prompt, tools)
        return self._encode(text + self._break(prefix, marker), marker, first=True)

    def extend(
        self,
        messages: Sequence[Message],
        known: int,
        *,
        prefix: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        history: History = "branch",
    ) -> list[int] | None:
        """Token ids that follow the end of turn of message `known - 1`, an assistant's, up to the next reply.

        Only `messages[known:]` and the generation prompt are encoded. If the template does not render the
        longer conversation as a continuation of the shorter one: None with history "branch"; with "keep" what
        it renders behind that reply. Raises InputError as `render` does.
        """
        keep = history == "keep" and self.end_of_turn is not None
        if self.contract.local_kept if keep else self.contract.local:
            messages, tools = self._short(messages, known), ()
            known = 2 + (messages[0].role == "system")
        marker = self._marker(messages, prefix, tools)
        suffix = (self._kept_suffix if keep else self._suffix)(messages, known, marker, tools)
        if suffix is None:
            return None
        return self._encode(suffix + self._break(prefix, marker), marker, first=False)

    def rebuilt(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Which of these rendered tokens tell a reply of the assistant, end of turn included: bool `[T]`."""
        tokens = np.asarray(ids, np.int32)
        told = np.zeros(len(tokens), bool)
        opener = np.asarray(self._opener, np.int32)
        if self.end_of_turn is None or not 0 < len(opener) < len(ids):
            return told
        starts = np.flatnonzero(
            (np.lib.stride_tricks.sliding_window_view(tokens, len(opener)) == opener).all(-1)
        ) + len(opener)
        ends = np.flatnonzero(tokens == self.end_of_turn)
        for start in starts:
            at = np.searchsorted(ends, start)
            if at < len(ends):
                told[start : ends[at] + 1] = True
        return told

    @staticmethod
    def _short(messages: Sequence[Message], known: int) -> list[Message]:
        """The conversation from the last known reply on, behind a stand-in for what came before."""
        start = [_SYSTEM] if messages[0].role == "system" and known > 1 else []
        return [*start, _USER, *messages[known - 1 :]]

    def _suffix(
        self, messages: Sequence[Message], known: int, marker: str, tools: Sequence[Mapping[str, Any]]
    ) -> str | None:
        """What the template adds behind the end of turn of `messages[known - 1]`; None if it rewrites."""
        full = self._text(messages, marker, True, tools)
        base = self._text(messages[:known], marker, False, tools)
        if base.endswith(self._turn_end) and full.startswith(base):
            return self.tail + full[len(base) :]
        # Some templates put an empty block of thoughts into the last reply only, which it was not given.
        said, reply = self._text(messages[: known - 1], marker, True, tools), messages[known - 1]
        content = self._break(reply.content, marker).strip()
        if self.end_of_turn is None or reply.reasoning or not full.startswith(said):
            return None
        return self._behind_turn(full, len(said)) if full[len(said) :].lstrip().startswith(content) else None

    def _kept_suffix(
        self, messages: Sequence[Message], known: int, marker: str, tools: Sequence[Mapping[str, Any]]
    ) -> str | None:
        """What the template puts behind the end of turn of `messages[known - 1]`, whatever it makes of it."""
        stub = replace(messages[known - 1], content=_KEPT, reasoning=None)
        full = self._text([*messages[: known - 1], stub, *messages[known:]], marker, True, tools)
        return self._behind_turn(full, full.find(_KEPT)) if _KEPT in full else None

    def _behind_turn(self, text: str, start: int) -> str | None:
        """What stands behind the first end of turn from `start` on; None if there is none."""
        for found in self._split.finditer(text, start):
            if self._id(found[0]) == self.end_of_turn:
                return text[found.end() - len(found[0]) + len(found[0].rstrip()) :]
        return None

    def _marker(self, messages: Sequence[Message], prefix: str, tools: Sequence[Mapping[str, Any]]) -> str:
        """A private-use character that occurs neither in the conversation nor in the template."""
        texts = [self._source, prefix, *(m.content for m in messages), *(m.reasoning or "" for m in messages)]
        texts += [json.dumps(m.tool_calls, ensure_ascii=False, default=str) for m in messages if m.tool_calls]
        texts += [json.dumps(list(tools), ensure_ascii=False, default=str)] if tools else []
        return next(c for c in map(chr, range(0xE000, 0xF900)) if not any(c in t for t in texts))

    def _break(self, text: str, marker: str) -> str:
        """Puts the marker behind the first character of every control token that occurs in, or that might
        begin at the end of, `text`."""
        text = self._occurs.sub(lambda m: m[0] + marker, text)
        for start in range(max(0, len(text) - self._longest), len(text)):
            if text[start:] in self._prefixes:
                return text[: start + 1] + marker + self._break(text[start + 1 :], marker)
        return text

    def _text(
        self,
        messages: Sequence[Message],
        marker: str,
        generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The rendered template, marker inside, default system message left out."""
        if not self._own_tools and (tools or any(m.tool_calls or m.tool_call_id for m in messages)):
            messages, tools = tool_formats.as_text(messages, tools), ()
        if tools and self.default_system != "" and messages and messages[0].role != "system":
            messages = [
                Message("system", ""),
                *messages,
            ]  # tools stand in a system message, without the default
        text = self._render_template(messages, marker, generation_prompt, tools)
        if self.default_system == "" or (messages and messages[0].role == "system"):
            return text
        block = self._head + (self.default_system or "")
        if self.default_system is None or not text.startswith(block):
            raise InputError(
                "the chat template adds a system message of its own, which can't be told from the rest; "
                "give the conversation a system message, or pass another chat_template"
            )
        return self._head + text[len(block) :]

    def _render_template(
        self,
        messages: Sequence[Message],
        marker: str,
        generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        for i, m in enumerate(messages):
            if m.role not in ROLES:
                raise InputError(f"message {i} has role {m.role!r}; roles are {', '.join(ROLES)}")
        try:
            return self._template.render(
                messages=[self._as_dict(m, marker) for m in messages],
                add_generation_prompt=generation_prompt,
                tools=[self._broken(t, marker) for t in tools] or None,
                documents=None,
                **self._special,
            )
        except InputError:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as e:
            roles = ", ".join(m.role for m in messages)
            raise InputError(f"the chat template refused a conversation with roles [{roles}]: {e}") from e

    def _broken(self, value: Any, marker: str) -> Any:
        """The value with every text in it broken."""
        if isinstance(value, str):
            return self._break(value, marker)
        if isinstance(value, Mapping):
            return {self._broken(k, marker): self._broken(v, marker) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._broken(v, marker) for v in value]
        return value

    def _as_dict(self, message: Message, marker: str) -> dict[str, Any]:
        content, thoughts = message.content, message.reasoning
        if thoughts is None and message.role == "assistant" and "</think>" in self._source:
            thoughts, content = tool_formats.split_thoughts(content)
        if thoughts is not None and "reasoning_content" not in self._source:
            # A template that knows no thoughts tells them as the model did; one that cuts them off cuts here.
            content = content if "</think>" in self._source else f"<think>\n{thoughts}\n</think>\n\n{content}"
            thoughts = None
        out: dict[str, Any] = {"role": message.role, "content": self._broken(content, marker)}
        if thoughts is not None:
            out["reasoning_content"] = self._broken(thoughts, marker)
        if message.tool_calls:
            out["tool_calls"] = self._broken([_with_values(c) for c in message.tool_calls], marker)
        if message.tool_call_id is not None:
            out["tool_call_id"] = self._broken(message.tool_call_id, marker)
        return out

    def _encode(self, text: str, marker: str, *, first: bool) -> list[int]:
        ids: list[int] = []
        for i, piece in enumerate(self._split.split(text)):
            if i % 2:  # the pattern's one group
                ids.append(self._id(piece))
            elif piece := clean(piece.replace(marker, "")):
                ids += self._ids(piece, first and i == 0)
        return ids

    def _encode_piece(self, text: str, first: bool) -> tuple[int, ...]:
        plain = self._plain if first else self._inner
        return tuple(plain.encode(text, add_special_tokens=False).ids)

    def _find_default_system(self) -> tuple[str, str | None]:
        """(text before the default system block, the block). The block is "" if there is none, None if there
        is one whose end can't be found."""
        lone = self._render_template([_USER], "", generation_prompt=False)
        if _USER.content not in lone:
            raise InputError("the chat template leaves out what the user says: it must render every message")
        try:
            two = self._render_template([_USER, _REPLY], "", generation_prompt=False)
            three = self._render_template([_USER, _REPLY, _USER], "", generation_prompt=False)
        except InputError:
            return "", ""  # a template for single turns
        # A later user message renders without what the template puts before the first one.
        block = three[len(two) :]
        if not three.startswith(two) or not lone.endswith(block):
            same = next(
                (n for n, (x, y) in enumerate(zip(lone[::-1], three[::-1], strict=False)) if x != y),
                len(lone),
            )
            return "", None if self._visible(lone[: len(lone) - same]).strip() else ""
        before = lone[: len(lone) - len(block)]
        if _USER.content in before:
            return "", ""  # a template for single turns: it renders no later message
        if not self._visible(before).strip():
            return "", ""  # nothing, or only control tokens such as the one for beginning of text
        # Control tokens before the one that opens a block belong to the conversation, not to the block.
        opener = self._split.match(block)
        bos = self._special.get("bos_token", "")
        head = bos if bos and before.startswith(bos) and not (opener and opener[0] == bos) else ""
        if opener and (at := before.find(opener[0])) > 0 and not self._visible(before[:at]).strip():
            head = before[:at]
        return head, before[len(head) :]

    def _visible(self, text: str) -> str:
        """`text` without control tokens."""
        return "".join(self._split.split(text)[::2])

    def _id(self, piece: str) -> int:
        """Id of a control token found in a text, perhaps with white space that it swallows."""
        return self._control[piece if piece in self._control else piece.strip()][0]

    def _find_turn_end(self) -> tuple[int | None, str, str]:
        """(end-of-turn token, text after it, all that follows an assistant's content)."""
        text = self._tell(lambda: self._text([_USER, _REPLY], "", generation_prompt=False))
        if text is None or _REPLY.content not in text:  # a template for single turns
            return None, "", ""
        after = text[text.rindex(_REPLY.content) + len(_REPLY.content) :]
        found = self._split.search(after)
        if found is None or after[: found.start()].strip():
            return None, after, after
        return self._id(found[0]), after[found.end() :], after

    @staticmethod
    def _tell(function: Callable[[], T]) -> T | None:
        """What the function returns; None if the template refuses the conversation."""
        try:
            return function()
        except InputError:
            return None

    def _find_opener(self) -> list[int]:
        """Token ids that the template puts between a user's message and the assistant's content."""
        before = self._tell(lambda: self._text([_USER], "", generation_prompt=False))
        text = self._tell(lambda: self._text([_USER, _REPLY], "", generation_prompt=False))
        if before is None or text is None or not text.startswith(before) or _REPLY.content not in text:
            return []
        opener = text[len(before) : text.index(_REPLY.content)]
        # Thoughts, if the template adds an empty block of them, belong to the reply.
        return self._encode(opener.partition("<think>")[0], "", first=False)

    def _find_tool_format(self) -> str | None:
        """How calls are written, a key of `tools.FORMATS`; None if the template leaves tools out."""
        text = self._tell(lambda: self._render_template([_USER], "", True, [_TOOL]))
        if text is None or "qzxtoolxzq" not in text:
            return None
        talk = [_USER, replace(_CALL, tool_calls=_CALLS[:1], content="")]
        called = self._tell(lambda: self._render_template(talk, "", False, [_TOOL]))
        return tool_formats.detect(called or text)

    def _find_contract(self) -> Contract:
        """Extends sample conversations, and compares with rendering them whole."""
        same, same_kept = True, True

        def holds(talk: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Iterator[bool]:
            nonlocal same, same_kept
            replies = [n for n, m in enumerate(talk) if m.role == "assistant"]
            for n, end in zip(replies, [*replies[1:], len(talk)], strict=True):
                try:
                    whole, short = talk[:end], self._short(talk[:end], n + 1)
                    known = 2 + (short[0].role == "system")
                    found = self._suffix(whole, n + 1, "", tools)
                    same &= found == self._suffix(short, known, "", ())
                    kept = self._kept_suffix(whole, n + 1, "", tools)
                    same_kept &= kept == self._kept_suffix(short, known, "", ())
                except InputError:  # refused, such as a system message by some
                    continue
                yield found is not None

        def all_hold(*ends: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> bool | None:
            talks = [[*start, *end] for end in ends for start in ([_USER], [_SYSTEM, _USER])]
            found = [x for talk in talks for x in holds(talk, tools)]
            return all(found) if found else None

        called = replace(_CALL, reasoning="qzxwhyxzq")
        plain = all_hold([_REPLY, _NEXT, _REPLY, _USER])
        tools = all_hold([_CALL, *_RESULTS, _REPLY, _NEXT, _CALL, *_RESULTS], tools=[_TOOL])
        thoughts = all_hold([_THOUGHT, _NEXT, _THOUGHT, _USER])
        if tools is not None and thoughts:
            thoughts = all_hold([called, *_RESULTS, _THOUGHT, _NEXT], tools=[_TOOL])
        all_hold(
            [called, *_RESULTS, _REPLY, _NEXT], tools=[_TOOL]
        )  # whether thoughts of long ago are dropped
        return Contract(plain, tools, thoughts, same and plain is True, same_kept)


def _patterns(control: Mapping[str, tuple[int, bool, bool]]):
    """(pattern that splits a text on control tokens, pattern of their first characters, proper prefixes)."""
    if not control:
        return re.compile("((?!))"), re.compile("(?!)"), frozenset()
    names = sorted(control, key=len, reverse=True)
    split = "|".join(
        (r"\s*" if control[n][1] else "") + re.escape(n) + (r"\s*" if control[n][2] else "") for n in names
    )
    rests: dict[str, list[str]] = {}  # by first character, which is found faster than a whole name
    for name in names:
        rests.setdefault(name[0], []).append(re.escape(name[1:]))
    occurs = "|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items())
    prefixes = frozenset(n[:k] for n in names for k in range(1, len(n)))
    return re.compile(f"({split})"), re.compile(occurs), prefixes


def _without_control_tokens(tokenizer_json: str) -> tuple[dict[str, tuple[int, bool, bool]], str]:
    """({control token: (id, swallows white space on the left, on the right)}, the tokenizer without them).

    An added token that is not special and that its own text encodes to anyway, such as runs of white space in
    Gemma's tokenizer, is ordinary text and stays.
    """
    spec = json.loads(tokenizer_json)
    spec["truncation"] = spec["padding"] = None
    bare = Tokenizer.from_str(json.dumps({**spec, "added_tokens": []}))
    control: dict[str, tuple[int, bool, bool]] = {}
    ordinary = []
    for token in spec["added_tokens"]:
        text = token["content"]
        if not token["special"] and bare.encode(text, add_special_tokens=False).ids == [token["id"]]:
            ordinary.append(token)
        elif len(text) < 2:
            raise InputError(
                f"the tokenizer's control token {text!r} is one character: text can't be told from it"
            )
        else:
            control[text] = (token["id"], token["lstrip"], token["rstrip"])
    spec["added_tokens"] = ordinary
    model = spec["model"]
    if isinstance(model.get("vocab"), dict):  # so that no merge can lead to a control token either
        drop = {name for name in control if name != model.get("unk_token")}
        model["vocab"] = {name: i for name, i in model["vocab"].items() if name not in drop}
        if "merges" in model:
            pairs = [(m, m.split(" ", 1) if isinstance(m, str) else m) for m in model["merges"]]
            model["merges"] = [m for m, (a, b) in pairs if not {a, b, a + b} & drop]
    return control, json.dumps(spec)


class _GenerationTag(jinja2.ext.Extension):
    """Renders the content of `{% generation %}...{% endgeneration %}`, which marks what was generated."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own interface)

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment that transformers renders chat templates in."""

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    cast(dict, env.globals).update(
        raise_exception=raise_exception, strftime_now=lambda form: datetime.datetime.now().strftime(form)
    )
    return env


def _with_values(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments are values, as templates want them, not a JSON text of them."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return dict(call)
    return (
        {**call, "function": {**function, "arguments": arguments}}
        if isinstance(arguments, dict)
        else dict(call)
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise InputError(f"{path} is not valid JSON: {e}") from e


def _template_source(directory: Path, config: Mapping[str, Any], chosen: str | None) -> str:
    if chosen == "plain":
        return PLAIN
    if chosen is not None:
        if "{" in chosen:
            return chosen
        if not Path(chosen).is_file():
            raise InputError(f'chat_template {chosen!r} is no file; it is "plain", a path, or jinja source')
        return Path(chosen).read_text(encoding="utf-8")
    if (directory / "chat_template.jinja").exists():
        return (directory / "chat_template.jinja").read_text(encoding="utf-8")
    own = config.get("chat_template")
    if isinstance(own, list):
        own = {t["name"]: t["template"] for t in own}.get("default")
    if not isinstance(own, str):
        raise InputError(
            f'{directory} has no chat template; pass chat_template="plain" for prompts without markers, '
            "a path, or jinja source"
        )
    return own

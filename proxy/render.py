"""The one place where messages become token ids, and ids text.

A model's chat template is rendered as transformers renders it, with one difference: what people, tools and
worlds write can never become a control token. Before rendering, every occurrence of an added token in a
message is broken by a marker character that occurs nowhere in the conversation; the rendered text is split on
the added tokens, of which only the template's own are left; the marker is removed; each piece of text is
encoded by a copy of the tokenizer that knows no control tokens. For text without control tokens the result is
what the tokenizer makes of the rendered template.

Templates that add a system message of their own when the conversation has none (SmolLM2, Qwen2.5, Llama 3.1)
are rendered without it: a conversation without a system message has none. `Renderer` finds the default block
when it is made, by comparing renderings of short conversations.
"""

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.sandbox
from tokenizers import Tokenizer

from metagym.errors import InputError
from metagym.spaces import clean
from metagym.types import Message

PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
ROLES = ("system", "user", "assistant", "tool")
# Short texts that no template cares about, to see what a template puts around them.
_SYSTEM, _USER, _REPLY, _NEXT = (
    Message(r, f"qzx{r}{i}xzq") for i, r in enumerate(("system", "user", "assistant", "user"))
)  # type: ignore[arg-type]


class Renderer:
    """Renders messages to token ids with a model's own chat template. Immutable, shared between threads.

    Attributes:
      stop_token_ids: tokens that end a reply: the model's end-of-sequence tokens and `end_of_turn`.
      end_of_turn: the token that the template puts after an assistant's content; None if it puts none.
      tail: text that the template puts between `end_of_turn` and the next message ("\\n" in ChatML).
      default_system: text of the system block that the template adds unasked, and that is left out; "" if
        none, None if there is one whose end can't be found (conversations then need a system message).
      append_only: whether short conversations with more messages always render to a continuation of the same.
    """

    def __init__(self, tokenizer_json: str, template: str, *, special: Mapping[str, Any], eos: Sequence[int]):
        """`special` holds the template's variables (bos_token, eos_token, ...); `eos` the model's stop ids.

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
        self._split, self._occurs, self._prefixes = _patterns(self._control)
        self._longest = max(map(len, self._prefixes), default=0)
        self._special = dict(special)
        self._source = template
        try:
            self._template = _environment().from_string(template)
        except jinja2.TemplateError as e:
            raise InputError(f"the chat template is not valid jinja: {e}") from e
        self._head, self.default_system = self._find_default_system()
        self.end_of_turn, self.tail, self._turn_end = self._find_turn_end()
        ends = [*eos, *([] if self.end_of_turn is None else [self.end_of_turn])]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        self.append_only = self._check_append_only()

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

    def render(self, messages: Sequence[Message], *, generation_prompt: bool, prefix: str = "") -> list[int]:
        """Token ids of a whole conversation: `[T]`. `prefix` begins the assistant's reply.

        Raises InputError if the template refuses the conversation.
        """
        marker = self._marker(messages, prefix)
        text = self._text(messages, marker, generation_prompt)
        return self._encode(text + self._break(prefix, marker), marker, first=True)

    def extend(self, messages: Sequence[Message], known: int, *, prefix: str = "") -> list[int] | None:
        """Token ids that follow the end of turn of message `known - 1`, an assistant's, up to the next reply.

        Only `messages[known:]` and the generation prompt are encoded. None if the template does not render
        the longer conversation as a continuation of the shorter one. Raises InputError as `render` does.
        """
        marker = self._marker(messages, prefix)
        base = self._text(messages[:known], marker, generation_prompt=False)
        full = self._text(messages, marker, generation_prompt=True)
        if not base.endswith(self._turn_end) or not full.startswith(base):
            return None
        suffix = self.tail + full[len(base) :] + self._break(prefix, marker)
        return self._encode(suffix, marker, first=False)

    def _marker(self, messages: Sequence[Message], prefix: str) -> str:
        """A private-use character that occurs neither in the conversation nor in the template."""
        texts = [self._source, prefix, *(m.content for m in messages)]
        texts += [json.dumps(m.tool_calls, ensure_ascii=False, default=str) for m in messages if m.tool_calls]
        return next(c for c in map(chr, range(0xE000, 0xF900)) if not any(c in t for t in texts))

    def _break(self, text: str, marker: str) -> str:
        """Puts the marker behind the first character of every control token that occurs in, or that might
        begin at the end of, `text`."""
        text = self._occurs.sub(lambda m: m[0] + marker, text)
        for start in range(max(0, len(text) - self._longest), len(text)):
            if text[start:] in self._prefixes:
                return text[: start + 1] + marker + self._break(text[start + 1 :], marker)
        return text

    def _text(self, messages: Sequence[Message], marker: str, generation_prompt: bool) -> str:
        """The rendered template, marker inside, default system message left out."""
        text = self._render_template(messages, marker, generation_prompt)
        if self.default_system == "" or (messages and messages[0].role == "system"):
            return text
        block = self._head + (self.default_system or "")
        if self.default_system is None or not text.startswith(block):
            raise InputError(
                "the chat template adds a system message of its own, which can't be told from the rest; "
                "give the conversation a system message, or pass another chat_template"
            )
        return self._head + text[len(block) :]

    def _render_template(self, messages: Sequence[Message], marker: str, generation_prompt: bool) -> str:
        for i, m in enumerate(messages):
            if m.role not in ROLES:
                raise InputError(f"message {i} has role {m.role!r}; roles are {', '.join(ROLES)}")
        try:
            return self._template.render(
                messages=[self._as_dict(m, marker) for m in messages],
                add_generation_prompt=generation_prompt,
                tools=None,
                documents=None,
                **self._special,
            )
        except InputError:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as e:
            roles = ", ".join(m.role for m in messages)
            raise InputError(f"the chat template refused a conversation with roles [{roles}]: {e}") from e

    def _as_dict(self, message: Message, marker: str) -> dict[str, Any]:
        def broken(value: Any) -> Any:
            if isinstance(value, str):
                return self._break(value, marker)
            if isinstance(value, Mapping):
                return {broken(k): broken(v) for k, v in value.items()}
            if isinstance(value, list | tuple):
                return [broken(v) for v in value]
            return value

        out: dict[str, Any] = {"role": message.role, "content": broken(message.content)}
        if message.tool_calls:
            out["tool_calls"] = broken(message.tool_calls)
        if message.tool_call_id is not None:
            out["tool_call_id"] = broken(message.tool_call_id)
        return out

    def _encode(self, text: str, marker: str, *, first: bool) -> list[int]:
        ids: list[int] = []
        for i, piece in enumerate(self._split.split(text)):
            if i % 2:  # the pattern's one group
                ids.append(self._id(piece))
            elif piece := clean(piece.replace(marker, "")):
                plain = self._plain if first and i == 0 else self._inner
                ids += plain.encode(piece, add_special_tokens=False).ids
        return ids

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
        try:
            text = self._text([_USER, _REPLY], "", generation_prompt=False)
        except InputError:
            return None, "", ""
        if _REPLY.content not in text:  # a template for single turns
            return None, "", ""
        after = text[text.rindex(_REPLY.content) + len(_REPLY.content) :]
        found = self._split.search(after)
        if found is None or after[: found.start()].strip():
            return None, after, after
        return self._id(found[0]), after[found.end() :], after

    def _check_append_only(self) -> bool:
        def holds(talk: Sequence[Message], known: int) -> bool | None:
            try:
                return self.extend(talk, known) is not None
            except InputError:  # a conversation that the template refuses, such as one with a system message
                return None

        starts = ([_USER], [_SYSTEM, _USER])
        talks = [[*start, _REPLY, _NEXT, _REPLY, _USER] for start in starts]
        found = [holds(talk[: n + 1], n) for talk in talks for n in (len(talk) - 3, len(talk) - 1)]
        return True in found and False not in found


def _patterns(control: Mapping[str, tuple[int, bool, bool]]):
    """(pattern that splits a text on control tokens, pattern of their first characters, proper prefixes)."""
    if not control:
        return re.compile("((?!))"), re.compile("(?!)"), frozenset()
    names = sorted(control, key=len, reverse=True)
    split = "|".join(
        (r"\s*" if control[n][1] else "") + re.escape(n) + (r"\s*" if control[n][2] else "") for n in names
    )
    occurs = "|".join(map(re.escape, names))
    prefixes = frozenset(n[:k] for n in names for k in range(1, len(n)))
    return re.compile(f"({split})"), re.compile(f"(?=(?:{occurs})).", re.DOTALL), prefixes


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

"""The trace tree of a session: every answered model call, and which call each request goes on from.

Tokens are append-only. A node is one answered call: the tokens that were rendered for it, and those that the
model said. A request is matched to the deepest node whose conversation it extends, among the calls of the
same agent with the same tools; what extends nothing starts from a root. The tokens from a root to a node are
exactly what the engine was given, and what it answered.

What counts as the same message:

- an assistant's turn with tool calls: the same call ids, names and arguments, as canonical JSON; its text and
  thoughts do not count, since programs drop and trim them;
- an assistant's turn without: the same text, in Unicode's composed form, blanks at the ends aside;
- any other message: the same role, text, and id of the call that it answers.
"""

import functools
import json
import math
import re
import unicodedata
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from metagym.types import Generation, Message, TokenTrace, Why

Kind = Literal["main", "sub-agent", "side", "compaction"]
KINDS: tuple[Kind, ...] = ("main", "sub-agent", "side", "compaction")


@dataclass(eq=False)
class Node:
    """One answered model call: what it added to its parent's tokens and messages; or a root."""

    parent: "Node | None"
    turn: int  # index of the call in the session
    messages: tuple[Message, ...]  # new messages, then the reply; () for a root
    key: tuple[Hashable, ...]  # the same, comparable
    prompt: np.ndarray  # i32[T], rendered tokens that this call added
    rebuilt: np.ndarray  # bool[T], those of them that tell an earlier reply again
    generation: Generation | None  # None for a root
    length: int = 0  # tokens from the root to here
    count: int = 0  # messages from the root to here
    agent: str = ""
    tools: Sequence[Mapping[str, Any]] = ()  # what the call could use
    request: Hashable = None  # the same for a retry of the same request; None: nothing is a retry of it
    delivered: bool = True
    recalled: bool = False  # sampled, and trained, in another session
    children: list["Node"] = field(default_factory=list)
    whole: np.ndarray | None = None  # `tokens()`, kept by leaves: a long conversation goes on from one
    room: np.ndarray | None = None  # what `whole` is the beginning of: the next call's tokens go behind it

    def path(self) -> list["Node"]:
        """The calls from the first below the root to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def tokens(self) -> np.ndarray:
        """What was rendered and said from the root to here: i32[length]."""
        if self.whole is not None:
            return self.whole
        said = [(n.prompt, n.generation.tokens) for n in self.path() if n.generation is not None]
        return np.concatenate(
            [np.zeros(0, np.int32), *(part for pair in said for part in pair)], dtype=np.int32
        )


class Tree:
    """The answered calls of one session. Not thread-safe: its owner holds a lock."""

    def __init__(self):
        self._roots: dict[Hashable, Node] = {}
        self._waiting: dict[Hashable, Node] = {}  # answered and not delivered, by request
        self.nodes: list[Node] = []  # answered calls, in the order in which they were answered

    def match(self, group: Hashable, key: tuple[Hashable, ...]) -> Node:
        """The deepest answered call of `group` whose conversation `key` extends; of equal ones the newest.

        The root of the group if there is none. `group` says whose calls they are: agent and tools.
        """
        best = root = self.root(group)
        frontier = [root]
        while frontier:
            node = frontier.pop()
            if node.count > best.count or (node.count == best.count and node.turn > best.turn):
                best = node
            n = node.count
            for child in node.children:
                if key[n : child.count] == child.key:
                    frontier.append(child)
        return best

    def root(self, group: Hashable) -> Node:
        if group not in self._roots:
            empty = np.zeros(0, np.int32)
            self._roots[group] = Node(None, -1, (), (), empty, empty.astype(bool), None)
        return self._roots[group]

    def add(self, node: Node) -> None:
        assert node.parent is not None
        assert node.generation is not None
        self._put(node, node.parent, np.concatenate([node.prompt, node.generation.tokens], dtype=np.int32))
        node.parent.children.append(node)
        self.deliver(node.parent)  # whoever goes on from a reply has got it
        self.nodes.append(node)
        self.deliver(node, node.delivered)

    @staticmethod
    def _put(node: Node, parent: Node, new: np.ndarray) -> None:
        """Puts a node's tokens behind its parent's, which the first one to go on from it need not copy."""
        end = parent.length + len(new)
        room = parent.room
        if room is None or len(room) < end:
            room = np.empty(max(1024, 2 * end), np.int32)
            room[: parent.length] = parent.tokens()
        room[parent.length : end] = new
        node.room, node.whole = room, room[:end]
        parent.room = parent.whole = None

    def deliver(self, node: Node, got: bool = True) -> None:
        """The program has got this reply, or has not."""
        node.delivered = got or bool(node.children)
        if node.delivered:
            self._waiting.pop(node.request, None)
        elif node.request is not None:
            self._waiting[node.request] = node

    def twin(self, request: Hashable) -> Node | None:
        """An answered call for the same request whose answer nobody got yet."""
        return None if request is None else self._waiting.get(request)

    def superseded(self, node: Node) -> bool:
        """Whether nobody used the reply: it was not delivered, or asked for again and not continued."""
        if node.children:
            return False
        if not node.delivered:
            return True
        siblings = node.parent.children if node.parent and node.request is not None else []
        return any(s.request == node.request and s.turn > node.turn and s.delivered for s in siblings)

    def kinds(self) -> dict[int, Kind]:
        """What each branch that starts from a root is about, by `id` of its first call.

        The session's first agent, with tools if it ever has any, is the main one. Its calls without tools are
        side requests (a title, say), unless some call with tools came before and much of their text turns up
        in a prompt that starts a later branch: then it was a compaction of the history. Other agents are
        sub-agents.
        """
        firsts = [n for n in self.nodes if n.parent is not None and n.parent.parent is None]
        main = next((n.agent for n in firsts if n.tools), firsts[0].agent if firsts else "")
        with_tools = [n for n in firsts if n.tools and n.agent == main]
        begun = min((n.turn for n in with_tools), default=-1)
        kinds: dict[int, Kind] = {}
        for node in firsts:
            if node.agent != main:
                kinds[id(node)] = "sub-agent"
            elif node.tools or not with_tools:
                kinds[id(node)] = "main"
            else:
                later = (m.content for n in firsts if n.turn > node.turn and n.tools for m in n.messages[:-1])
                found = node.turn > begun and _told_again(node.messages[-1].content, later)
                kinds[id(node)] = "compaction" if found else "side"
        return kinds

    def traces(self, train: Collection[str] = KINDS) -> tuple[TokenTrace, ...]:
        """One trace per branch, in the order in which the branches were begun.

        Replies of branches whose kind is not in `train`, and those that nobody used, are not trainable; what
        branches share is trainable in the first of them.
        """
        order = {id(n): i for i, n in enumerate(self.nodes)}
        kinds = self.kinds()
        leaves = [n.path() for n in self.nodes if not n.children]
        trained = {id(n) for n in self.nodes if n.recalled}
        traces = []
        for path in sorted(leaves, key=lambda path: [order[id(n)] for n in path]):
            kind = kinds[id(path[0])]

            def why(node: Node, kind: str = kind) -> Why:
                if self.superseded(node):
                    return Why.SUPERSEDED
                if kind not in train:
                    return Why.EXCLUDED
                return Why.SHARED if id(node) in trained else Why.SAMPLED

            traces.append(_trace(path, [why(n) for n in path], kind))
            trained.update(map(id, path))
        return tuple(traces)


def _told_again(text: str, contents: Iterable[str]) -> bool:
    """Whether half of a text of some length, or 200 characters, stand in one of these. Programs put it into
    words of their own, and take tags, blanks or what is not meant to be kept (an analysis) out of it."""
    lines = [" ".join(line.split()) for line in re.sub(r"<[^<>\n]*>", "\n", text).splitlines()]
    lines = [line for line in lines if len(line) >= 16]
    enough = min(200, sum(map(len, lines)) / 2)
    for content in contents if lines else ():
        content = " ".join(content.split())
        if sum(len(line) for line in lines if line in content) >= enough:
            return True
    return False


def key(messages: Sequence[Message]) -> tuple[Hashable, ...]:
    """What messages are, comparable: equal for messages that count as the same (see the module)."""
    return tuple(map(_message_key, messages))


def _message_key(m: Message) -> Hashable:
    if m.role != "assistant":
        return m.role, m.content, m.tool_call_id
    if m.tool_calls:
        return m.role, tuple(_call_key(c) for c in m.tool_calls)
    content = m.content
    if not content.isascii():
        content = unicodedata.normalize("NFC", content)
    if "\r" in content:
        content = content.replace("\r\n", "\n")
    return m.role, content.strip()


def _call_key(call: Mapping[str, Any]) -> Hashable:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return canonical(dict(call))
    arguments = function.get("arguments")
    arguments = canonical_text(arguments) if isinstance(arguments, str) else canonical(arguments)
    return call.get("id"), function.get("name"), arguments


@functools.lru_cache(maxsize=1 << 14)
def canonical_text(text: str) -> str:
    """Canonical form of a JSON text; the text itself, without blanks at the ends, if it is not JSON."""
    try:
        return canonical(json.loads(text))
    except (ValueError, RecursionError):
        return text.strip()


def canonical(value: Any) -> str:
    """JSON with sorted keys, no blanks, and numbers as a program that knows only floats writes them."""
    return json.dumps(_numbers(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)


def _numbers(value: Any) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:
            return str(value)
        return int(number) if math.isfinite(number) and number == int(number) else number
    if isinstance(value, Mapping):
        return {str(k): _numbers(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(v) for v in value]
    return value


def _trace(path: Sequence[Node], whys: Sequence[Why], kind: Kind) -> TokenTrace:
    """Joins the calls from a root's child to a leaf."""
    parts = [(n, n.generation, why) for n, why in zip(path, whys, strict=True) if n.generation is not None]
    width = max(g.routing.shape[1] for _, g, _ in parts)

    def join(rendered: Any, sampled: Callable[[Generation, Why], Any], dtype: Any, *row: int) -> np.ndarray:
        def pieces() -> Iterator[np.ndarray]:
            for node, g, why in parts:
                yield np.full((len(node.prompt), *row), rendered, dtype)
                yield np.broadcast_to(sampled(g, why), (len(g.tokens), *row)).astype(dtype)

        return np.concatenate(list(pieces()))

    rebuilt = np.concatenate([x for n, g, _ in parts for x in (n.rebuilt, np.zeros(len(g.tokens), bool))])
    why = join(Why.RENDERED, lambda g, why: why, np.int8)
    routing = join(-1, lambda g, why: g.routing, np.int32, width)  # -1: no expert recorded
    read = parts[-1][1].prompt_routing  # of all that was read for the last reply
    if len(read):
        routing[: len(read)] = np.where(routing[: len(read)] >= 0, routing[: len(read)], read)
    return TokenTrace(
        tokens=path[-1].tokens().copy(),
        sampled=join(False, lambda g, why: True, bool),
        trainable=join(False, lambda g, why: why == Why.SAMPLED, bool),
        logprobs=join(np.nan, lambda g, why: g.logprobs, np.float32),
        version=join(-1, lambda g, why: g.version, np.int32),
        turn=np.concatenate([np.full(len(n.prompt) + len(g.tokens), n.turn, np.int32) for n, g, _ in parts]),
        routing=routing,
        kind=kind,
        why=np.where(rebuilt, np.int8(Why.REBUILT), why),
    )

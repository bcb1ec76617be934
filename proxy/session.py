"""A session: one episode's conversation with a model, and the exact tokens of it.

Text becomes tokens here and nowhere else. Each answered call is a node of the trace tree (`proxy.tree`): only
what a request adds to it is rendered, and appended to the tokens that the model really saw and said.

A native agent calls `chat`. The server goes the same way in three steps, so that it can wait without a
thread: `plan` (what the request goes on from), `submit` (to the backend), `record` (the answer).
"""

import concurrent.futures
import hashlib
import secrets
import threading
import time
from array import array
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from metagym.errors import (
    AgentTimeoutError,
    ContextOverflowError,
    EngineError,
    InputError,
    MetaGymError,
    TokenLimitError,
    TurnLimitError,
)
from metagym.live import Live
from metagym.protocols import Backend
from metagym.proxy import tools as tool_formats
from metagym.proxy.render import History, Renderer
from metagym.proxy.tree import KINDS, Node, Tree, canonical, key
from metagym.types import Generation, Message, Sampling, TokenTrace

_CONTRACT = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


@dataclass(frozen=True)
class Request:
    """What a program asks for, whatever dialect it speaks."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # {"type": "function", "function": {...}}
    agent: str = ""  # which of the program's agents asks, where it says so
    prefix: str = ""  # a begun reply: rendered, not sampled
    max_tokens: int | None = None  # most tokens of the reply; None: the session's
    asked: Mapping[str, Any] = field(default_factory=dict)  # sampling settings that the session overrules


@dataclass(frozen=True, eq=False)
class Plan:
    """What a request goes on from. `twin`: an answer to the same request that nobody got yet."""

    request: Request
    key: tuple[Hashable, ...]
    parent: Node
    root: Node
    signature: Hashable  # the same for a retry of this request
    twin: Node | None


@dataclass(frozen=True, eq=False)
class Call:
    """A request that the backend is working on."""

    plan: Plan
    parent: Node  # where its tokens are appended; the root if the template rewrites history
    prompt: np.ndarray  # i32[T], what was rendered for it
    turn: int
    sampling: Sampling
    future: "concurrent.futures.Future[Generation]"


@dataclass(frozen=True, eq=False)
class Reply:
    """An answer, and its true counts of tokens."""

    message: Message
    finish: str  # "stop" or "length"
    prompt_tokens: int
    cached_tokens: int  # of those, known from earlier calls
    completion_tokens: int
    node: Node


class Session(Live):
    """A `Chat` whose every token is recorded. Safe to call from many threads.

    - Assistant turns in a request are matched by the text that was returned (white space at the ends aside)
      or by their tool calls, never tokenised again; all other messages must be equal.
    - A reply that ended by length gets the template's end-of-turn token as a rendered, not a sampled one.
    - A request that was answered before is answered anew in a sibling branch; the calls that branches share
      are trainable in the first of them. With `retries`, it is a retry of the earlier one: an answer that
      was not delivered is delivered, and one that was, but is never continued, is not trainable.
    - A request that the template does not render as a continuation opens a branch from the root, where
      earlier replies are rebuilt from text and not trainable (counted as `metrics["not_append_only"]`; one
      that extends nothing known as `metrics["unmatched"]`). With history "keep", what the model saw and said
      stays as it is, whatever the template would make of it now.
    """

    def __init__(
        self,
        backend: Backend,
        renderer: Renderer,
        *,
        sampling: Sampling | None = None,
        training: bool = True,
        context: int = 1024,
        token_budget: int | None = None,
        max_turns: int | None = None,
        deadline_s: float | None = None,
        seed: int | None = None,
        timeout_s: float | None = 900.0,
        history: History = "branch",
        train: Collection[str] = KINDS,
        retries: bool = False,
        prefix: str = "",
        suffix: str = "",
    ):
        """
        Args:
          sampling: how to sample; the renderer's stop tokens are added to its own.
          training: forces temperature 1 and no filters, whatever `sampling` says; `forced` records that.
          context: most tokens of one branch, prompt and reply together.
          token_budget: most tokens sampled in the session. Calls that run at once may exceed it together.
          max_turns: most calls; None for sessions whose episode loop counts them.
          deadline_s: seconds from now after which calls are refused; None: no limit.
          seed: decides, with the index of the call, each reply's seed; None leaves that to the backend.
            Members of a group need different ones.
          timeout_s: longest wait for one reply, then EngineError; None waits for ever.
          history: "branch": a template that rewrites history starts new branches; "keep": it is kept.
          train: which kinds of branches train: "main", "sub-agent", "side", "compaction".
          retries: whether a repeated request is a retry; for programs that repeat a request on their own.
          prefix, suffix: what stands before the sampled tokens of a reply, and behind those of one that was
            cut at `max_tokens`: rendered, not sampled. With them a small model fills one place of a tool
            call that is always valid. A request's own prefix goes before the session's.
        """
        sampling = sampling or Sampling()
        self.forced: dict[str, Any] = {}
        if training:
            self.forced = {k: getattr(sampling, k) for k, v in _CONTRACT.items() if getattr(sampling, k) != v}
            sampling = replace(sampling, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
        stops = dict.fromkeys((*sampling.stop_token_ids, *renderer.stop_token_ids))
        self.sampling = replace(sampling, stop_token_ids=tuple(stops))
        self.training = training
        self.timeout_s = timeout_s
        self.train = frozenset(train) if training else frozenset[str]()
        self.ended: MetaGymError | None = None  # the budget that ran out, once one has
        self.broken: EngineError | None = None  # why the newest call has no answer, where the engine failed
        self._backend, self._renderer = backend, renderer
        self._context, self._budget, self._max_turns = context, token_budget, max_turns
        self._deadline = None if deadline_s is None else time.monotonic() + deadline_s
        self._deadline_s = deadline_s
        self._seed, self._retries = seed, retries
        self._prefix, self._suffix = prefix, suffix
        self._history: History = history
        # Ids of tool calls: the same in every run with the same seed, unlike those of other sessions.
        self._salt = secrets.token_hex(8) if seed is None else str(seed)
        self._tree = Tree()
        self._last: tuple[tuple[Message, ...], tuple[Hashable, ...]] = ((), ())  # messages, and their keys
        self._tools: tuple[Sequence[Mapping[str, Any]], str] = ((), "")
        self._counts: Counter[str] = Counter()
        self._running: set[concurrent.futures.Future[Generation]] = set()
        self._turns = 0
        self._closed = False
        self._lock = threading.Lock()

    def chat(self, messages: Sequence[Message], *, prefix: str = "") -> Message:
        """Answers the conversation so far; see `metagym.protocols.Chat`.

        Raises InputError (no messages, a template that refuses them, a closed session), ContextOverflowError,
        TokenLimitError, TurnLimitError, AgentTimeoutError, EngineError. After an error the traces hold the
        calls that were answered before.
        """
        call = self.submit(self.plan(Request(tuple(messages), prefix=prefix)))
        try:
            generation = call.future.result(self.timeout_s)
        except BaseException as error:
            raise self.failed(call, error) from error
        return self.record(call, generation, text_only=True).message

    def recall(self, messages: Sequence[Message], generation: Generation, *, prefix: str = "") -> Message:
        """Takes an answer that was sampled before, in another session, as the answer to these messages. It is
        not trainable here. Whether it ended by itself is seen by its last token.

        Raises InputError and EngineError as `chat` does; no budget counts it.
        """
        stopped = bool(len(generation.tokens)) and int(generation.tokens[-1]) in self.sampling.stop_token_ids
        generation = replace(generation, finish="stop" if stopped else "length")
        plan = self.plan(Request(tuple(messages), prefix=prefix))
        with self._lock:
            turn, self._turns = self._turns, self._turns + 1
            self._counts["calls"] += 1
        parent, prompt = self._render(plan)
        sampling = replace(self.sampling, max_tokens=max(1, len(generation.tokens)))
        done: concurrent.futures.Future[Generation] = concurrent.futures.Future()
        done.set_result(generation)
        reply = self.record(Call(plan, parent, prompt, turn, sampling, done), generation, text_only=True)
        with self._lock:
            reply.node.recalled = True
            self._counts["sampled_tokens"] -= len(generation.tokens)
            self._counts["recalled_tokens"] += len(generation.tokens)
        return reply.message

    def plan(self, request: Request) -> Plan:
        """Finds what a request goes on from. Raises InputError, and a budget's error once it is used up."""
        if not request.messages:
            raise InputError("chat needs at least one message")
        if self._prefix and not request.prefix:
            request = replace(request, prefix=self._prefix)
        with self._lock:
            self._check_open()
            whole, group = self._keys(request)
            parent = self._tree.match(group, whole)
            signature = None
            if self._retries:
                rest = whole[parent.count :]
                signature = (group, parent.turn, rest, request.prefix, request.max_tokens)
            twin = self._tree.twin(signature)
            for name, value in request.asked.items():
                if _CONTRACT.get(name) != value:
                    self.forced[name] = value
            return Plan(request, whole, parent, self._tree.root(group), signature, twin)

    def _keys(self, request: Request) -> tuple[tuple[Hashable, ...], Hashable]:
        """(what the messages are, whose calls they are); what the last request had is not looked at again."""
        messages, known = self._last
        same = len(messages) if request.messages[: len(messages)] == messages else 0
        known = (*known[:same], *key(request.messages[same:]))
        self._last = request.messages, known
        tools, text = self._tools
        if request.tools != tools:
            self._tools = tools, text = request.tools, canonical(request.tools)
        return known, (request.agent, text)

    def count_tokens(self, request: Request) -> int:
        """How many tokens the prompt of a request has. Raises InputError."""
        parent, prompt = self._render(self.plan(request), counted=False)
        return parent.length + len(prompt)

    def submit(self, plan: Plan) -> Call:
        """Renders what is new, and gives all of it to the backend.

        Raises InputError, ContextOverflowError, the budgets' errors, EngineError.
        """
        request = plan.request
        with self._lock:
            self._check_open()
            turn, self._turns = self._turns, self._turns + 1
            self._counts["calls"] += 1
            used = self._counts["sampled_tokens"]
        parent, prompt = self._render(plan)
        length = parent.length + len(prompt)
        room = self._context - length
        if room < 1:
            with self._lock:
                self._counts["context_overflows"] += 1
            raise ContextOverflowError(
                f"the prompt has {length} tokens and the context {self._context}: no room for a reply"
            )
        left = room if self._budget is None else self._budget - used
        most = self.sampling.max_tokens
        most = most if request.max_tokens is None else min(most, max(1, request.max_tokens))
        sampling = replace(self.sampling, max_tokens=min(most, room, left), seed=self._seed_of(turn))
        future = None
        try:
            ids = array("i")  # as a list, but made of a long conversation in no time
            ids.frombytes(parent.tokens().view(np.uint8).data)
            ids.frombytes(prompt.view(np.uint8).data)
            future = self._backend.submit(ids, sampling)
            with self._lock:
                self._running.add(future)
                closed = self._closed
            call = Call(plan, parent, prompt, turn, sampling, future)
            if closed:
                raise EngineError("the session was closed while it waited for a reply")
            return call
        except BaseException as error:
            raise self._failed(future, error) from error

    def record(self, call: Call, generation: Generation, *, text_only: bool = False) -> Reply:
        """Checks what the backend returned and adds it to the traces.

        With `text_only` the reply's message is the whole text; else thoughts and tool calls are read from it.
        Raises EngineError if it can't be trained on; nothing is recorded then.
        """
        try:
            _check(generation, call.sampling)
        except Exception as error:
            raise self._failed(call.future, error) from error
        request, parent = call.plan.request, call.parent
        message, malformed = self._read(call, generation, text_only)
        new = (*request.messages[parent.count :], message)
        retold = any(m.role == "assistant" for m in new[:-1])
        rebuilt = self._renderer.rebuilt(call.prompt) if retold else np.zeros(len(call.prompt), bool)
        length = parent.length + len(call.prompt)
        node = Node(
            parent, call.turn, new, (*call.plan.key[parent.count :], *key([message])), call.prompt, rebuilt,
            generation, length + len(generation.tokens), parent.count + len(new), request.agent,
            request.tools, call.plan.signature, delivered=not self._retries,
        )  # fmt: skip
        with self._lock:
            self._running.discard(call.future)
            self.broken = None
            self._tree.add(node)
            self._counts["prompt_tokens"] += length
            self._counts["rendered_tokens"] += len(call.prompt)
            self._counts["sampled_tokens"] += len(generation.tokens)
            self._counts["cut_replies"] += generation.finish == "length"
            self._counts["tool_calls"] += len(message.tool_calls)
            self._counts["malformed_calls"] += malformed
        return self.reply_of(node)

    def reply_of(self, node: Node) -> Reply:
        """The answer that a node of the tree is."""
        assert node.generation is not None
        assert node.parent is not None
        said = len(node.generation.tokens)
        cut = node.generation.finish == "length" and not self._suffix
        finish = "length" if cut else "stop"
        return Reply(
            node.messages[-1],
            finish,
            node.length - said,
            node.parent.length,
            completion_tokens=said,
            node=node,
        )

    def delivered(self, reply: Reply, got: bool = True) -> None:
        """The program has got this answer: it trains, and a repeated request is answered anew. Or it has
        not: the next request that is the same gets it."""
        with self._lock:
            self._tree.deliver(reply.node, got)

    def failed(self, call: Call, error: BaseException) -> BaseException:
        """Aborts a call whose reply can't be had, and says why as one of our errors."""
        return self._failed(call.future, error)

    def count(self, name: str) -> None:
        """Counts something that happened around the session: a retry, say."""
        with self._lock:
            self._counts[name] += 1

    @property
    def traces(self) -> tuple[TokenTrace, ...]:
        """One trace per branch, in the order in which the branches were begun."""
        with self._lock:
            return self._tree.traces(self.train if self.training else KINDS)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The answered calls, in order."""
        with self._lock:
            return tuple(self._tree.nodes)

    @property
    def metrics(self) -> dict[str, float]:
        """Counts: calls, errors, branches, unmatched, not_append_only, prompt_tokens, rendered_tokens,
        sampled_tokens, cut_replies (ended by length), context_overflows, tool_calls, malformed_calls, retries
        (answered with the answer of a twin), hang_ups, superseded (answers that nobody used), forced
        (sampling settings overruled)."""
        names = ("calls", "errors", "unmatched", "not_append_only", "prompt_tokens", "rendered_tokens")
        names += ("sampled_tokens", "cut_replies", "context_overflows", "tool_calls", "malformed_calls")
        names += ("retries", "hang_ups")
        with self._lock:
            counts = {n: float(self._counts[n]) for n in names}
            counts |= {n: float(c) for n, c in self._counts.items()}
            counts["branches"] = float(sum(not n.children for n in self._tree.nodes))
            counts["superseded"] = float(sum(map(self._tree.superseded, self._tree.nodes)))
        return {**counts, "forced": float(len(self.forced))}

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Aborts what runs, whose callers get EngineError, and refuses further calls. Traces stay."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for future in running:
            self._backend.abort(future)

    def _check_open(self) -> None:
        """Raises if the session takes no more calls. The lock is held."""
        if self._closed:
            raise InputError("the session is closed: open another one")
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self.ended = AgentTimeoutError(f"the session's {self._deadline_s:g} s are over")
        elif self._max_turns is not None and self._turns >= self._max_turns:
            self.ended = TurnLimitError(f"the session's budget of {self._max_turns} calls is used up")
        elif self._budget is not None and self._counts["sampled_tokens"] >= self._budget:
            self.ended = TokenLimitError(f"the session's budget of {self._budget} sampled tokens is used up")
        if self.ended is not None:
            raise self.ended

    def _render(self, plan: Plan, counted: bool = True) -> tuple[Node, np.ndarray]:
        """(the call to continue, the tokens to append to it)."""
        parent, request = plan.parent, plan.request
        messages, tools = request.messages, request.tools
        if parent.generation is not None:
            # The known part in our own words, so that an echo's white space changes nothing.
            known = [m for node in parent.path() for m in node.messages]
            more = self._renderer.extend(
                (*known, *messages[parent.count :]),
                parent.count, prefix=request.prefix, tools=tools, history=self._history,
            )  # fmt: skip
            if more is not None:
                end = self._renderer.end_of_turn
                if end is not None and parent.generation.tokens[-1] != end:
                    more = [end, *more]
                if parent.generation.finish == "length" and self._suffix:
                    more = [*self._renderer.encode_text(self._suffix), *more]
                return parent, np.asarray(more, np.int32)
        with self._lock:
            if parent.generation is not None:
                self._counts["not_append_only"] += counted
            elif self._tree.nodes and any(m.role == "assistant" for m in messages):
                self._counts["unmatched"] += counted
        ids = self._renderer.render(messages, generation_prompt=True, prefix=request.prefix, tools=tools)
        return plan.root, np.asarray(ids, np.int32)

    def _seed_of(self, turn: int) -> int | None:
        if self._seed is None:
            return self.sampling.seed
        return int(np.random.SeedSequence([self._seed, turn]).generate_state(1)[0])

    def _read(self, call: Call, generation: Generation, text_only: bool) -> tuple[Message, int]:
        """(the text view of a reply, how many calls in it can't be read)."""
        request = call.plan.request
        ids = generation.tokens[:-1] if generation.finish == "stop" else generation.tokens
        behind = self._suffix if generation.finish == "length" else ""
        text = request.prefix + self._renderer.decode(ids.tolist()) + behind
        if text_only:
            return Message("assistant", text), 0
        thinking = self._renderer.begins_thinking and not request.prefix
        read = tool_formats.parse(text, self._renderer.tool_format, request.tools, thinking=thinking)
        calls = tuple(
            {
                "id": self._call_id(call.turn, i),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for i, (name, arguments) in enumerate(read.calls)
        )
        return Message("assistant", read.content, calls, reasoning=read.reasoning), read.malformed

    def _call_id(self, turn: int, index: int) -> str:
        return "call_" + hashlib.blake2b(f"{self._salt} {turn} {index}".encode(), digest_size=12).hexdigest()

    def _failed(
        self, future: "concurrent.futures.Future[Generation] | None", error: BaseException
    ) -> BaseException:
        with self._lock:
            self._counts["errors"] += 1
            closed = self._closed
            if future is not None:
                self._running.discard(future)
        if future is not None and not future.done():
            self._backend.abort(future)
        if isinstance(error, MetaGymError) or not isinstance(error, Exception):
            told = error
        elif closed:
            return EngineError("the session was closed while it waited for a reply")
        elif isinstance(error, concurrent.futures.CancelledError):
            told = EngineError("the engine aborted the generation")
        elif isinstance(error, TimeoutError):
            told = EngineError(f"the engine did not answer within {self.timeout_s} s")
        else:
            told = EngineError(f"the engine's answer is unusable: {type(error).__name__}: {error}")
        if isinstance(told, EngineError) and not closed:
            self.broken = told
        return told


def _check(generation: Generation, sampling: Sampling) -> None:
    """Raises EngineError if a generation can't be trained on, ValueError or TypeError if it is malformed."""
    if not isinstance(generation, Generation):
        raise EngineError(f"the engine returned a {type(generation).__name__}, not a Generation")
    if generation.finish == "abort":
        raise EngineError("the engine aborted the generation")
    replace(generation)  # its constructor checks lengths and log-probs; a backend may have gone past it
    tokens = np.asarray(generation.tokens)
    if len(tokens) == 0:
        raise EngineError("the engine returned no tokens: nothing can be trained on")
    if len(tokens) > sampling.max_tokens:
        raise EngineError(
            f"the engine returned {len(tokens)} tokens, more than the {sampling.max_tokens} asked for"
        )
    if tokens.dtype.kind not in "iu" or tokens.min() < 0 or np.min(generation.version) < 0:
        raise EngineError("the engine returned tokens or versions that are not counts from 0")
    ends = np.zeros(len(tokens), bool)
    for stop in sampling.stop_token_ids:
        ends |= tokens == stop
    stops = np.flatnonzero(ends).tolist()
    expected = [len(tokens) - 1] if generation.finish == "stop" else []
    if stops != expected:
        raise EngineError(
            f"the engine returned {len(tokens)} tokens that ended by {generation.finish!r}, "
            f"with end-of-turn tokens at {stops} where {expected} is right"
        )

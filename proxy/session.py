"""A session: one episode's conversation with a model, and the exact tokens of it.

Text becomes tokens here and nowhere else. Every answered call is a node of a tree; a request is matched to
the deepest node whose conversation it extends, and only what is new is rendered and appended to the tokens
that the model really saw and said. What extends nothing opens a branch from the root. Each leaf is one
`TokenTrace`.
"""

import concurrent.futures
import json
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from metagym.errors import ContextOverflowError, EngineError, InputError, MetaGymError, TokenLimitError
from metagym.live import Live
from metagym.protocols import Backend
from metagym.proxy.render import Renderer
from metagym.types import Generation, Message, Sampling, TokenTrace

_CONTRACT = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


@dataclass(eq=False)
class _Call:
    """One answered model call: what it added to its parent's tokens and messages."""

    parent: "_Call | None"
    turn: int
    messages: tuple[Message, ...]  # new messages, then the reply; () for the root
    key: tuple[object, ...]  # the same, comparable
    prompt: np.ndarray  # i32[T], rendered tokens that this call added
    generation: Generation | None  # None for the root
    length: int  # tokens from the root to here
    count: int  # messages from the root to here
    children: list["_Call"] = field(default_factory=list)

    def path(self) -> list["_Call"]:
        """The calls from the first below the root to this one."""
        calls, call = [], self
        while call.parent is not None:
            calls.append(call)
            call = call.parent
        return calls[::-1]


class Session(Live):
    """A `Chat` whose every token is recorded. Safe to call from many threads.

    - Assistant turns in a request are matched by the text that was returned (white space at the ends aside),
      never tokenised again; all other messages must be equal.
    - A reply that ended by length gets the template's end-of-turn token as a rendered, not a sampled one.
    - A request that was answered before is answered anew in a sibling branch; the calls that branches share
      are trainable in the first of them.
    - A request that the template does not render as a continuation opens a branch from the root, where
      earlier replies are rebuilt from text and not trainable (counted as `metrics["not_append_only"]`; one
      that extends nothing known as `metrics["unmatched"]`).
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
        seed: int | None = None,
        timeout_s: float | None = 900.0,
    ):
        """
        Args:
          sampling: how to sample; the renderer's stop tokens are added to its own.
          training: forces temperature 1 and no filters, whatever `sampling` says; `forced` records that.
          context: most tokens of one branch, prompt and reply together.
          token_budget: most tokens sampled in the session. Calls that run at once may exceed it together.
          seed: decides, with the index of the call, each reply's seed; None leaves that to the backend.
            Members of a group need different ones.
          timeout_s: longest wait for one reply, then EngineError; None waits for ever.
        """
        sampling = sampling or Sampling()
        self.forced: dict[str, float] = {}
        if training:
            self.forced = {k: getattr(sampling, k) for k, v in _CONTRACT.items() if getattr(sampling, k) != v}
            sampling = replace(sampling, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
        stops = dict.fromkeys((*sampling.stop_token_ids, *renderer.stop_token_ids))
        self.sampling = replace(sampling, stop_token_ids=tuple(stops))
        self.training = training
        self._backend, self._renderer = backend, renderer
        self._context, self._budget = context, token_budget
        self._seed, self._timeout_s = seed, timeout_s
        self._root = _Call(None, -1, (), (), np.zeros(0, np.int32), None, 0, 0)
        self._calls: list[_Call] = []
        self._counts: Counter[str] = Counter()
        self._running: set[concurrent.futures.Future[Generation]] = set()
        self._turns = 0
        self._closed = False
        self._lock = threading.Lock()

    def chat(self, messages: Sequence[Message], *, prefix: str = "") -> Message:
        """Answers the conversation so far; see `metagym.protocols.Chat`.

        Raises InputError (no messages, a template that refuses them, a closed session), ContextOverflowError,
        TokenLimitError, EngineError. After an error the traces hold the calls that were answered before.
        """
        messages = tuple(messages)
        if not messages:
            raise InputError("chat needs at least one message")
        with self._lock:
            if self._closed:
                raise InputError("the session is closed: open another one")
            turn, self._turns = self._turns, self._turns + 1
            self._counts["calls"] += 1
            parent = self._match(messages)
            used = self._counts["sampled_tokens"]
        parent, prompt = self._render(parent, messages, prefix)
        length = parent.length + len(prompt)
        room = self._context - length
        if room < 1:
            raise ContextOverflowError(
                f"the prompt has {length} tokens and the context {self._context}: no room for a reply"
            )
        left = room if self._budget is None else self._budget - used
        if left < 1:
            raise TokenLimitError(f"the session's budget of {self._budget} sampled tokens is used up")
        sampling = replace(
            self.sampling, max_tokens=min(self.sampling.max_tokens, room, left), seed=self._seed_of(turn)
        )
        generation = self._generate(np.concatenate([*_tokens(parent), prompt]), sampling)
        reply = self._reply(prefix, generation)
        new = (*messages[parent.count :], reply)
        call = _Call(
            parent, turn, new, _key(new), prompt, generation,
            length=length + len(generation.tokens), count=parent.count + len(new),
        )  # fmt: skip
        with self._lock:
            parent.children.append(call)
            self._calls.append(call)
            self._counts["prompt_tokens"] += length
            self._counts["rendered_tokens"] += len(prompt)
            self._counts["sampled_tokens"] += len(generation.tokens)
            self._counts["cut_replies"] += generation.finish == "length"
        return reply

    @property
    def traces(self) -> tuple[TokenTrace, ...]:
        """One trace per branch, in the order in which the branches were begun."""
        with self._lock:
            calls = list(self._calls)
            leaves = [c for c in calls if not c.children]
        order = {id(c): i for i, c in enumerate(calls)}
        trained: set[int] = set()
        traces = []
        for leaf in sorted(leaves, key=lambda c: [order[id(p)] for p in c.path()]):
            path = leaf.path()
            traces.append(_trace(path, fresh=[id(c) not in trained for c in path]))
            trained.update(map(id, path))
        return tuple(traces)

    @property
    def metrics(self) -> dict[str, float]:
        """Counts: calls, errors, branches, unmatched, not_append_only, prompt_tokens, rendered_tokens,
        sampled_tokens, cut_replies (ended by length), forced (sampling settings overruled)."""
        names = ("calls", "errors", "unmatched", "not_append_only", "prompt_tokens", "rendered_tokens")
        with self._lock:
            counts = {n: float(self._counts[n]) for n in (*names, "sampled_tokens", "cut_replies")}
            counts["branches"] = float(sum(not c.children for c in self._calls))
        return {**counts, "forced": float(len(self.forced))}

    def close(self) -> None:
        """Aborts what runs, whose callers get EngineError, and refuses further calls. Traces stay."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for future in running:
            self._backend.abort(future)

    def _match(self, messages: tuple[Message, ...]) -> _Call:
        """The deepest answered call whose conversation `messages` extends; of equal ones the newest."""
        keys = _key(messages)
        best, frontier = self._root, [self._root]
        while frontier:
            call = frontier.pop()
            if call.count > best.count or (call.count == best.count and call.turn > best.turn):
                best = call
            for child in call.children:
                if keys[call.count : child.count] == child.key:
                    frontier.append(child)
        return best

    def _render(self, parent: _Call, messages: tuple[Message, ...], prefix: str) -> tuple[_Call, np.ndarray]:
        """(the call to continue, the tokens to append to it)."""
        if parent.generation is not None:
            # The known part in our own words, so that an echo's white space changes nothing.
            known = tuple(m for call in parent.path() for m in call.messages)
            more = self._renderer.extend((*known, *messages[parent.count :]), parent.count, prefix=prefix)
            if more is not None:
                end = self._renderer.end_of_turn
                if end is not None and parent.generation.tokens[-1] != end:
                    more = [end, *more]
                return parent, np.asarray(more, np.int32)
        with self._lock:
            if parent.generation is not None:
                self._counts["not_append_only"] += 1
            elif self._calls and any(m.role == "assistant" for m in messages):
                self._counts["unmatched"] += 1
        ids = self._renderer.render(messages, generation_prompt=True, prefix=prefix)
        return self._root, np.asarray(ids, np.int32)

    def _seed_of(self, turn: int) -> int | None:
        if self._seed is None:
            return self.sampling.seed
        return int(np.random.SeedSequence([self._seed, turn]).generate_state(1)[0])

    def _generate(self, prompt: np.ndarray, sampling: Sampling) -> Generation:
        future = None
        try:
            future = self._backend.submit(prompt.tolist(), sampling)
            with self._lock:
                self._running.add(future)
                closed = self._closed
            if closed:
                raise EngineError("the session was closed while it waited for a reply")
            generation = future.result(self._timeout_s)
            _check(generation, sampling)
            return generation
        except BaseException as e:
            with self._lock:
                self._counts["errors"] += 1
                closed = self._closed
            if future is not None and not future.done():
                self._backend.abort(future)
            if isinstance(e, MetaGymError) or not isinstance(e, Exception):
                raise
            if closed:
                raise EngineError("the session was closed while it waited for a reply") from e
            if isinstance(e, concurrent.futures.CancelledError):
                raise EngineError("the engine aborted the generation") from e
            if isinstance(e, TimeoutError):
                raise EngineError(f"the engine did not answer within {self._timeout_s} s") from e
            raise EngineError(f"the engine's answer is unusable: {type(e).__name__}: {e}") from e
        finally:
            with self._lock:
                self._running.discard(future)  # type: ignore[arg-type]

    def _reply(self, prefix: str, generation: Generation) -> Message:
        ids = generation.tokens[:-1] if generation.finish == "stop" else generation.tokens
        return Message("assistant", prefix + self._renderer.decode(ids.tolist()))


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
    stops = np.flatnonzero(np.isin(tokens, sampling.stop_token_ids)).tolist()
    expected = [len(tokens) - 1] if generation.finish == "stop" else []
    if stops != expected:
        raise EngineError(
            f"the engine returned {len(tokens)} tokens that ended by {generation.finish!r}, "
            f"with end-of-turn tokens at {stops} where {expected} is right"
        )


def _key(messages: Sequence[Message]) -> tuple[object, ...]:
    """The text view of messages, comparable: an assistant's white space at the ends does not count."""

    def one(m: Message) -> object:
        content = m.content
        if m.role == "assistant":
            content = unicodedata.normalize("NFC", content.replace("\r\n", "\n")).strip()
        calls = (
            json.dumps([dict(c) for c in m.tool_calls], sort_keys=True, default=str) if m.tool_calls else ""
        )
        return m.role, content, calls, m.tool_call_id

    return tuple(one(m) for m in messages)


def _tokens(call: _Call) -> list[np.ndarray]:
    return [
        part
        for c in call.path()
        for part in (c.prompt, c.generation.tokens if c.generation else c.prompt[:0])
    ]


def _trace(path: Sequence[_Call], fresh: Sequence[bool]) -> TokenTrace:
    """Joins the calls from a root's child to a leaf. `fresh[i]`: no earlier branch trains call i's reply."""
    parts = [(c, c.generation, new) for c, new in zip(path, fresh, strict=True) if c.generation is not None]
    width = max(g.routing.shape[1] for _, g, _ in parts)

    def join(
        rendered: float, sampled: Callable[[Generation, bool], Any], dtype: Any, *row: int
    ) -> np.ndarray:
        out = []
        for call, g, new in parts:
            out.append(np.full((len(call.prompt), *row), rendered, dtype))
            out.append(np.broadcast_to(sampled(g, new), (len(g.tokens), *row)).astype(dtype))
        return np.concatenate(out)

    return TokenTrace(
        tokens=np.concatenate(_tokens(path[-1])).astype(np.int32),
        sampled=join(False, lambda g, new: True, bool),
        trainable=join(False, lambda g, new: new, bool),
        logprobs=join(np.nan, lambda g, new: g.logprobs, np.float32),
        version=join(-1, lambda g, new: g.version, np.int32),
        turn=np.concatenate([np.full(len(c.prompt) + len(g.tokens), c.turn, np.int32) for c, g, _ in parts]),
        routing=join(-1, lambda g, new: g.routing, np.int32, width),  # -1: no expert recorded
    )

"""The embedded engine: generation in this process, on the models of `metagym.models`.

One worker thread owns the device. Requests are batched continuously into a few fixed shapes, each compiled
once: `extend` (S sequences read C tokens each), `sample`, `decode` (S sequences read and sample several
tokens each), and `copy` of pages. The KV cache is paged; `pages.py` says who owns what:

- A prompt that begins as an earlier conversation did reads that part from the cache, in steps of a page.
  While one sequence computes a page, others that need the same one wait for it.
- A prompt that was seen whole costs no forward pass at all: its last hidden state is kept, and each member of
  a group samples from it. A partly filled last page is copied when its reader goes on to write.
- After `load` nothing old is found any more. Prompts that are being read start again with the new weights;
  replies that are being sampled go on, and each token carries the version that sampled it.

Which tokens are sampled depends on the request's seed and the logits, not on what else is in the batch. The
logits of a sequence can differ in their last bits with the shape that computed them, unless the engine is
deterministic: then every token goes through one shape, a tile of `page_size` tokens that starts at a page's
start. A step of decoding computes the page it is in anew, so a token is at the same place of the same tile
whether it was a prompt's or sampled, computed alone or with others, or read from the cache.
"""

import atexit
import functools
import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from metagym.errors import ContextOverflowError, EngineError, InputError
from metagym.live import Live
from metagym.models import Llama, init_cache
from metagym.models.decode import Limits, Split, decode, split
from metagym.models.matmul import few_rows, from_bits, to_bits
from metagym.proxy.backends.pages import Entry, Node, PageTable
from metagym.proxy.backends.sampling import Rows, sample
from metagym.types import Generation, Sampling

_CACHE_CAP = 1 << 30  # bytes of KV cache that the default of num_pages stays below
_COUNTS = (
    *(
        "requests",
        "prompt_tokens",
        "prefilled_tokens",
        "whole_hits",
        "sampled_tokens",
        "preemptions",
        "loads",
    ),
    *("prefill_steps", "prefill_padding", "decode_steps", "decode_padding"),
)
FIXED_ROWS = 8  # sequences in the one tile of a deterministic engine
_DISPATCH_COST = 24  # what one dispatch costs apart from its tokens, in tokens
_STEPS = 16  # of decoding in one dispatch, at most
_PATIENCE = 4  # steps after which a dispatch is left as soon as a sequence has ended, for others to join
_STOPS = 4  # stop tokens of a sequence that a dispatch knows; what stops only by others is cut afterwards


@dataclass(frozen=True)
class Tiles:
    """The shapes that programs are compiled for. Fewer shapes compile less and pad more."""

    prefill: tuple[tuple[int, int], ...]  # (sequences, new tokens of each, a multiple of page_size)
    decode: tuple[int, ...]  # sequences, rising, up to the number of slots
    pages: tuple[int, ...]  # pages of the longest sequence in the batch, rising, up to the context's

    @classmethod
    def default(cls, slots: int, context: int, page_size: int) -> "Tiles":
        most = -(-context // page_size)
        pages = [p for p in (2**i for i in range(3, 20)) if p < most]
        chunks = ((1, 1), (1, 4), (1, 16), (1, 32), (8, 1), (8, 4))  # in pages
        prefill = [(s, c * page_size) for s, c in chunks if s <= max(slots, 1) and c <= most]
        return cls(tuple(prefill), tuple(sorted({1, -(-slots // 4), slots})), (*pages, most))

    @classmethod
    def fixed(cls, slots: int, context: int, page_size: int) -> "Tiles":
        """One shape, for an engine that is deterministic."""
        rows = min(slots, FIXED_ROWS)
        return cls(((rows, page_size),), (rows,), (-(-context // page_size),))


@dataclass(eq=False)
class _Request:
    future: "Future[Generation]"
    ids: list[int]  # prompt, then what was sampled
    start: int  # length of the prompt
    end: int  # length at which the reply is cut
    sampling: Sampling
    seed: int
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose keys and values are in the pages
    node: Node | None = None  # where its full pages are in the tree; None: they are not to be found there
    entry: Entry | None = None  # the hidden state to sample the next token from


class EmbeddedBackend(Live):
    """A `Backend` that computes in this process.

    Args:
      model: its weights are copied. They are version 0 until `load`.
      slots: most sequences that are decoded at once.
      context: most tokens of a prompt and its reply together.
      page_size: tokens in a page of the KV cache.
      num_pages: pages of the KV cache, page 0 is scratch. By default enough for `slots` full contexts, within
        1 GiB. When they run out, requests wait, and the newest is computed again later if it must.
      seed: draws the seeds of requests that have none, in the order of their arrival.
      dtype: of the matrix products and the cache. float32 is exact, and the faster one on most CPUs.
      tiles: the shapes to compile for.
      deterministic: a request with a seed has the same tokens and log-probs, bit for bit, whatever else the
        engine does and has in its cache; see the module. Slower: each step of decoding computes a page for
        every sequence, so a small `page_size` (4) suits it. Weights that change during a reply are outside of
        this, as the moment of the change is.
    """

    def __init__(
        self,
        model: Llama,
        *,
        slots: int = 32,
        context: int = 1024,
        page_size: int = 16,
        num_pages: int | None = None,
        seed: int = 0,
        dtype: Any = jnp.float32,
        tiles: Tiles | None = None,
        deterministic: bool = False,
    ):
        config = model.config
        if deterministic and tiles is not None:
            raise InputError("a deterministic engine has one shape: it takes no tiles")
        if context > config.context:
            raise InputError(f"context {context} exceeds the model's {config.context} positions")
        if slots < 1 or page_size < 1 or context < 2:
            raise InputError(
                f"slots {slots}, page_size {page_size} and context {context} must be at least 1, 1, 2"
            )
        per_context = -(-context // page_size)
        if num_pages is None:
            per_page = 2 * page_size * jnp.dtype(dtype).itemsize
            per_page *= config.num_hidden_layers * config.num_key_value_heads * config.head_dim
            num_pages = 1 + max(per_context + 1, min(slots * (per_context + 1), _CACHE_CAP // per_page))
        if num_pages < per_context + 2:
            raise InputError(
                f"num_pages {num_pages} can't hold a context of {context} tokens; at least {per_context + 2}"
            )
        self.slots, self.context, self.page_size = slots, context, page_size
        self._version = 0
        self._pushed = False  # whether `load` was ever called
        self._experts = config.routing_width
        self._vocab, self._dtype = config.vocab_size, jnp.dtype(dtype)
        self.deterministic = deterministic
        self._tiles = tiles or (Tiles.fixed if deterministic else Tiles.default)(slots, context, page_size)
        self._graphdef, params = nnx.split(model)
        leaf = jax.tree.leaves(params)[0]
        if isinstance(leaf.sharding, NamedSharding):
            self._everywhere: Any = NamedSharding(leaf.sharding.mesh, PartitionSpec())
        else:
            self._everywhere = SingleDeviceSharding(next(iter(leaf.devices())))
        self._shardings = jax.tree.map(lambda x: x.sharding, params)
        platform = next(iter(leaf.devices())).platform
        self._split = platform == "cpu" and len(leaf.devices()) == 1 and not deterministic
        self._params = self._own(params)
        self._num_hidden = num_hidden = max(1024, 4 * slots) + 1
        self._table = PageTable(num_pages, page_size, num_hidden)
        # Rows of hidden states: those of the table, then one for each slot that decodes.
        rows = (num_hidden + slots, config.hidden_size)
        self._new_state = jax.jit(
            lambda: (
                jax.tree.map(to_bits, init_cache(config, num_pages, page_size, self._dtype)),
                jnp.zeros(rows, jnp.float32),
            ),
            out_shardings=self._everywhere,
        )
        self._state = self._new_state()
        self._poisoned = False  # a NaN was seen: the cache may hold some, and masking does not stop them
        as_shape = functools.partial(
            jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        )
        self._shapes, self._params_shapes = as_shape(self._state), as_shape(self._params)
        self._programs: dict[tuple[Any, ...], Any] = {}
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._waiting: deque[_Request] = deque()
        self._prefilling: list[_Request] = []
        self._ready: list[_Request] = []
        self._decoding: list[_Request] = []
        self._rng = np.random.default_rng(seed)
        self._loaded: tuple[Any, int] | None = None
        self._failure: EngineError | None = None
        self._closing = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="metagym-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # For any thread

    def submit(self, prompt_ids: Sequence[int], sampling: Sampling) -> "Future[Generation]":
        """See `metagym.protocols.Backend`. Raises InputError for an empty prompt, token ids outside the
        vocabulary, and sampling settings without meaning."""
        ids = [int(t) for t in prompt_ids]
        if not ids or min(ids) < 0 or max(ids) >= self._vocab:
            raise InputError(f"a prompt is at least one token id in [0, {self._vocab}); got {ids[:8]}...")
        s = sampling
        known = s.max_tokens >= 1 and 0 <= s.temperature < np.inf and s.top_k >= 0
        if not (known and 0 < s.top_p <= 1 and 0 <= s.min_p <= 1):
            raise InputError(f"sampling settings out of range: {s}")
        future: Future[Generation] = Future()
        with self._wake:
            if self._failure is not None:
                future.set_exception(_again(self._failure))
            elif len(ids) >= self.context:
                future.set_exception(
                    ContextOverflowError(
                        f"{len(ids)} prompt tokens leave no room in a context of {self.context}"
                    )
                )
            else:
                seed = int(self._rng.integers(2**63)) if s.seed is None else s.seed
                end = min(len(ids) + s.max_tokens, self.context)
                self._waiting.append(_Request(future, ids, len(ids), end, s, seed))
                self._counts["requests"] += 1
                self._counts["prompt_tokens"] += len(ids)
                self._wake.notify()
        return future

    def abort(self, future: "Future[Generation]") -> None:
        """Cancels the future; the worker drops its sequence before the next step."""
        future.cancel()

    def load(self, params: Any, version: int) -> None:
        """Copies `params` (an `nnx.State` shaped as the model's) and serves them from the next step on; what
        is submitted afterwards is sampled from them only. The first call may keep the model's version, 0;
        after that, raises InputError unless `version` rises. Raises InputError for weights of another
        structure or shape than the model's."""
        if self._failure is not None:
            raise _again(self._failure)
        if jax.tree.structure(params) != jax.tree.structure(self._params_shapes[0]):
            raise InputError("the weights to load have another structure than the engine's model")
        leaves = jax.tree_util.tree_leaves_with_path(params)
        for (path, x), want in zip(leaves, jax.tree.leaves(self._params_shapes[0]), strict=True):
            if x.shape != want.shape:
                name = jax.tree_util.keystr(path)
                raise InputError(f"the weights to load have {name} of shape {x.shape}, not {want.shape}")
        copied = self._own(params)
        with self._wake:
            if version < self.version or (self._pushed and version == self.version):
                raise InputError(f"weight versions must rise: {version} after {self.version}")
            self._loaded, self._pushed = (copied, version), True
            self._wake.notify()

    @property
    def version(self) -> int:
        """Of the weights that serve what is submitted now."""
        return (self._loaded or (None, self._version))[1]

    def stats(self) -> dict[str, float]:
        """Counts since the start, and the present state.

        requests, prompt_tokens, prefilled_tokens (computed; the rest came from the cache), whole_hits
        (prompts without a forward pass), prefill_steps, decode_steps, prefill_padding and decode_padding
        (tokens computed for nothing), sampled_tokens, preemptions, evictions, loads, compilations, running,
        waiting, pages_free, pages, version.
        """
        with self._wake:
            return {
                **self._counts,
                "evictions": self._table.evictions,
                "compilations": len(self._programs),
                "running": len(self._prefilling) + len(self._ready) + len(self._decoding),
                "waiting": len(self._waiting),
                "pages_free": len(self._table.free),
                "pages": len(self._table.refs) - 1,
                "version": self.version,
            }

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.close)

    def warm_up(self) -> None:
        """Compiles every program now rather than when it is first needed."""
        for width in self._tiles.pages:
            tiles = set(self._tiles.prefill)
            if self.deterministic:
                tiles |= {(s, self.page_size) for s in self._tiles.decode}
            else:
                for s in self._tiles.decode:
                    self._compile("decode", self._decode_inputs([], s, width, 1))
            for s, c in tiles:
                self._compile("extend", self._extend_inputs([], s, c, width))
            if self._experts:
                self._compile("routing", (np.zeros(width, np.int32),))
        for s in self._tiles.decode:
            self._compile("sample", self._sample_inputs([], s, []))
        self._compile("copy", self._copy_inputs([]))

    # The worker

    def _work(self) -> None:
        try:
            while self._take_orders():
                self._step()
        except BaseException as e:  # whatever it is, nobody may wait for ever
            self._fail(EngineError(f"the embedded engine crashed: {type(e).__name__}: {e}"), e)
        else:
            self._fail(EngineError("the embedded engine was closed"), None)

    def _take_orders(self) -> bool:
        """Waits until there is something to do; False: close. Takes new weights."""
        with self._wake:
            while not (self._closing or self._loaded or self._waiting or self._running()):
                self._wake.wait()
            loaded, self._loaded = self._loaded, None
            if loaded is not None:
                self._params, self._version = loaded
            if self._closing:
                return False
        if loaded is not None:
            self._counts["loads"] += 1
            self._table.clear()
            stale = [*self._prefilling, *self._ready]
            if self._poisoned:
                stale, self._decoding = [*self._decoding, *stale], []
                self._state, self._poisoned = self._new_state(), False
            self._restart(stale)
            for request in self._decoding:
                request.node = None
        return True

    def _running(self) -> list[_Request]:
        return [*self._prefilling, *self._ready, *self._decoding]

    def _step(self) -> None:
        self._drop_cancelled()
        self._admit()
        if self._prefilling:
            progress = self._prefill()
            if not progress and not self._ready and not self._decoding:
                self._preempt(self._prefilling[-1])
            if progress and self._prefilling:
                return  # full batches first: what arrived meanwhile joins
        if self._ready:
            self._sample_first()
        if self._decoding:
            self._decode()

    def _drop_cancelled(self) -> None:
        for group in (self._prefilling, self._ready, self._decoding):
            for request in [r for r in group if r.future.cancelled()]:
                group.remove(request)
                self._release(request)

    def _admit(self) -> None:
        running = self._running()
        need = sum(max(0, self._pages_for(r) - len(r.pages)) for r in running)
        held = len(set().union(*(r.pages for r in running)))
        while len(running) < self.slots:
            with self._wake:
                if not self._waiting:
                    return
                request = self._waiting.popleft()
                if request.future.cancelled():
                    continue
                need += self._pages_for(request)
                if running and held + need > len(self._table.refs) - 1:
                    self._waiting.appendleft(request)
                    return
            request.node = self._table.root
            running.append(request)
            self._prefilling.append(request)

    def _pages_for(self, request: _Request) -> int:
        """Pages for what it has and its next token."""
        return -(-(len(request.ids) + 1) // self.page_size)

    def _prefill(self) -> bool:
        """One dispatch. False: nothing could be done."""
        rows, claimed, progress = [], set(), False
        for r in list(self._prefilling):
            if self._use_cache(r):
                progress = True
                continue
            key = (r.node, tuple(r.ids[r.computed : r.computed + self.page_size]))
            if key not in claimed:  # else another one is computing the same page
                claimed.add(key)
                rows.append(r)
        if not rows:
            return progress
        left = [len(r.ids) - r.computed for r in rows]

        def worth(tile: tuple[int, int]) -> float:
            s, c = tile
            return sum(min(c, n) for n in left[:s]) / (_DISPATCH_COST + s * c)

        s, c = max(self._tiles.prefill, key=worth)
        batch = [r for r in rows[:s] if self._make_room(r, min(len(r.ids), r.computed + c))]
        if not batch:
            return progress
        self._dispatch("extend", self._extend_inputs(batch, s, c, self._width(batch)))
        self._counts["prefill_steps"] += 1
        self._counts["prefill_padding"] += s * c
        for r in batch:
            old, r.computed = r.computed, min(len(r.ids), r.computed + c)
            self._counts["prefilled_tokens"] += r.computed - old
            self._counts["prefill_padding"] -= r.computed - old
            for page in range(old // self.page_size, r.computed // self.page_size):
                self._publish(r, page)
            if r.computed == len(r.ids):
                self._prefilling.remove(r)
                self._ready.append(r)
        return True

    def _use_cache(self, r: _Request) -> bool:
        """Takes what the cache has by now of a prompt. True if that is all of it, with the hidden state."""
        entry = self._table.whole(r.ids)
        if entry is not None:
            self._table.hold(entry.pages)
            self._table.drop(r.pages)
            r.pages, r.computed, r.entry = list(entry.pages), len(r.ids), entry
            r.node, held = self._table.follow(self._table.root, r.ids, 0, len(r.ids))
            self._table.drop(held)
            if len(held) < len(r.ids) // self.page_size:
                r.node = None  # its pages are no longer in the tree
            entry.pins += 1
            self._counts["whole_hits"] += 1
            self._prefilling.remove(r)
            self._ready.append(r)
            return True
        if r.node is not None and r.computed % self.page_size == 0:
            # The last token is always computed, for its hidden state.
            r.node, pages = self._table.follow(r.node, r.ids, r.computed, len(r.ids) - 1)
            r.pages += pages
            r.computed += len(pages) * self.page_size
        return False

    def _make_room(self, r: _Request, length: int) -> bool:
        """Pages for `length` tokens, and a hidden row if the prompt ends there. Takes nothing if not all."""
        new: list[int] = []
        while len(r.pages) + len(new) < -(-length // self.page_size):
            page = self._table.alloc()
            if page is None:
                self._table.drop(new)
                return False
            new.append(page)
        if length == len(r.ids):
            row = self._table.alloc_hidden()
            if row is None:
                self._table.drop(new)
                return False
            r.entry = self._table.add_whole(r.ids, [*r.pages, *new], row)
            r.entry.pins += 1
        r.pages += new
        return True

    def _publish(self, r: _Request, page: int) -> None:
        """Makes a page that has become full findable."""
        if r.node is not None:
            tokens = r.ids[page * self.page_size : (page + 1) * self.page_size]
            r.node = self._table.insert(r.node, tokens, r.pages[page])

    def _sample_first(self) -> None:
        batch, self._ready = self._ready, []
        self._decoding += batch
        rows = [r.entry.hidden for r in batch if r.entry is not None]
        for r in batch:
            self._unpin(r)
        self._sample(batch, rows)

    def _decode(self) -> None:
        copies: list[tuple[int, int]] = []
        for r in list(self._decoding):
            if r in self._decoding:  # else it was preempted
                self._make_writable(r, copies)
        if copies:
            self._dispatch("copy", self._copy_inputs(copies))
        if not self._decoding:
            return
        if self.deterministic:
            self._decode_tile()
            return
        steps = self._look_ahead()
        for _, part, s in self._parts(list(self._decoding)):
            out = self._dispatch("decode", self._decode_inputs(part, s, self._width(part), steps))
            tokens, logprobs, done = out
            self._counts["decode_steps"] += int(done)
            self._counts["decode_padding"] += int(done) * s
            for r, *sampled in zip(part, tokens[:done].T.tolist(), logprobs[:done].T.tolist(), strict=False):
                for token, logprob in zip(*sampled, strict=True):
                    self._counts["decode_padding"] -= 1
                    self._advance(r)
                    if self._accept(r, token, logprob):
                        break

    def _look_ahead(self) -> int:
        """Gives the sequences pages for several steps, if there are, and returns for how many."""
        steps = min(_STEPS, max(r.end - len(r.ids) for r in self._decoding))
        for r in self._decoding:
            wanted = r.computed + min(steps, r.end - len(r.ids))
            while len(r.pages) * self.page_size < wanted:
                page = self._table.alloc()
                if page is None:
                    steps = len(r.pages) * self.page_size - r.computed
                    break
                r.pages.append(page)
        return steps

    def _decode_tile(self) -> None:
        """One step: every sequence computes the page it is in anew, then samples."""
        batch = list(self._decoding)
        for first, part, s in self._parts(batch):
            inputs = self._extend_inputs(part, s, self.page_size, self._width(part), slot=first)
            self._dispatch("extend", inputs)
            self._counts["decode_steps"] += 1
            self._counts["decode_padding"] += s * self.page_size - len(part)
        for r in batch:
            self._advance(r)
        self._sample(batch, range(self._num_hidden, self._num_hidden + len(batch)))

    def _advance(self, r: _Request) -> None:
        """The last token's key and value are in its page."""
        r.computed += 1
        if r.computed % self.page_size == 0:
            self._publish(r, r.computed // self.page_size - 1)

    def _sample(self, batch: Sequence[_Request], rows: Sequence[int]) -> None:
        """Samples the next token of each from its row of the hidden states."""
        for first, part, s in self._parts(batch):
            inputs = self._sample_inputs(part, s, rows[first : first + s])
            tokens, logprobs = self._dispatch("sample", inputs)
            for r, token, logprob in zip(part, tokens, logprobs, strict=False):
                self._accept(r, int(token), float(logprob))

    def _make_writable(self, r: _Request, copies: list[tuple[int, int]]) -> None:
        """A page of its own for the last token's key and value; if need be at the newest sequence's cost."""
        last = r.computed // self.page_size
        if last < len(r.pages) and self._table.refs[r.pages[last]] == 1:
            return
        while (page := self._table.alloc()) is None:
            newest = self._decoding[-1]
            self._preempt(newest)
            if newest is r:
                return
        if last < len(r.pages):
            copies.append((r.pages[last], page))
            self._table.drop([r.pages[last]])
            r.pages[last] = page
        else:
            r.pages.append(page)

    def _accept(self, r: _Request, token: int, logprob: float) -> bool:
        """Appends a token. True: the sequence has ended."""
        sane = bool(np.isfinite(logprob))
        r.ids.append(token)
        r.logprobs.append(logprob)
        r.versions.append(self._version)
        self._counts["sampled_tokens"] += 1
        stopped = token in r.sampling.stop_token_ids
        if sane and not stopped and len(r.ids) < r.end:
            return False
        self._decoding.remove(r)
        routing = self._routing(r)
        self._release(r)
        self._poisoned |= not sane
        if not r.future.set_running_or_notify_cancel():
            return True
        if not sane:
            what = f"log-prob {logprob} of token {len(r.logprobs) - 1}"
            r.future.set_exception(EngineError(f"{what}: version {self._version} of the weights is broken"))
            return True
        generation = Generation(
            np.asarray(r.ids[r.start :], np.int32),
            np.asarray(r.logprobs, np.float32),
            np.asarray(r.versions, np.int32),
            "stop" if stopped else "length",
            routing[r.start :],
            routing[: r.start],
        )
        r.future.set_result(generation)
        return True

    def _routing(self, r: _Request) -> np.ndarray:
        """i32 [T, R]: the experts that reading each token took, -1 for the last one."""
        found = np.full((len(r.ids), self._experts), -1, np.int32)
        if self._experts:
            pages = np.zeros(self._width([r]), np.int32)
            pages[: len(r.pages)] = r.pages
            read = np.moveaxis(self._dispatch("routing", (pages,)), 0, 2)  # [width, page_size, N, k]
            found[:-1] = read.reshape(-1, self._experts)[: len(r.ids) - 1]
        return found

    def _release(self, r: _Request) -> None:
        self._table.drop(r.pages)
        self._unpin(r)
        r.pages, r.computed, r.node = [], 0, None

    def _unpin(self, r: _Request) -> None:
        if r.entry is not None:
            r.entry.pins -= 1
            r.entry = None

    def _preempt(self, r: _Request) -> None:
        """Gives its pages to others; it waits in front and is computed again."""
        for group in (self._prefilling, self._decoding):
            if r in group:
                group.remove(r)
        self._release(r)
        self._counts["preemptions"] += 1
        with self._wake:
            self._waiting.appendleft(r)

    def _restart(self, requests: list[_Request]) -> None:
        for r in requests:
            self._release(r)
            r.node = self._table.root
        self._prefilling, self._ready = requests, []

    def _fail(self, failure: EngineError, cause: BaseException | None) -> None:
        failure.__cause__ = cause
        with self._wake:
            self._failure = failure
            orphans = [*self._running(), *self._waiting]
            self._waiting.clear()
            self._prefilling, self._ready, self._decoding = [], [], []
        self._params = self._state = self._loaded = None
        for r in orphans:
            if r.future.set_running_or_notify_cancel():
                r.future.set_exception(_again(failure))

    # Shapes and programs

    def _parts(self, batch: Sequence[_Request]) -> Iterator[tuple[int, Sequence[_Request], int]]:
        """(index of the first, sequences, rows of their tile): the batch in parts that fit the widest
        tile."""
        most = self._tiles.decode[-1]
        for first in range(0, len(batch), most):
            part = batch[first : first + most]
            yield first, part, next(s for s in self._tiles.decode if s >= len(part))

    def _width(self, batch: Sequence[_Request]) -> int:
        most = max(len(r.pages) for r in batch)
        return next(w for w in self._tiles.pages if w >= most)

    def _extend_inputs(
        self, batch: Sequence[_Request], s: int, c: int, width: int, slot: int | None = None
    ) -> tuple[Any, ...]:
        """What `_extend` takes. `slot`: they decode, and the first one's hidden state goes to this slot."""
        tokens, positions = np.zeros((s, c), np.int32), np.full((s, c), -1, np.int32)
        pages, last, to = np.zeros((s, width), np.int32), np.zeros(s, np.int32), np.zeros(s, np.int32)
        for row, r in enumerate(batch):
            start = r.computed - (r.computed % c if self.deterministic else 0)
            n = min(c, len(r.ids) - start)
            tokens[row, :n] = r.ids[start : start + n]
            positions[row, :n] = np.arange(start, start + n)
            pages[row, : len(r.pages)] = r.pages
            last[row] = n - 1
            if r.entry is not None:  # the prompt ends here
                to[row] = r.entry.hidden
            elif slot is not None:
                to[row] = self._num_hidden + slot + row
        return tokens, positions, pages, last, to

    def _decode_inputs(self, batch: Sequence[_Request], s: int, width: int, steps: int) -> tuple[Any, ...]:
        """What `_decode` takes."""
        tokens, positions = np.zeros(s, np.int32), np.full(s, -1, np.int32)
        pages, left = np.zeros((s, width), np.int32), np.zeros(s, np.int32)
        stop = np.full((s, _STOPS), -1, np.int32)
        for row, r in enumerate(batch):
            tokens[row], positions[row], left[row] = r.ids[-1], r.computed, r.end - len(r.ids)
            pages[row, : len(r.pages)] = r.pages
            known = r.sampling.stop_token_ids[:_STOPS]
            stop[row, : len(known)] = known
        limits = Limits(np.asarray(steps, np.int32), np.asarray(_PATIENCE, np.int32), left, stop)
        return tokens, positions, pages, limits, self._rows(batch, s)

    def _sample_inputs(self, batch: Sequence[_Request], s: int, rows: Sequence[int]) -> tuple[Any, ...]:
        where = np.zeros(s, np.int32)
        where[: len(batch)] = rows
        return where, self._rows(batch, s)

    def _rows(self, batch: Sequence[_Request], s: int) -> Rows:
        how = Rows(
            seed=np.zeros((s, 2), np.uint32),
            step=np.zeros(s, np.int32),
            temperature=np.zeros(s, np.float32),
            top_p=np.ones(s, np.float32),
            top_k=np.zeros(s, np.int32),
            min_p=np.zeros(s, np.float32),
        )
        for i, r in enumerate(batch):
            how.seed[i] = r.seed & 0xFFFFFFFF, (r.seed >> 32) & 0xFFFFFFFF
            how.step[i] = len(r.ids) - r.start
            how.temperature[i], how.top_p[i] = r.sampling.temperature, r.sampling.top_p
            how.top_k[i], how.min_p[i] = r.sampling.top_k, r.sampling.min_p
        return how

    def _copy_inputs(self, copies: Sequence[tuple[int, int]]) -> tuple[Any, ...]:
        pairs = np.zeros((2, self.slots), np.int32)  # the rest copies the scratch page to itself
        for column, pair in enumerate(copies):
            pairs[:, column] = pair
        return (pairs,)

    def _dispatch(self, kind: str, inputs: tuple[Any, ...]) -> Any:
        """Runs a program on the engine's state. Returns what it samples, on the host."""
        program = self._compile(kind, inputs)
        self._state, out = program(self._params, self._state, *jax.device_put(inputs, self._everywhere))
        return jax.device_get(out)

    def _compile(self, kind: str, inputs: tuple[Any, ...]) -> Any:
        key = (kind, *(x.shape for x in jax.tree.leaves(inputs)))
        if key not in self._programs:
            shape = functools.partial(jax.ShapeDtypeStruct, sharding=self._everywhere)
            args = jax.tree.map(lambda x: shape(x.shape, x.dtype), (self._shapes, *inputs))
            leaves, tree = jax.tree.flatten((self._params_shapes, *args))
            self._programs[key] = _compiled(kind, self._graphdef, self._dtype, tree, tuple(leaves))
        return self._programs[key]

    def _own(self, params: Any) -> Any:
        """A copy of `params` laid out as the engine's, matrices in its dtype (bf16 as bits, see `to_bits`),
        and one as `decode` wants it, or None. Norms and the embedding stay as they are: they are not operands
        of matrix products only."""

        def own(path: Any, x: jax.Array, sharding: Any) -> jax.Array:
            y = jax.device_put(x, sharding, may_alias=False)
            keep = any(word in str(path[-2:]) for word in ("norm", "embed"))
            return y if keep or y.dtype == self._dtype else to_bits(y.astype(self._dtype))

        params = jax.block_until_ready(jax.tree_util.tree_map_with_path(own, params, self._shardings))
        return params, jax.block_until_ready(
            _split(self._graphdef, self._dtype, params)
        ) if self._split else None


@functools.partial(jax.jit, static_argnums=(0, 1))
def _split(graphdef: Any, dtype: Any, params: Any) -> Split:
    return split(cast(Llama, nnx.merge(graphdef, jax.tree.map(from_bits, params))), dtype)


def _again(failure: EngineError) -> EngineError:
    """The same error for another caller: one that several threads raise would mix up their tracebacks."""
    error = EngineError(str(failure))
    error.__cause__ = failure.__cause__
    return error


@functools.lru_cache(maxsize=512)
def _compiled(kind: str, graphdef: Any, dtype: Any, tree: Any, shapes: tuple[Any, ...]) -> Any:
    """A program for arguments of these shapes; engines of one model share it."""
    params, state, *inputs = jax.tree.unflatten(tree, shapes)
    layout = (jax.tree.map(lambda x: x.sharding, state), jax.tree.leaves(inputs)[0].sharding)

    def function(weights: Any, state: Any, *inputs: Any) -> Any:
        state, sampled = _PROGRAMS[kind](graphdef, dtype, *jax.tree.map(from_bits, (weights, state)), *inputs)
        return jax.tree.map(to_bits, state), sampled

    return jax.jit(function, donate_argnums=1, out_shardings=layout).lower(params, state, *inputs).compile()


# Programs: (weights from `_own`, (cache, hidden rows), inputs) -> ((cache, hidden rows), what is sampled)


def _extend(graphdef, dtype, weights, state, tokens, positions, pages, last, to):
    """Reads tokens `[S, C]`; hidden row `to[s]` becomes that of token `last[s]` of sequence s."""
    model, (cache, rows) = cast(Llama, nnx.merge(graphdef, weights[0])), state
    hidden, cache = model.extend(cache, tokens, positions, pages, compute_dtype=dtype)
    ends = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    return (cache, rows.at[to].set(ends)), ()


def _sample(graphdef, dtype, weights, state, where, how):
    """Samples from the hidden states in rows `where`."""
    params, fast = weights
    hidden = state[1][where]
    if fast is not None:
        return state, sample(few_rows(hidden, fast.head, dtype), how)
    model = cast(Llama, nnx.merge(graphdef, params))
    return state, sample(model.logits(hidden, compute_dtype=dtype), how)


def _decode(graphdef, dtype, weights, state, tokens, positions, pages, limits, how):
    """Samples up to `_STEPS` tokens of each sequence; see `metagym.models.decode`."""
    (params, fast), (cache, rows) = weights, state
    model = cast(Llama, nnx.merge(graphdef, params))
    wide = None
    if fast is not None:  # a CPU
        held = 2 * cache.k.shape[0] * pages.size * math.prod(cache.k.shape[2:])
        wide = jnp.float32 if 4 * held <= _CACHE_CAP else None
    fast = split(model, dtype) if fast is None else fast

    def draw(logits: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        return sample(logits, how._replace(step=how.step + step))

    types = {"most": _STEPS, "compute_dtype": dtype, "context_dtype": wide}
    *sampled, cache = decode(model, fast, cache, tokens, positions, pages, limits, draw, **types)
    return (cache, rows), tuple(sampled)


def _copy(graphdef, dtype, weights, state, pairs):
    """Copies pages `pairs[0]` to pages `pairs[1]`."""
    cache, rows = state
    cache = jax.tree.map(to_bits, cache)
    cache = jax.tree.map(lambda x: from_bits(x.at[:, pairs[1]].set(x[:, pairs[0]])), cache)
    return (cache, rows), ()


def _routes(graphdef, dtype, weights, state, pages):
    """The experts recorded in `pages` `[P]`: i32 `[N, P, page_size, k]`."""
    return state, state[0].routing[:, pages]


_PROGRAMS = {"extend": _extend, "sample": _sample, "decode": _decode, "copy": _copy, "routing": _routes}

"""Who owns which page of the KV cache: reference counts, a radix tree of full pages, and whole prompts.

Pure bookkeeping on page numbers; what is in the pages is the engine's business. A page is held by every
sequence that reads it, by the tree if its tokens can be found there, and by each whole prompt that needs it.
Page 0 and hidden row 0 are scratch and belong to nobody.
"""

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Node:
    """A full page in the tree: its tokens follow those of its parent."""

    parent: "Node | None"
    key: tuple[int, ...]
    page: int
    used: int = 0
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)
    alive: bool = True


@dataclass(eq=False)
class Entry:
    """A whole prompt: its pages, the last one perhaps partly filled, and where its last hidden state is."""

    pages: tuple[int, ...]
    hidden: int
    used: int = 0
    pins: int = 0  # how many sequences still have to sample from the hidden state


class PageTable:
    """Allocates `num_pages - 1` pages of `page_size` tokens, and `num_hidden - 1` rows for hidden states.

    What nobody reads is kept for reuse and given up in the order of last use, when a page or row is needed.
    """

    def __init__(self, num_pages: int, page_size: int, num_hidden: int):
        self.page_size = page_size
        self.refs = [0] * num_pages
        self.free = list(range(num_pages - 1, 0, -1))
        self.free_hidden = list(range(num_hidden - 1, 0, -1))
        self.root = Node(None, (), 0)
        self.entries: OrderedDict[tuple[int, ...], Entry] = OrderedDict()
        self.nodes: set[Node] = set()
        self.evictions = 0
        self._clock = itertools.count(1)

    def alloc(self) -> int | None:
        """A page with one reference, or None if every page is being read."""
        while not self.free:
            if not self._evict():
                return None
        page = self.free.pop()
        self.refs[page] = 1
        return page

    def hold(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.refs[page] += 1

    def drop(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.refs[page] -= 1
            assert self.refs[page] >= 0, f"page {page} was given back twice"
            if self.refs[page] == 0:
                self.free.append(page)

    def follow(self, node: Node, tokens: Sequence[int], start: int, stop: int) -> tuple[Node, list[int]]:
        """Goes down from `node` along the full pages of `tokens[start:stop]`; holds and returns them."""
        pages: list[int] = []
        while start + self.page_size <= stop:
            child = node.children.get(tuple(tokens[start : start + self.page_size]))
            if child is None:
                break
            node, start = child, start + self.page_size
            node.used = next(self._clock)
            pages.append(node.page)
        self.hold(pages)
        return node, pages

    def insert(self, node: Node, tokens: Sequence[int], page: int) -> Node:
        """Makes a full page findable below `node`, unless the same tokens are there already. A node that was
        given up meanwhile takes no children: what would hang below it could not be found."""
        key = tuple(tokens)
        if not node.alive:
            return node
        if key not in node.children:
            child = Node(node, key, page, next(self._clock))
            node.children[key] = child
            self.nodes.add(child)
            self.hold([page])
        return node.children[key]

    def whole(self, tokens: Sequence[int]) -> Entry | None:
        """The entry of exactly this prompt."""
        entry = self.entries.get(tuple(tokens))
        if entry is not None:
            self.entries.move_to_end(tuple(tokens))
            entry.used = next(self._clock)
        return entry

    def add_whole(self, tokens: Sequence[int], pages: Sequence[int], hidden: int) -> Entry:
        """Keeps a whole prompt, whose hidden row (from `alloc_hidden`) it owns."""
        key = tuple(tokens)
        assert key not in self.entries, "the prompt is here already"
        self.hold(pages)
        entry = self.entries[key] = Entry(tuple(pages), hidden, next(self._clock))
        return entry

    def alloc_hidden(self) -> int | None:
        """A row for a hidden state, or None if each one has yet to be sampled from."""
        if not self.free_hidden and not self._evict_entry():
            return None
        return self.free_hidden.pop()

    def clear(self) -> None:
        """Forgets what can be found (the weights changed). Pages that sequences hold stay theirs."""
        for entry in self.entries.values():
            self._forget(entry)
        self.entries.clear()
        for node in self.nodes:
            node.alive = False
            self.drop([node.page])
        self.nodes.clear()
        self.root.alive = False
        self.root = Node(None, (), 0)

    def _forget(self, entry: Entry) -> None:
        self.drop(entry.pages)
        self.free_hidden.append(entry.hidden)

    def _oldest_entry(self) -> tuple[tuple[int, ...], Entry] | None:
        return next(((k, e) for k, e in self.entries.items() if not e.pins), None)

    def _evict_entry(self) -> bool:
        if (oldest := self._oldest_entry()) is None:
            return False
        del self.entries[oldest[0]]
        self._forget(oldest[1])
        self.evictions += 1
        return True

    def _evict(self) -> bool:
        """Gives up the entry or the leaf used longest ago. It may free no page: call until one is free."""
        leaves = (n for n in self.nodes if not n.children and self.refs[n.page] == 1)
        leaf = min(leaves, key=lambda n: n.used, default=None)
        oldest = self._oldest_entry()
        if leaf is None or (oldest is not None and oldest[1].used < leaf.used):
            return self._evict_entry()
        assert leaf.parent is not None
        del leaf.parent.children[leaf.key]
        leaf.alive = False
        self.nodes.discard(leaf)
        self.drop([leaf.page])
        self.evictions += 1
        return True

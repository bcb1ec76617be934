"""Bookkeeping of pages: every page is free or held, never both, whatever happens in whatever order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from metagym.proxy.backends.pages import PageTable

SIZE = 2


def fill(table, tokens):
    """What a sequence does that reads `tokens`: (its pages, its node)."""
    node, pages = table.follow(table.root, tokens, 0, len(tokens) - 1)
    while len(pages) * SIZE < len(tokens):
        page = table.alloc()
        if page is None:
            table.drop(pages)
            return None, node
        pages.append(page)
        done = len(pages) * SIZE
        if done <= len(tokens):
            node = table.insert(node, tokens[done - SIZE : done], page)
    return pages, node


def test_a_prefix_is_found_page_by_page():
    table = PageTable(20, SIZE, 4)
    first, _ = fill(table, [1, 2, 3, 4, 5])
    assert first == [1, 2, 3]
    second, _ = fill(table, [1, 2, 3, 4, 6])
    assert second[:2] == first[:2]
    assert second[2] not in first
    assert fill(table, [1, 2, 3, 4])[0][:1] == [1], "the last token is not taken from the cache"
    assert table.refs[1] == 4
    assert table.follow(table.root, [9, 9], 0, 2)[1] == []


def test_the_longest_unused_goes_first():
    table = PageTable(4, SIZE, 4)
    for tokens in ([1, 1, 9], [2, 2, 9]):
        pages, _ = fill(table, tokens)
        table.drop(pages)
    table.drop(table.follow(table.root, [1, 1], 0, 2)[1])  # used again
    pages, _ = fill(table, [3, 3, 9])
    assert len(pages) == 2
    assert [n.key for n in table.nodes] == [(1, 1), (3, 3)] or {n.key for n in table.nodes} == {
        (1, 1),
        (3, 3),
    }
    assert table.evictions == 1


def test_a_whole_prompt_keeps_its_pages():
    table = PageTable(5, SIZE, 3)
    pages, _ = fill(table, [1, 2, 3])
    entry = table.add_whole([1, 2, 3], pages, table.alloc_hidden())
    table.drop(pages)
    assert table.whole([1, 2, 3]) is entry
    assert table.whole([1, 2]) is None
    assert table.alloc_hidden() is not None
    assert table.alloc_hidden() is not None, "the entry gives up its row"
    assert table.whole([1, 2, 3]) is None
    assert table.alloc_hidden() is None


def test_a_pinned_entry_is_not_given_up():
    table = PageTable(3, SIZE, 2)
    pages, _ = fill(table, [1, 2, 3])
    entry = table.add_whole([1, 2, 3], pages, table.alloc_hidden())
    table.drop(pages)
    entry.pins = 1
    assert table.alloc() is None
    assert table.alloc_hidden() is None
    entry.pins = 0
    assert table.alloc() is not None


def test_giving_back_twice_is_noticed():
    table = PageTable(3, SIZE, 2)
    page = table.alloc()
    table.drop([page])
    with pytest.raises(AssertionError, match="given back twice"):
        table.drop([page])


def test_clear_leaves_sequences_their_pages_and_takes_no_children_below_the_past():
    table = PageTable(9, SIZE, 3)
    pages, node = fill(table, [1, 2, 3, 4, 5])
    table.clear()
    assert table.follow(table.root, [1, 2], 0, 2)[1] == []
    assert table.insert(node, [5, 6], pages[2]) is node
    assert [table.refs[p] for p in pages] == [1, 1, 1]
    table.drop(pages)
    assert sorted(table.free) == list(range(1, 9))


class Life(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.table = PageTable(12, SIZE, 4)
        self.sequences = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), keep=st.booleans())
    def begin(self, tokens, keep):
        pages, _ = fill(self.table, tokens)
        if pages is None:
            return
        self.sequences.append(pages)
        if keep and self.table.whole(tokens) is None and (row := self.table.alloc_hidden()) is not None:
            self.table.add_whole(tokens, pages, row)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99))
    def end(self, which):
        self.table.drop(self.sequences.pop(which % len(self.sequences)))

    @rule()
    def clear(self):
        self.table.clear()

    @invariant()
    def counts_add_up(self):
        t = self.table
        held = [p for s in self.sequences for p in s]
        held += [n.page for n in t.nodes] + [p for e in t.entries.values() for p in e.pages]
        assert [held.count(p) for p in range(1, 12)] == t.refs[1:]
        assert sorted(t.free) == [p for p in range(1, 12) if not t.refs[p]]
        rows = [*t.free_hidden, *(e.hidden for e in t.entries.values())]
        assert sorted(rows) == [1, 2, 3]
        reachable, stack = set(), [t.root]
        while stack:
            for child in stack.pop().children.values():
                reachable.add(child)
                stack.append(child)
        assert reachable == t.nodes


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)

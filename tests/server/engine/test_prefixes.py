"""The prefix cache: common prefixes, replacement and eviction."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from greenroom.server.engine.prefixes import (
    MIN_TOKENS,
    PrefixCache,
    PrefixEntry,
    as_ids,
    common_prefix,
)


def prefix_entry(ids: list[int], nbytes: int = 10, exact: int = 0) -> PrefixEntry:
    return PrefixEntry(as_ids(ids), object(), nbytes, exact)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_the_common_prefix_is_the_longest(a: list[int], b: list[int]) -> None:
    n = common_prefix(as_ids(a), as_ids(b))
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


def test_the_least_recently_used_entry_is_evicted_first() -> None:
    store = PrefixCache(30)
    entries = [prefix_entry([i] * MIN_TOKENS) for i in range(3)]
    assert all(store.add(each) for each in entries)
    store.touch(entries[0])
    store.add(prefix_entry([9] * MIN_TOKENS))
    assert [int(each.ids[0]) for each in store] == [2, 0, 9]
    assert (store.nbytes, store.evicted) == (30, 1)
    store.shrink(10)
    assert [int(each.ids[0]) for each in store] == [9]


def test_a_longer_entry_replaces_its_prefix() -> None:
    store = PrefixCache(100)
    short, long = prefix_entry([1] * MIN_TOKENS), prefix_entry([1] * MIN_TOKENS + [2])
    store.add(short)
    assert store.add(long)
    assert list(store) == [long]
    assert not store.add(prefix_entry([1] * MIN_TOKENS))  # it is there
    assert store.add(
        prefix_entry([1] * MIN_TOKENS, exact=MIN_TOKENS)
    )  # but not as a request alone would read it
    assert store.evicted == 0


def test_short_and_large_entries_are_refused() -> None:
    store = PrefixCache(100)
    assert not store.add(prefix_entry([1] * (MIN_TOKENS - 1)))
    assert not store.add(prefix_entry([1] * MIN_TOKENS, nbytes=101))
    assert not PrefixCache(0).add(prefix_entry([1] * MIN_TOKENS, nbytes=1))
    assert len(store) == store.nbytes == 0


def test_a_popped_entry_is_removed() -> None:
    store = PrefixCache(100)
    entry = prefix_entry([1] * MIN_TOKENS)
    store.add(entry)
    assert store.pop(entry) is entry.cache
    assert len(store) == store.nbytes == 0


class Machine(RuleBasedStateMachine):
    """Against a list, used longest ago first."""

    def __init__(self) -> None:
        super().__init__()
        self.store, self.model = PrefixCache(100), list[PrefixEntry]()

    @rule(tail=st.lists(st.integers(0, 1), max_size=4), nbytes=st.integers(1, 120))
    def keep(self, tail: list[int], nbytes: int) -> None:
        entry = prefix_entry([7] * MIN_TOKENS + tail, nbytes)
        done = self.store.add(entry)
        ids = entry.ids.tolist()
        same = [each for each in self.model if each.ids.tolist()[: len(ids)] == ids]
        if nbytes > 100:
            assert not done
        elif same:
            assert not done
            self._last_used(same[0])
        else:
            assert done
            self.model = [e for e in self.model if ids[: e.ids.size] != e.ids.tolist()]
            while sum(each.nbytes for each in self.model) > 100 - nbytes:
                self.model.pop(0)
            self.model.append(entry)

    def _last_used(self, entry: PrefixEntry) -> None:
        self.model = [each for each in self.model if each is not entry] + [entry]

    @rule(which=st.integers(0, 9))
    def use(self, which: int) -> None:
        if which < len(self.model):
            self.store.touch(self.model[which])
            self._last_used(self.model[which])

    @rule(which=st.integers(0, 9))
    def take(self, which: int) -> None:
        if which < len(self.model):
            entry = self.model.pop(which)
            assert self.store.pop(entry) is entry.cache

    @rule(nbytes=st.integers(-5, 100))
    def shrink(self, nbytes: int) -> None:
        self.store.shrink(nbytes)
        while self.model and sum(each.nbytes for each in self.model) > max(0, nbytes):
            self.model.pop(0)

    @invariant()
    def the_same(self) -> None:
        assert [id(each) for each in self.store] == [id(each) for each in self.model]
        assert self.store.nbytes == sum(each.nbytes for each in self.model) <= 100


TestMachine = Machine.TestCase

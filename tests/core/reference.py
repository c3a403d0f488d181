"""A slow, simple cache: the compiled cache must give the same results."""

from __future__ import annotations


class ReferenceCache:
    """A cache with one set of residents a group; `policy` is lru, fifo or lfu."""

    def __init__(self, offsets: list[int], sizes: list[int], policy: str) -> None:
        self.offsets, self.sizes, self.policy = offsets, sizes, policy
        self.residents: list[set[int]] = [set() for _ in sizes]
        self.used: dict[int, int] = {}
        self.brought: dict[int, int] = {}
        self.count: dict[int, int] = {}
        self.time = 0

    def group(self, piece: int) -> int:
        if len(self.sizes) == 1:
            return 0
        return next(i for i, end in enumerate(self.offsets[1:]) if piece < end)

    def key(self, piece: int) -> tuple[int, int]:
        return {
            "lru": (0, self.used.get(piece, 0)),
            "fifo": (0, self.brought.get(piece, 0)),
            "lfu": (self.count.get(piece, 0), self.used.get(piece, 0)),
        }[self.policy]

    def step(self, pieces: list[int], pin: bool = True) -> list[tuple[bool, int]]:
        """(hit, evicted piece or -1) of each request."""
        results = []
        for piece in pieces:
            self.time += 1
            group = self.group(piece)
            residents, evicted = self.residents[group], -1
            hit = piece in residents
            if not hit:
                if len(residents) == self.sizes[group]:
                    protected = set(pieces) if pin and len(pieces) <= self.sizes[group] else set()
                    evicted = min(residents - protected, key=self.key)
                    residents.remove(evicted)
                residents.add(piece)
                self.brought[piece] = self.time
            self.used[piece] = self.time
            self.count[piece] = self.count.get(piece, 0) + 1
            results.append((hit, evicted))
        return results

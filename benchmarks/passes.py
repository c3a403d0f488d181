"""Recompute the passes of a journal; `soak_serve.py` and the tests compare the tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from greenroom.hf.kv import cache as kv
from greenroom.hf.kv.batch import Batch
from greenroom.server.engine.journal import Journal, PrefixReuse
from greenroom.server.engine.requests import Token
from greenroom.server.engine.tokens.sampling import Sampler


@torch.inference_mode()
def replay(
    batch: Batch, journal: Journal, samplers: Mapping[int, Sampler]
) -> dict[int, list[Token]]:
    """Compute a journal's passes again, and return each sequence's tokens by its number.

    `samplers` are new ones of the sequences' requests. Caches are dropped after their last use.
    """
    last = _last_uses(journal)
    ids = {number: list(request.ids) for number, request in journal.requests.items()}
    tokens: dict[int, list[Token]] = {number: [] for number in ids}
    caches: dict[int, object] = {}
    for at, event in enumerate(journal.events):
        if isinstance(event, PrefixReuse):
            caches[event.number] = kv.copy_tokens(caches[event.source], event.tokens, batch.cache())
            used = {event.source}
        else:
            used = {number for number, _, _ in event.shares}
            own_caches = [
                _cache_for(batch, caches, number, before) for number, before, _ in event.shares
            ]
            token_ids = [ids[n][before : before + count] for n, before, count in event.shares]
            pass_logits = batch(token_ids, own_caches)
            for (number, before, count), cache, logits in zip(
                event.shares, own_caches, pass_logits, strict=True
            ):
                caches[number] = cache
                if before + count == len(ids[number]):
                    tokens[number].append(samplers[number](logits))
                    ids[number].append(tokens[number][-1].id)
        for number in used:
            if last[number] == at:
                del caches[number]
    return tokens


def _cache_for(batch: Batch, caches: dict[int, object], number: int, before: int) -> object:
    """A sequence's cache with so many tokens: fewer than it had where it was begun again."""
    cache = caches.get(number)
    if before == 0 or cache is None:
        return batch.cache()
    kv.truncate(cache, before)
    return cache


def _last_uses(journal: Journal) -> dict[int, int]:
    """The place of the last event that needs each sequence's keys and values."""
    last: dict[int, int] = {}
    for at, event in enumerate(journal.events):
        if isinstance(event, PrefixReuse):
            last[event.number] = last[event.source] = at
        else:
            last |= {number: at for number, _, _ in event.shares}
    return last

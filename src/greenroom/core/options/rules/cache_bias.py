"""Cache-aware routing: routers prefer experts that are in the cache.

"Mixture of Cache-Conditional Experts" (Skliar et al., arXiv 2412.00099, section 3) adds a bias to
the scores of cached experts before the top-k choice, and always keeps a token's likeliest experts.
The chosen experts' gate weights are those of the router, without the bias.

The bias is a share of the range of scores (largest less smallest). Scores have no unit: the softmax
does not change if a constant is added, and models differ in their scale. The paper takes the mean
range of the tokens so far. Here it is the range of the token itself, so that a token's experts
depend on the token and on the cache alone, and not on all tokens before it.
"""

from __future__ import annotations

import numpy as np

from greenroom.core.pieces import Ints
from greenroom.core.plan import Flags, Option, Scores, View

ALWAYS_USED = 2  # likeliest experts of a token


class CacheBias(Option):
    """A scheduler option that makes routers prefer experts in the cache."""

    def __init__(self, bias: float) -> None:
        """`bias` is the share of the range of a token's scores that is added."""
        self.bias = bias

    def choose(self, layer: int, scores: Scores, chosen: Ints, view: View) -> Ints:
        flags = view.in_slots(layer)
        if flags[chosen].all() or not flags.any() or np.isnan(scores).any():
            return chosen
        return biased_choice(scores, chosen, flags, self.bias)


def biased_choice(scores: Scores, chosen: Ints, flags: Flags, bias: float) -> Ints:
    """Choose experts by scores with a bias; `chosen` itself if no token's set of experts changes.

    scores: the router's scores, [tokens, experts]
    chosen: the experts with the largest scores, [tokens, top_k]
    flags:  the experts that get the bias, [experts]

    A token's likeliest experts come first. Of equal scores, the router's choice decides.
    """
    top_k, finite = chosen.shape[1], np.isfinite(scores)
    least = scores.min(1, keepdims=True, where=finite, initial=np.inf)
    biased = scores + bias * (scores.max(1, keepdims=True) - least) * flags
    ranked = _by_score(scores, chosen)
    np.put_along_axis(biased, ranked[:, :ALWAYS_USED], np.inf, 1)
    others = np.ones(scores.shape, np.bool_)
    np.put_along_axis(others, chosen, False, 1)
    best = np.lexsort((others, -biased))[:, :top_k]
    changed = np.take_along_axis(others, best, 1).any(1, keepdims=True)
    if not changed.any():
        return chosen
    return np.where(changed, _by_score(scores, best), chosen)


def _by_score(scores: Scores, experts: Ints) -> Ints:
    """Sort each token's experts by their scores, the largest first."""
    order = np.argsort(-np.take_along_axis(scores, experts, 1), axis=1, kind="stable")
    ranked: Ints = np.take_along_axis(experts, order, 1)
    return ranked

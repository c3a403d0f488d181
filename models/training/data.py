"""The corpus as token files, and batches drawn from them by seed and step alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import chat
import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

# Each domain's share of the training rows. The small ones are read more than once in a long run.
WEIGHTS = {
    "c": 10,
    "python": 8,
    "docs": 8,
    "man-en": 8,
    "man-de": 7,
    "man-fr": 7,
    "man-es": 4,
    "man-ru": 7,
    "stories": 11,
    "dictionary": 8,
    "prose": 8,
    "scripture": 6,
    "chat": 8,
}


@dataclass(frozen=True)
class Domain:
    """One domain's documents, each framed by its begin and end tokens, end to end."""

    tokens: np.ndarray
    starts: np.ndarray  # where each document begins

    def row(self, rng: np.random.Generator, length: int) -> np.ndarray:
        """A stretch of text: every other one begins where a document does."""
        last = len(self.tokens) - length
        at = int(rng.choice(self.starts)) if rng.random() < 0.5 else int(rng.integers(last))
        return self.tokens[min(at, last) :][:length]


def load(corpus: Path, split: str, tokenizer: PreTrainedTokenizerFast) -> dict[str, Domain]:
    """Every domain of a split, tokenised on the first use and kept beside the text."""
    domains = {}
    for name in WEIGHTS:
        source = corpus / "text" / split / f"{name}.jsonl"
        cached = corpus / "tokens" / split / f"{name}.npy"
        if not cached.exists() or cached.stat().st_mtime < source.stat().st_mtime:
            texts = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
            framed = [
                chat.BEGIN + (text if text.endswith(chat.END) else text + chat.END)
                for text in texts
            ]
            rows = tokenizer(framed, add_special_tokens=False)["input_ids"]
            cached.parent.mkdir(parents=True, exist_ok=True)
            partial = cached.with_suffix(".partial.npy")
            np.save(partial, np.concatenate([np.asarray(row, dtype=np.uint16) for row in rows]))
            partial.replace(cached)
        tokens = np.load(cached)
        begin = tokenizer.convert_tokens_to_ids(chat.BEGIN)
        domains[name] = Domain(tokens, np.flatnonzero(tokens == begin))
    return domains


def batch(
    domains: dict[str, Domain], seed: tuple[int, ...], rows: int, length: int
) -> torch.Tensor:
    """``rows`` stretches of ``length + 1`` tokens; the same seed gives the same rows."""
    rng = np.random.default_rng(seed)
    names = list(domains)
    shares = np.array([WEIGHTS[name] for name in names], dtype=float)
    drawn = rng.choice(len(names), size=rows, p=shares / shares.sum())
    return torch.from_numpy(
        np.stack([domains[names[i]].row(rng, length + 1) for i in drawn]).astype(np.int64)
    )

"""A made-up byte-level BPE tokenizer of any size, for shapes.py; equal sizes give equal tokens.

The tokens are the 256 bytes, then words of a space (or none) and growing numbers of letters, each
made by one merge, and four control tokens at the end, which a model of shapes.py never answers.
"""

from __future__ import annotations

import json
from functools import cached_property
from itertools import islice
from pathlib import Path
from string import ascii_lowercase
from typing import Any

CONTROL = ("<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Vocabulary:
    """The tokens and merges of a vocabulary of a given size, from 1024 on."""

    def __init__(self, size: int) -> None:
        if size < 1024:
            raise ValueError(f"a vocabulary of {size} tokens is too small: 1024 is the least")
        from tokenizers import pre_tokenizers

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self.merges = list(islice(_merges(), size - len(alphabet) - len(CONTROL)))
        self.tokens = [*alphabet, *(a + b for a, b in self.merges), *CONTROL]
        self.special_ids = {"bos_token_id": size - 4, "eos_token_id": size - 3}

    @cached_property
    def _json(self) -> dict[str, Any]:
        first = len(self.tokens) - len(CONTROL)
        flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False,
                 "normalized": False}  # fmt: skip
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                 "use_regex": True}  # fmt: skip
        return {
            "version": "1.0",
            "added_tokens": [{"id": first + n, "content": t, **flags}
                             for n, t in enumerate(CONTROL)],
            "pre_tokenizer": level,
            "decoder": level,
            "model": {"type": "BPE", "vocab": {t: n for n, t in enumerate(self.tokens)},
                      "merges": self.merges},
        }  # fmt: skip

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json."""
        (folder / "tokenizer.json").write_text(json.dumps(self._json))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": CONTROL[0],
                    "eos_token": CONTROL[1], "chat_template": TEMPLATE}  # fmt: skip
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))

    def describe(self, writer: Any, pre_tokenizer: str) -> None:
        """Add the tokenizer to a GGUF file's metadata (a gguf.GGUFWriter)."""
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre_tokenizer)
        writer.add_token_list(self.tokens)
        control = len(self.tokens) - len(CONTROL)
        writer.add_token_types([1] * control + [3] * len(CONTROL))
        writer.add_token_merges([" ".join(pair) for pair in self.merges])
        writer.add_bos_token_id(self.special_ids["bos_token_id"])
        writer.add_eos_token_id(self.special_ids["eos_token_id"])
        writer.add_add_bos_token(False)
        writer.add_chat_template(TEMPLATE)


def _merges() -> Any:
    """Pairs of a word and a letter: all words of two letters, then of three, and so on."""
    words = ["Ġ", *ascii_lowercase]
    while True:
        longer = []
        for word in words:
            for letter in ascii_lowercase:
                longer.append(word + letter)
                yield word, letter
        words = longer

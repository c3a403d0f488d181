"""The tokenizer of GGUF metadata: how text is split, and which ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from greenroom.errors import UnsupportedModel
from greenroom.hf.checkpoint.gguf.header import Header
from greenroom.hf.checkpoint.gguf.tokenizer import (
    SPLITS,
    UNMERGED,
    adapt_tokenizer,
    check_tokenizer,
    makes_tokenizer,
)
from tests.hf.conftest import one_line


def header(kind: str | None, name: str | None = None, **others: Any) -> Header:
    values = {"model": kind, "pre": name, "merges": ["a b"], **others}
    metadata = {
        f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None
    }
    return Header((Path("m.gguf"),), {"general.architecture": "deepseek2", **metadata}, {})


def pieces(name: str, text: str) -> list[str]:
    """The parts into which a kind of tokenizer splits a text."""
    backend = Tokenizer(models.BPE())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    adapt_tokenizer(tokenizer, header("gpt2", name))
    bytes_of = {character: byte for byte, character in bytes_to_unicode().items()}
    parts = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [bytes(bytes_of[c] for c in part).decode() for part, _ in parts]


# Each hand-worked by the expressions in the models' tokenizer.json.
@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "I'm 12345  ok", ["I", "'m", " 12345", " ", " ok"]),
        ("default", "it's (12345  x", ["it", "'", "s", " ", "(", "123", "45", " ", " x"]),
        ("refact", "a 123", ["a", " ", "1", "2", "3"]),
        ("deepseek-v3", "a   1234 x", ["a", "   ", "123", "4", " x"]),
        ("deepseek-v3", "用あ it's (x", ["用あ", " it", "'s", " (", "x"]),
        ("deepseek-llm", "a 12345\n\nb.", ["a", " ", "12345", "\n", "\n", "b", "."]),
        ("glm4", "It'S 12345", ["It", "'S", " ", "123", "45"]),
        ("hunyuan", "It'S 123", ["It", "'S", " ", "1", "2", "3"]),
        ("kimi-k2", "用abC'S 1234", ["用", "ab", "C'S", " ", "123", "4"]),
        ("afmoe", "1234567 12", ["1", "234", "567", " ", "12"]),
        ("bailingmoe2", "It'S 12\n\n", ["It", "'S", " ", "1", "2", "\n\n"]),
        ("cohere2moe", "1234 It's", ["1", "234", " It's"]),
        ("laguna", "a\n\nb1", ["a", "\n\n", "b", "1"]),
        ("exaone-moe", "a b1", ["a b", "1"]),
    ],
)
def test_splits_of_text(name: str, text: str, expected: list[str]) -> None:
    assert pieces(name, text) == expected


@pytest.mark.parametrize("name", sorted(SPLITS))
def test_no_split_loses_text(name: str) -> None:
    text = "Hëllo wörld's 12345,67  用户 ひら 한국 \t\n\n (x) ++ 🚀 é Ω\r\n "
    assert "".join(pieces(name, text)) == text


def test_tokens_that_are_not_merged() -> None:
    """A word that is a token is one, though no merges lead to it."""
    letters = {"a": 0, "b": 1, "c": 2, "abc": 3}
    for name in ("glm4", "qwen2"):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(letters, [])))
        adapt_tokenizer(tokenizer, header("gpt2", name))
        assert tokenizer.backend_tokenizer.model.ignore_merges == (name in UNMERGED)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        assert tokenizer("abc")["input_ids"] == ([3] if name == "glm4" else [0, 1, 2])


def test_a_space_that_is_not_put_in_front() -> None:
    vocabulary = {"▁": 0, "a": 1}
    for prefix, expected in ((None, [0, 1]), (False, [1])):
        backend = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
        backend.decoder = decoders.Metaspace()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
        adapt_tokenizer(tokenizer, header("llama", add_space_prefix=prefix))
        assert tokenizer("a")["input_ids"] == expected
        assert tokenizer.decode([1, 0, 1]) == "a a"


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        (None, None, "the metadata have none"),
        ("rwkv", None, "its kind is rwkv"),
        ("gpt2", None, "do not say how it splits text"),
        ("gpt2", "mine", "it splits text in the way mine, which is not known"),
    ],
)
def test_tokenizers_that_are_refused(kind: str | None, name: str | None, words: str) -> None:
    assert not makes_tokenizer(header(kind, name))
    with pytest.raises(UnsupportedModel) as error:
        check_tokenizer(header(kind, name))
    assert words in one_line(error)
    assert "tokenizer.json beside the file, or name its folder or hub id with --config" in one_line(
        error
    )
    assert not makes_tokenizer(header("gpt2", "qwen2", merges=None))
    with pytest.raises(UnsupportedModel, match=r"no merges \(tokenizer.ggml.merges\)"):
        check_tokenizer(header("gpt2", "qwen2", merges=None))
    assert makes_tokenizer(header("llama"))
    assert makes_tokenizer(header("gpt2", "qwen2"))

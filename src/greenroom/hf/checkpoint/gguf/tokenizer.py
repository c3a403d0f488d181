"""The tokenizer in a GGUF file's metadata: which ones are read, and how they split text.

transformers makes a tokenizer from the vocabulary and the merges. It knows how some byte-level
tokenizers split text into words, by llama.cpp's name in tokenizer.ggml.pre; SPLITS has others.
Each regular expression is that of the models' own tokenizer.json; "default" is llama.cpp's own.
"""

from __future__ import annotations

from tokenizers import Regex, decoders, pre_tokenizers
from transformers import PreTrainedTokenizerBase
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from greenroom.errors import UnsupportedModel
from greenroom.hf.checkpoint.gguf.header import Header
from greenroom.json_file import printable

BYTE_LEVEL = "gpt2"
KINDS = (BYTE_LEVEL, "llama", "gemma4")

_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = GGUF_PRE_TOKENIZER_SPLITS["qwen2"]
_LLAMA3 = GGUF_PRE_TOKENIZER_SPLITS["llama3"]
_GPT4O = GGUF_PRE_TOKENIZER_SPLITS["gpt-4o"]
_TEXT = (  # punctuation that begins a word stays with it
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _ENDS
)
_DEEPSEEK3 = (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _TEXT)
_CASED = (  # letters with upper and lower case, of an early version of Unicode
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7\u10cd\u10d0-\u10ff\u1c80-\u1c88\u2d00-\u2d2d"
    r"\ua790-\ua7fa\uab30-\uab68\x{10570}-\x{105bc}\x{16e40}-\x{16e7f}\x{1d400}-\x{1d7cb}"
    r"\x{1df00}-\x{1df1e}]]"
)
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?{_CASED}+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-\ud7ff]+",
    r"\p{N}+",
)
_DIGITS = (r"\p{N}", _GPT2)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+",
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _ENDS,
)

# llama.cpp's name -> regular expressions that split text one after another.
SPLITS: dict[str, tuple[str, ...]] = {
    "afmoe": (
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
        "[一-鿿㐀-䶿豈-\ufaff぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-\u0e7f\u0e80-\u0effក-\u17ff\u1000-\u109f\uaa60-\uaa7f"
        "\ua9e0-\ua9ff가-\ud7afᄀ-ᇿ]+",
        _TEXT,
    ),
    "bailingmoe": _BAILING,
    "bailingmoe2": _BAILING,
    "chatglm-bpe": (_LLAMA3,),
    "cohere2moe": (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O),
    "command-r": _DIGITS,
    "default": (
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        "[0-9]{3}",
    ),
    "deepseek-llm": _DEEPSEEK,
    "deepseek-v3": _DEEPSEEK3,
    "exaone": _DIGITS,
    "exaone-moe": (
        _SHORT
        + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "exaone4": (_GPT2,),
    "gigachat": (_GPT2,),
    "glm4": (_LLAMA3,),
    "glm5": (_LLAMA3,),
    "gpt-2": (_GPT2,),
    "granite-docling": (_GPT2,),
    "hunyuan": (_QWEN2,),
    "hunyuan-dense": _DEEPSEEK3,
    "joyai-llm": _DEEPSEEK3,
    "kimi-k2": _KIMI,
    "laguna": (r"[^\n]+|[\n]+", _QWEN2),
    "mellum": (_GPT2,),
    "mellum2": _DIGITS,
    "olmo": (_GPT2,),
    "refact": _DIGITS,
    "smollm": _DIGITS,
    "solar-open": (_QWEN2,),
}

# Names of tokenizers whose words that are tokens are not merged.
UNMERGED = {"glm4", "glm5", "lfm2", "llama-bpe", "llama-v3", "llama3", "pixtral", "tekken"}


def makes_tokenizer(header: Header) -> bool:
    """Return whether the metadata of a GGUF model make a tokenizer."""
    return _reason(header) is None


def check_tokenizer(header: Header) -> None:
    """Raise UnsupportedModel if the metadata of a GGUF model do not make a tokenizer."""
    if (reason := _reason(header)) is not None:
        raise UnsupportedModel(
            f"{header.path}: Greenroom cannot make the tokenizer from this file: {reason}: put the"
            " original model's tokenizer.json beside the file, or name its folder or hub id with"
            " --config"
        )


def _reason(header: Header) -> str | None:
    """Return why the metadata of a GGUF model do not make a tokenizer; None if they do."""
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind not in KINDS:
        return f"its kind is {printable(kind)}" if kind else "the metadata have none"
    if kind != BYTE_LEVEL:
        return None
    if "tokenizer.ggml.merges" not in header.metadata:
        return "the metadata have no merges (tokenizer.ggml.merges)"
    name = header.metadata.get("tokenizer.ggml.pre")
    if name in SPLITS or name in GGUF_PRE_TOKENIZER_SPLITS:
        return None
    if name is None:
        return "the metadata do not say how it splits text (tokenizer.ggml.pre)"
    return f"it splits text in the way {printable(name)}, which is not known"


def adapt_tokenizer(tokenizer: PreTrainedTokenizerBase, header: Header) -> None:
    """Make a tokenizer of transformers split text as a GGUF model's metadata say."""
    backend = tokenizer.backend_tokenizer
    name = header.metadata.get("tokenizer.ggml.pre")
    kind = header.metadata["tokenizer.ggml.model"]
    if kind == BYTE_LEVEL and name in SPLITS:
        splits = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in SPLITS[name]
        ]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    if kind == BYTE_LEVEL and name in UNMERGED:
        backend.model.ignore_merges = True
    if kind == "llama" and header.metadata.get("tokenizer.ggml.add_space_prefix") is False:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )

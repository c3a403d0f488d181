"""Train the demo model's tokenizer: byte-level BPE with six special tokens and a chat template.

Reads ``CORPUS/text/train``, writes a Hugging Face tokenizer folder. Every domain gives the same
number of bytes, so that no language is left with single bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import chat
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

# Words with their leading space, single digits, punctuation runs, then white space.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MAX_POSITIONS = 2048


def sample(corpus: Path, bytes_per_domain: int) -> Iterator[str]:
    for path in sorted((corpus / "text" / "train").glob("*.jsonl")):
        room = bytes_per_domain
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                # Whole documents can be long: take the head of each, to see more of them.
                text = json.loads(line)[:4000]
                yield text
                room -= len(text.encode())
                if room < 0:
                    break


def build(texts: Iterator[str], vocabulary: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=chat.SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # Plain prompts are taken as the start of a document, as in training.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{chat.BEGIN} $A",
        pair=f"{chat.BEGIN} $A $B:1",
        special_tokens=[(chat.BEGIN, tokenizer.token_to_id(chat.BEGIN))],
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=chat.BEGIN,
        eos_token=chat.END,
        pad_token=chat.PAD,
        additional_special_tokens=[chat.SYSTEM, chat.USER, chat.ASSISTANT],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat.TEMPLATE
    fast.response_template = chat.RESPONSE_TEMPLATE
    return fast


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"))
    parser.add_argument("--out", type=Path, default=Path(".corpus/tokenizer"))
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--bytes-per-domain", type=int, default=1_500_000)
    options = parser.parse_args()
    tokenizer = build(sample(options.corpus, options.bytes_per_domain), options.vocabulary)
    tokenizer.save_pretrained(options.out)
    for path in sorted((options.corpus / "text" / "heldout").glob("*.jsonl")):
        text = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
        size = len(tokenizer.encode(text, add_special_tokens=False))
        print(f"{path.stem:12s} {len(text.encode()) / size:.2f} bytes a token")


if __name__ == "__main__":
    main()

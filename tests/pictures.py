"""A tiny random model that reads pictures, pictures for it, and transformers' answers to them."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoTokenizer, Qwen3VLMoeForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from tests.models import COMMON, EIGHT, ROPE, VISION, randomise, save_tokenizer

TOKENS = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
TOKENS += ["<|video_pad|>"]
WORDS = 340  # of the vocabulary
SIDE = 32  # pixels of a token
# Messages with text or with parts, as Qwen3-VL's template writes them.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def picture_checkpoint(dtype: str = "float32") -> Path:
    """Save a tiny model with a vision tower, its image processor and its tokenizer."""
    kept = tempfile.TemporaryDirectory(prefix="tiny-pictures-")
    _KEEP.append(kept)
    folder = Path(kept.name)
    save_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    number = tokenizer.convert_tokens_to_ids
    rope = {**ROPE, "mrope_section": [2, 3, 3]}
    text = {**COMMON, **EIGHT, "head_dim": 16, "rope_parameters": rope, "vocab_size": WORDS}
    text |= {"max_position_embeddings": 1024}
    vision = {**VISION, "depth": 2, "deepstack_visual_indexes": [0, 1]}
    vision |= {"patch_size": SIDE // 2, "num_position_embeddings": 16}
    config = AutoConfig.for_model(
        "qwen3_vl_moe", text_config=text, vision_config=vision,
        image_token_id=number("<|image_pad|>"), video_token_id=number("<|video_pad|>"),
        vision_start_token_id=number("<|vision_start|>"),
        vision_end_token_id=number("<|vision_end|>"),
    )  # fmt: skip
    config._experts_implementation = "eager"
    torch.manual_seed(1)
    model = Qwen3VLMoeForConditionalGeneration(config)
    randomise(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    image_processor().save_pretrained(folder)
    return folder


_KEEP: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


def image_processor() -> Qwen2VLImageProcessorPil:
    size = {"shortest_edge": SIDE * SIDE, "longest_edge": 64 * SIDE * SIDE}
    return Qwen2VLImageProcessorPil(
        patch_size=SIDE // 2, merge_size=2, temporal_patch_size=2, size=size
    )


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Draw a picture of random pixels."""
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (height, width, 4), np.uint8)
    return Image.fromarray(pixels, "RGBA").convert(mode)


def encode(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Encode a picture in a format of Pillow."""
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{in_base64(data)}"


class Processor(Qwen3VLProcessor):
    """transformers' processor without videos, whose part of it needs torchvision."""

    def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
        return None


def expected_inputs(
    folder: Path, messages: list[dict[str, Any]], images: Sequence[Image.Image]
) -> dict[str, Any]:
    """Return the inputs that transformers' processor makes of messages with pictures."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = Processor(
        Qwen2VLImageProcessorPil.from_pretrained(folder), tokenizer, None, TEMPLATE
    )
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(text=[text], images=list(images) or None, return_tensors="pt")
    return dict(inputs)


def expected_answer(
    model: Any, folder: Path, messages: list[dict[str, Any]], images: Sequence[Image.Image],
    new: int,
) -> Any:  # fmt: skip
    """Return transformers' greedy answer to messages with pictures, with its logits."""
    inputs = expected_inputs(folder, messages, images)
    model.model.rope_deltas = None  # of the last prompt
    return model.generate(
        **inputs, max_new_tokens=new, do_sample=False, eos_token_id=-1, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip

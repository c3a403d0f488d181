"""The formats of models: checkpoints of transformers, GGUF files, packs. See `formats`."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.fuzz.formats import (
    Format,
    Pieces,
    plain,
    plain_join,
    safetensors,
    safetensors_join,
    saved,
)

DATA = Path(__file__).parents[1] / "data"
DATA_BYTES = 80_000  # more than a GGUF file of the tiny model has
QUANTISED: list[dict[str, Any]] = [  # settings of quantised checkpoints
    {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
     "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
         "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}}}},
]  # fmt: skip
LARGEST_PACK = 64 << 20  # bytes of a sparse file that stands for the experts


@cache
def model() -> Path:
    """A tiny checkpoint in several files, with a tokenizer."""
    from tests.models import cached_tiny

    return cached_tiny("qwen3_moe", tokenizer=True)


def _file(name: str) -> list[bytes]:
    return [(model() / name).read_bytes()]


def _folder(source: Path, folder: Path, name: str, data: bytes) -> Path:
    """The files of a checkpoint, of which one has these bytes."""
    made = folder / source.name
    if not made.is_dir():
        made.mkdir()
        for path in source.iterdir():
            os.symlink(path, made / path.name)
    saved(name, data, made)
    return made


def _configs() -> list[bytes]:
    from tests.models import make

    (plain,) = _file("config.json")
    others = [make(name).config.to_dict() for name in ("deepseek_v3", "gpt_oss")]
    others += [json.loads(plain) | {"quantization_config": each} for each in QUANTISED]
    return [plain, *(json.dumps(each, default=str).encode() for each in others)]


def read_config(data: bytes, folder: Path) -> None:
    """As `plan` does: config and headers, and a pass on the meta device."""
    from greenroom.config import LoadConfig
    from greenroom.hf.load.describe import describe

    describe(str(_folder(model(), folder, "config.json", data)), LoadConfig(memory="8GiB"))


def read_index(data: bytes, folder: Path) -> None:
    from greenroom.hf.checkpoint.resolve import open_checkpoint

    open_checkpoint(_folder(model(), folder, "model.safetensors.index.json", data))


def _headers() -> list[bytes]:
    from tests.fuzz.formats import _trace_files

    header = {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "F4", "shape": [4], "data_offsets": [24, 26]},
        "c": {"dtype": "I64", "shape": [0, 4], "data_offsets": [26, 26]},
        "__metadata__": {"format": "pt"},
    }
    text = json.dumps(header).encode()
    return [len(text).to_bytes(8, "little") + text + bytes(26), *_trace_files()]


def read_header(data: bytes, folder: Path) -> None:
    from greenroom.hf.checkpoint.header import read_header

    read_header(saved("model.safetensors", data, folder), 0)


def read_tokenizer(name: str) -> Any:
    """The reader of a tokenizer of which this file is another one."""

    def read(data: bytes, folder: Path) -> None:
        from greenroom.hf.checkpoint.tokenizer import tokenizer_of

        tokenizer_of(_opened(_folder(model(), folder, name, data)))

    return read


def _opened(folder: Path) -> Any:
    arguments = {"pretrained_model_name_or_path": folder, "local_files_only": True}
    return SimpleNamespace(
        folder=folder, tokenizer_arguments=arguments, adapt_tokenizer=lambda tokenizer: None
    )


@cache
def _skeleton() -> Any:
    from greenroom.hf.model.skeleton import ModelSkeleton

    return ModelSkeleton.of(model())


def tiny_catalog() -> Any:
    """The experts of the tiny checkpoint."""
    return _skeleton().catalog


def read_generation(data: bytes, folder: Path) -> None:
    from greenroom.hf.model.construction import load_generation_config

    made = _folder(model(), folder, "generation_config.json", data)
    load_generation_config(_skeleton().model, made)


def _ggufs() -> list[bytes]:
    return [(DATA / "gguf" / name).read_bytes() for name in ("Q4_0.gguf", "MXFP4_MOE.gguf")]


def header_only(data: bytes) -> Pieces:
    """A GGUF file without its tensors' data, which no reader looks at."""
    from tempfile import NamedTemporaryFile

    from greenroom.hf.checkpoint.gguf_file import Cursor

    with NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        cursor = Cursor(file.name)
        for _ in cursor.pairs():
            pass
        for _ in range(cursor.tensors):
            cursor.entry()
    return [], [data[: cursor.at]]


def header_only_join(pieces: Pieces) -> bytes:
    return pieces[1][0] + bytes(max(0, DATA_BYTES - len(pieces[1][0])))


def read_gguf(data: bytes, folder: Path) -> None:
    from greenroom.hf.checkpoint.resolve import open_checkpoint
    from greenroom.hf.checkpoint.tokenizer import tokenizer_of
    from greenroom.hf.model.skeleton import ModelSkeleton

    checkpoint = open_checkpoint(saved("model.gguf", data, folder))
    ModelSkeleton.of(checkpoint)
    tokenizer_of(checkpoint)


@cache
def _packs() -> dict[str, Path]:
    """Packs by the kind of their experts: whole, in segments, with nested copies."""
    from tempfile import mkdtemp

    from greenroom.hf.pack.packing import pack
    from tests.models import cached_tiny

    wide = dict.fromkeys(("hidden_size", "moe_intermediate_size", "intermediate_size"), 128)
    source = cached_tiny("qwen3_moe", dtype="bfloat16", tokenizer=True, **wide)
    made = {}
    at = Path(mkdtemp(prefix="fuzz-packs-"))
    for kind, more in {
        "int4": {},
        "fp8": {},
        "same": {"segments": 2},
        "int8": {"precision": "int4"},
    }.items():
        made[kind] = at / kind
        pack(str(source), made[kind], kind, **more)
    return made


def _pack_headers() -> list[bytes]:
    return [(folder / "greenroom.json").read_bytes() for folder in _packs().values()]


def pack_join(pieces: Pieces) -> bytes:
    """With the offsets and the identity of what it says, where these can be told."""
    from greenroom.hf.checkpoint.pack import format, header_file
    from greenroom.json_file import JsonObject, Malformed, parse

    try:
        found = format.as_json(header_file.parse(JsonObject(parse(pieces[0][0]))))
    except Malformed:
        return pieces[0][0]
    return json.dumps(found).encode()


def read_pack(data: bytes, folder: Path) -> None:
    """Open it, with data of the size that the header says, and look where every expert lies."""
    from greenroom.errors import GreenroomError
    from greenroom.hf.checkpoint.pack import header_file
    from greenroom.hf.checkpoint.pack.reading import open_pack
    from greenroom.hf.model.skeleton import ModelSkeleton

    kinds = _packs()
    kind = next((kind for kind in kinds if f'"{kind}"'.encode() in data), "same")
    made = _folder(kinds[kind], folder, "greenroom.json", data)
    try:
        header = header_file.read(made)
    except GreenroomError:
        open_pack(made)
        raise AssertionError("the header was refused, and the pack was not") from None
    path = saved("experts.greenroom", header.first_block(), made)
    if header.nbytes <= LARGEST_PACK:
        os.truncate(path, header.nbytes)
    skeleton = ModelSkeleton.of(open_pack(made))
    for expert in range(skeleton.catalog.experts):
        skeleton.catalog.extents(expert)


def _unfinished() -> list[bytes]:
    plan = {"command": "greenroom pack demo -o out", "experts": "int8"}
    return [json.dumps(plan).encode() + b"\nexpert 0 123\nexpert 1 456 789\ndense d.gguf 12 99\n"]


def unfinished(data: bytes) -> Pieces:
    first, _, rest = data.partition(b"\n")
    return [first], [rest]


def unfinished_join(pieces: Pieces) -> bytes:
    return pieces[0][0] + b"\n" + pieces[1][0]


def read_unfinished(data: bytes, folder: Path) -> None:
    from greenroom.hf.checkpoint.pack.journal import NAME, Journal
    from greenroom.hf.checkpoint.pack.journal import resume_command as command

    saved(NAME, data, folder)
    command(folder)
    Journal(folder, {"experts": "int8"}, "greenroom pack demo -o out").close()


# ---- chat templates


def _templates() -> list[bytes]:
    from tests.server.conftest import thinker_tokenizer

    return [thinker_tokenizer().chat_template.encode()]


@cache
def _tokenizer() -> Any:
    from copy import deepcopy

    from tests.server.conftest import thinker_tokenizer

    return deepcopy(thinker_tokenizer())


@cache
def _renderer() -> Any:
    from greenroom.hf.text.dialogue import Dialogue

    return Dialogue(_tokenizer(), "qwen3_moe", 4096)


def read_template(data: bytes, folder: Path) -> None:
    """As a chat with tools does: find the format of calls, and render a conversation."""
    from greenroom.hf.text.calls import find_call_format

    dialogue, (text,) = _renderer(), (data.decode(errors="replace"),)
    dialogue.tokenizer.chat_template = text
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Ho"}]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    prompt = dialogue.chat(messages[:1], tools)
    find_call_format(dialogue, prompt, tools)
    dialogue.chat(messages, resume=True)


# ---- adapters


@cache
def _experts() -> Any:
    """The tiny checkpoint, and the names of its experts' tensors."""
    from greenroom.hf.checkpoint.resolve import open_checkpoint

    checkpoint = open_checkpoint(model())
    return checkpoint, [name for name in checkpoint.tensors if ".experts." in name]


def _adapters() -> list[bytes]:
    """A list of the changed experts, and the file with their tensors."""
    checkpoint, experts = _experts()
    chosen = [name for name in experts if ".layers.2." in name and ".experts.5." in name]
    header, at = {}, 0
    for name in chosen:
        tensor = checkpoint.stored[name]
        end = at + tensor.nbytes
        code = {"float32": "F32", "bfloat16": "BF16"}[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": code, "shape": [*tensor.shape], "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    listed = json.dumps({"experts": {"2": [5]}, "shared_experts": False}).encode()
    return [listed + b"\n" + len(text).to_bytes(8, "little") + text + bytes(at)]


def adapter(data: bytes) -> Pieces:
    listed, _, file = data.partition(b"\n")
    texts, others = safetensors(file)
    return [listed, *texts], others


def adapter_join(pieces: Pieces) -> bytes:
    (listed, *texts), others = pieces
    return listed + b"\n" + safetensors_join((texts, others))


def read_adapter(data: bytes, folder: Path) -> None:
    from greenroom.hf.variants.adapter import LISTED, with_adapter

    listed, _, file = data.partition(b"\n")
    saved(LISTED, listed, folder)
    saved("adapter.safetensors", file, folder)
    with_adapter(*_experts()[:1], folder, _experts()[1])


# ---- the hub's cache


def _listings() -> list[bytes]:
    digest = "0123456789abcdef" * 4
    files = {
        "config.json": {"size": 10},
        "model-00001-of-00002.safetensors": {"size": 99, "lfs_sha256": digest},
        "m-Q4_K_M.gguf": {"size": 99, "lfs_sha256": digest},
        "x/m-Q8_0-00001-of-00002.gguf": {"size": 2**40, "lfs_sha256": None},
    }
    return [json.dumps({"files": files}).encode()]


def read_listing(data: bytes, folder: Path) -> None:
    """As `greenroom list` does, in a cache with one snapshot and a part of a download."""
    from huggingface_hub import constants

    from greenroom.hf.checkpoint.hub.cached import cached_models

    root, commit = folder / "models--a--b", "a" * 40
    if not root.is_dir():
        for part in ("blobs", f"snapshots/{commit}", "refs", "trees"):
            (root / part).mkdir(parents=True)
        (root / "refs" / "main").write_text(commit)
        (root / "snapshots" / commit / "config.json").write_text("{}")
        (root / "blobs" / f"{'0123456789abcdef' * 4}.incomplete").write_bytes(b"x")
    saved(f"{commit}.json", data, root / "trees")
    before, constants.HF_HUB_CACHE = constants.HF_HUB_CACHE, str(folder)
    try:
        cached_models()
    finally:
        constants.HF_HUB_CACHE = before


CHECKPOINTS = {
    "config": Format(_configs, read_config, plain, plain_join, weight=5),
    "index": Format(lambda: _file("model.safetensors.index.json"), read_index, plain, plain_join),
    "header": Format(_headers, read_header, safetensors, safetensors_join),
    "tokenizer": Format(
        lambda: _file("tokenizer.json"), read_tokenizer("tokenizer.json"), plain, plain_join
    ),
    "tokenizer-config": Format(
        lambda: _file("tokenizer_config.json"), read_tokenizer("tokenizer_config.json"), plain,
        plain_join,
    ),
    "generation": Format(
        lambda: _file("generation_config.json"), read_generation, plain, plain_join
    ),
    "gguf": Format(_ggufs, read_gguf, header_only, header_only_join),
    "pack": Format(_pack_headers, read_pack, plain, pack_join, weight=4),
    "template": Format(_templates, read_template),
    "adapter": Format(_adapters, read_adapter, adapter, adapter_join),
    "hub-listing": Format(_listings, read_listing, plain, plain_join),
    "pack-journal": Format(_unfinished, read_unfinished, unfinished, unfinished_join),
}  # fmt: skip

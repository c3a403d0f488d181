"""Write a checkpoint with random weights in the shape of a published model.

    python benchmarks/shapes.py qwen3-30b-a3b bench-data/qwen3-30b.gguf [--skew 0.7]
    python benchmarks/shapes.py gpt-oss-20b FILE --routing traces/gpt-oss-20b.npz
    python benchmarks/shapes.py qwen3-30b-a3b FILE --layers 12 --type IQ4_XS
    python benchmarks/shapes.py mixtral-8x7b FOLDER --format safetensors --layers 2
    python benchmarks/shapes.py qwen3-30b-a3b FILE --tiny      # small matrices, all layers

Sizes, names, metadata, vocabulary size and stored types are those of the model: GGUF of Q4_K with
Q5_0 where rows are no multiple of 256 (MXFP4 and Q8_0 for gpt-oss), or safetensors of bfloat16
(MXFP4 for gpt-oss). llama.cpp loads the GGUF files too. Matrices repeat a pool of random blocks,
so a file is written as fast as the disk takes it, in 300 MB of memory. The tokenizer is a made-up
byte-level BPE of the true size. Config and tokenizer of FILE.gguf are also written to FILE.config,
for architectures whose metadata lack something (`greenroom run ... --config FILE.config`).

Routing is recorded (--routing: a trace of the same experts and top-k), or drawn with Zipf's
exponent --skew, in another order of experts in each layer. It is replayed by the weights alone, so
every engine has it:

    The first CHANNELS channels of the residual stream hold a token's identity: the embedding of
    token t is a constant in channel t modulo CHANNELS, and no layer writes to these channels (the
    rows of matrices that would are zero). So column s of a layer's router decides the experts of
    every token of step s. The head answers step s with token s + 1.

Exact, with --noise 0: a token's experts in each layer, from any engine; and greedy decoding from
the last prompt token's step s visits the steps s + 1, s + 2, ... of the recording. Nearly exact:
gate weights, whose logits shrink by about a third from the first to the last layer. Not recorded:
the routing of a prompt follows its tokens' ids. With --noise 0 a predictor that applies a later
router to an earlier hidden state is always right, as it is not in a trained model. --noise G adds
G times a random function of the other channels, which layers change, to the router's logits (of
which chosen experts have 4 or more, others -4): predictions and steps are then inexact.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from shape_blocks import KINDS, Bytes, as_bf16, one_hot, pool
from shape_table import FAMILIES, SHAPES, Config, Entry, Shape, entries
from shape_tokenizer import Vocabulary

from greenroom.config import ZipfConfig
from greenroom.errors import TraceError
from greenroom.trace import Trace, load
from greenroom.trace.synth import zipf

CHANNELS = 1024  # steps of routing; where the hidden size is below 2048, half of it
IDENTITY = 16.0  # a token's value in its channel; all other channels have standard deviation 1
CHOSEN, OTHER = 4.0, -4.0  # router logits of experts that are chosen, and of others
# Where rows are no multiple of 256, as llama-quantize has them.
FALLBACK = {"Q4_K": "Q5_0", "IQ4_XS": "Q5_0", "Q6_K": "Q8_0"}
# ggml's numbers: MOSTLY_Q4_K_S, MOSTLY_MXFP4_MOE, ...
FILE_TYPES = {"Q4_K": 14, "Q4_0": 2, "Q8_0": 7, "IQ4_XS": 30, "MXFP4": 38, "BF16": 32}
SHARD_BYTES = 4 << 30
CHUNK = 8 << 20


@dataclass(frozen=True)
class Routing:
    """Experts of each step in each MoE layer [steps, layers, top_k], and their gate weights."""

    experts: NDArray[Any]
    weights: NDArray[np.float16] | None
    noise: float

    def logits(self, layer: int, experts: int) -> NDArray[np.float32]:
        """Router logits of each step in one layer [steps, experts]."""
        chosen = self.experts[:, layer].astype(np.int64)
        above = np.arange(chosen.shape[1], 0, -1, dtype=np.float32) / 64  # keeps the ranks
        values = np.broadcast_to(CHOSEN + above, chosen.shape)
        if self.weights is not None:
            shares = np.maximum(self.weights[:, layer].astype(np.float32), 1e-3)
            values = CHOSEN + np.log(shares / shares.min(axis=1, keepdims=True))
        logits = np.full((len(chosen), experts), OTHER, np.float32)
        np.put_along_axis(logits, chosen, values, axis=1)
        return logits


def tiny(shape: Shape, vocabulary: int | None, experts: int | None = None) -> Shape:
    """The shape with small matrices and few experts: the same layers and kinds of tensors."""
    small = {
        "hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64,
        "kv_lora_rank": 256, "qk_nope_head_dim": 64, "v_head_dim": 64, "sliding_window": 64,
        FAMILIES[shape.family].experts: experts or 16,
        "vocab_size": vocabulary or shape.config["vocab_size"],
    }  # fmt: skip
    if shape.config.get("kv_lora_rank"):  # every head has its own keys
        small["num_key_value_heads"] = 4
    if shape.config.get("q_lora_rank"):
        small["q_lora_rank"] = 256
    changes = {k: v for k, v in small.items() if shape.config.get(k) is not None}
    return Shape(shape.family, shape.recipe, shape.config | changes)


class Model:
    """The tensors of a checkpoint that is written: their stored types and their bytes."""

    def __init__(self, shape: Shape, config: Config, routing: Routing) -> None:
        self.shape, self.config, self.routing = shape, config, routing
        self.family = FAMILIES[shape.family]
        self.experts = int(config[self.family.experts])
        self.hidden = int(config["hidden_size"])
        self.steps = len(routing.experts)
        self.first_moe = int(config.get("first_k_dense_replace", 0))

    def gguf_kind(self, entry: Entry) -> str:
        """The ggml type of a tensor."""
        if len(entry.shape) == 1 or entry.role in ("router", "bias"):
            return "F32"
        kind = self.shape.recipe
        if kind == "MXFP4" and not entry.experts:
            kind = "Q8_0"
        if entry.role == "head" and kind in ("Q4_K", "Q4_0", "IQ4_XS"):
            kind = "Q6_K"
        wide = entry.shape[-1] % KINDS[kind].values
        if entry.role == "embedding" and (wide or KINDS[kind].one is None):
            return "Q8_0"
        return FALLBACK[kind] if wide else kind

    def chunks(self, entry: Entry, kind: str, start: int) -> Iterator[Bytes]:
        """A tensor's bytes in pieces of some megabytes; `start` sets where its pool begins."""
        shape = ((entry.experts,) if entry.experts else ()) + entry.shape
        if entry.role in ("norm", "bias"):
            yield _floats(np.full(entry.shape, float(entry.role == "norm"), np.float32), kind)
        elif entry.role == "router":
            yield _floats(self._router(entry), kind)
        elif entry.role in ("embedding", "head"):
            yield from self._tokens(entry, kind, start)
        elif entry.role == "output":
            yield from self._output(entry, kind, start)
        else:
            yield from _repeat(pool(kind, entry.shape[-1] ** -0.5), KINDS[kind].size(shape), start)

    def _output(self, entry: Entry, kind: str, start: int) -> Iterator[Bytes]:
        """A matrix that writes to the residual stream: zero rows for the channels of identities.

        All layers together double the variance of the other channels.
        """
        std = 2 / math.sqrt(2 * self.config["num_hidden_layers"] * entry.shape[-1])
        source = pool(kind, std)
        for number in range(entry.experts or 1):
            yield np.zeros(KINDS[kind].size((self.steps, *entry.shape[1:])), np.uint8)
            rows = (self.hidden - self.steps, *entry.shape[1:])
            yield from _repeat(source, KINDS[kind].size(rows), start + number)

    def _router(self, entry: Entry) -> NDArray[np.float32]:
        layer = int(entry.gguf.split(".")[1]) - self.first_moe
        others = self.hidden - self.steps
        normed = IDENTITY / math.sqrt((IDENTITY**2 + others) / self.hidden)  # after RMSNorm
        weights = np.zeros(entry.shape, np.float32)
        weights[:, : self.steps] = self.routing.logits(layer, self.experts).T / normed
        random = np.random.default_rng([7, layer])
        noise = random.standard_normal((entry.shape[0], others), np.float32)
        weights[:, self.steps :] = noise * (self.routing.noise / math.sqrt(others))
        return weights

    def _tokens(self, entry: Entry, kind: str, start: int) -> Iterator[Bytes]:
        """The embedding, or the head: a block of one value in a row, the rest of it random.

        Row t of the embedding has its value in channel t modulo steps; row t of the head, for the
        first tokens, in the channel of the step before.
        """
        vocabulary, spec, steps = entry.shape[0], KINDS[kind], self.steps
        row = spec.size(entry.shape[1:])
        marked = np.zeros((steps, spec.size((steps,))), np.uint8)
        blocks = marked.reshape(steps, -1, spec.nbytes)
        shift, value = (0, IDENTITY) if entry.role == "embedding" else (1, 1.0)
        for token in range(steps):
            block, place = divmod((token - shift) % steps, spec.values)
            blocks[token, block] = one_hot(kind, place, value)
        source = pool(kind, 1.0 if entry.role == "embedding" else 0.02)
        for first in range(0, vocabulary, steps):
            count = min(steps, vocabulary - first)
            begin = start + first
            rows = np.concatenate(list(_repeat(source, count * row, begin))).reshape(count, row)
            if entry.role == "embedding" or first == 0:
                rows[:, : marked.shape[1]] = marked[:count]
            yield rows


def _floats(values: NDArray[np.float32], kind: str) -> Bytes:
    return as_bf16(values) if kind == "BF16" else values.view(np.uint8)


def _repeat(source: Bytes, nbytes: int, start: int) -> Iterator[Bytes]:
    """That many bytes of a pool, over and over, from a block that `start` determines."""
    flat = source.reshape(-1)
    at = start * 7919 % len(source) * source.shape[1]
    while nbytes:
        piece = flat[at : at + min(nbytes, CHUNK)]
        yield piece
        nbytes, at = nbytes - len(piece), (at + len(piece)) % len(flat)


def _write(file: BinaryIO, pieces: Iterator[Bytes], nbytes: int, name: str) -> None:
    written = sum(file.write(piece.reshape(-1).data) for piece in pieces)
    if written != nbytes:
        raise AssertionError(f"{name}: {written} bytes were written, not {nbytes}")


def write_gguf(model: Model, path: Path, vocabulary: Vocabulary) -> None:
    """Write a model as one GGUF file: header, then the tensors, a piece at a time."""
    import gguf

    partial = path.with_suffix(".part")
    writer = gguf.GGUFWriter(str(partial), model.family.gguf)
    writer.add_name(f"random weights in a published shape, {model.config['model_type']}")
    writer.add_quantization_version(2)
    writer.add_file_type(FILE_TYPES[model.shape.recipe])
    for key, value in model.family.metadata(model.config).items():
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
                 str: writer.add_string}  # fmt: skip
        kinds[type(value)](f"{model.family.gguf}.{key}", value)
    vocabulary.describe(writer, model.family.pre_tokenizer)
    chosen = [(e, model.gguf_kind(e)) for e in entries(model.shape, model.config) if e.gguf]
    sizes = []
    for entry, kind in chosen:
        shape = ((entry.experts,) if entry.experts else ()) + entry.shape
        spec = KINDS[kind]
        sizes.append(spec.size(shape))
        stored = (*shape[:-1], shape[-1] // spec.values * spec.nbytes)
        if kind == "F32":
            writer.add_tensor_info(entry.gguf, shape, np.dtype(np.float32), sizes[-1])
        else:
            raw = gguf.GGMLQuantizationType[kind]
            writer.add_tensor_info(entry.gguf, stored, np.dtype(np.uint8), sizes[-1], raw)
    _check_room(path, sum(sizes))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    file = writer.fout[0]
    for number, ((entry, kind), nbytes) in enumerate(zip(chosen, sizes, strict=True)):
        writer.write_padding(file, file.tell())
        _write(file, model.chunks(entry, kind, number), nbytes, entry.gguf)
        _progress(f"{number + 1} of {len(sizes)} tensors")
    writer.write_padding(file, file.tell())
    writer.close()
    config = model.config | vocabulary.special_ids
    config.pop("quantization_config", None)
    folder = path.with_suffix(".config")
    folder.mkdir(exist_ok=True)
    vocabulary.save(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    partial.replace(path)


def _stored(model: Model) -> Iterator[tuple[str, str, tuple[int, ...], Entry, str]]:
    """(name, dtype, shape, entry, type) of every tensor as safetensors stores it."""
    packed = model.shape.recipe == "MXFP4"
    for entry in entries(model.shape, model.config):
        if not entry.hf:
            continue
        if packed and entry.experts:
            rows, blocks = entry.shape[0], entry.shape[1] // 32
            size = (entry.experts, rows, blocks)
            yield entry.hf + "_blocks", "U8", (*size, 16), entry, "FP4 codes"
            yield entry.hf + "_scales", "U8", size, entry, "FP4 scales"
            continue
        wide = entry.hf.endswith("e_score_correction_bias")
        kind, dtype = ("F32", "F32") if wide else ("BF16", "BF16")
        for number in range(entry.experts or 1):
            one = Entry(entry.hf, entry.gguf, entry.shape, entry.role)
            yield entry.hf.format(expert=number), dtype, entry.shape, one, kind


def write_safetensors(model: Model, folder: Path, vocabulary: Vocabulary) -> None:
    """Write a model as a folder: config, tokenizer, index, and files of up to 4 GB."""
    tensors = list(_stored(model))
    sizes = [KINDS[kind].size((*((e.experts,) if e.experts else ()), *e.shape))
             for *_, e, kind in tensors]  # fmt: skip
    _check_room(folder, sum(sizes))
    folder.mkdir(parents=True)
    shards: list[list[int]] = [[]]
    for number, nbytes in enumerate(sizes):
        if shards[-1] and sum(sizes[n] for n in shards[-1]) + nbytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(number)
    index = {}
    for shard, numbers in enumerate(shards, 1):
        name = f"model-{shard:05}-of-{len(shards):05}.safetensors"
        header, at = {}, 0
        for number in numbers:
            stored, dtype, shape, *_ = tensors[number]
            end = at + sizes[number]
            header[stored] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
            index[stored], at = name, end
        text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for number in numbers:
                stored, _, _, entry, kind = tensors[number]
                _write(file, model.chunks(entry, kind, number), sizes[number], stored)
        _progress(f"{shard} of {len(shards)} files")
    vocabulary.save(folder)
    config = model.config | vocabulary.special_ids
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": sum(sizes)}, "weight_map": index})
    )


def routing_of(args: argparse.Namespace, shape: Shape, config: Config) -> Routing:
    """The recorded or drawn routing of as many steps as there are channels for."""
    experts, top_k = config[FAMILIES[shape.family].experts], config["num_experts_per_tok"]
    layers = config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)
    steps = min(CHANNELS, config["hidden_size"] // 2 // 256 * 256)
    if args.routing is None:
        options = ZipfConfig(layers=max(layers, 1), experts=experts, top_k=top_k, tokens=steps,
                             a=args.skew, b=0.0, seed=args.seed)  # fmt: skip
        ranks, random = zipf(options).experts, np.random.default_rng(args.seed)
        orders = [random.permutation(experts) for _ in range(ranks.shape[1])]
        drawn = np.stack([order[ranks[:, n]] for n, order in enumerate(orders)], axis=1)
        return Routing(drawn, None, args.noise)
    trace = load(args.routing)
    _check_trace(trace, args.routing, layers, experts, top_k)
    first = trace.head(steps)
    chosen, weights = first.experts[:, :layers], first.weights
    again = -(-steps // len(chosen))  # a short recording is repeated
    chosen = np.tile(chosen, (again, 1, 1))[:steps]
    if weights is not None:
        weights = np.tile(weights[:, :layers], (again, 1, 1))[:steps]
    return Routing(chosen, weights, args.noise)


def _check_trace(trace: Trace, path: Path, layers: int, experts: int, top_k: int) -> None:
    most = int(trace.experts_per_layer.max())
    if trace.layers < layers or most != experts or trace.top_k != top_k:
        sys.exit(
            f"{path}: has {trace.layers} layers of {most} experts, top-{trace.top_k}, but the"
            f" model has {layers} of {experts}, top-{top_k}: give its own recording, or fewer"
            " --layers"
        )


def _check_room(path: Path, nbytes: int) -> None:
    free = shutil.disk_usage(path.absolute().parent).free
    if nbytes > free:
        sys.exit(f"{path}: needs {nbytes / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free: give"
                 " --layers N")  # fmt: skip


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:40}", end="", file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="write a checkpoint in a published model's shape")
    made.add_argument("shape", choices=list(SHAPES))
    made.add_argument("out", type=Path, help="the GGUF file, or the folder, to write")
    made.add_argument("--format", choices=("gguf", "safetensors"), default="gguf")
    made.add_argument(
        "--type", choices=FILE_TYPES, help="of most matrices of a GGUF file (default: the model's)"
    )
    made.add_argument("--layers", type=int, metavar="N", help="the first N layers only")
    made.add_argument(
        "--skew",
        type=float,
        default=0.7,
        metavar="S",
        help="Zipf's exponent of the routing that is drawn (default: %(default)s)",
    )
    made.add_argument("--routing", type=Path, metavar="TRACE", help="replay a recording instead")
    made.add_argument(
        "--noise",
        type=float,
        default=0.0,
        metavar="G",
        help="random part of the routers' logits (default: %(default)s)",
    )
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--tiny", action="store_true", help="small matrices, to try the scripts with")
    made.add_argument("--vocabulary", type=int, metavar="N", help="with --tiny: its vocabulary")
    made.add_argument("--experts", type=int, metavar="N", help="with --tiny: of each layer (16)")
    return made  # fmt: skip


def main() -> None:
    args, start = parser().parse_args(), time.perf_counter()
    if args.out.exists():
        sys.exit(f"{args.out}: exists already: remove it, or give another name")
    shape = SHAPES[args.shape]
    shape = tiny(shape, args.vocabulary, args.experts) if args.tiny else shape
    if args.type is not None:
        if args.format == "safetensors":
            sys.exit("--type is of GGUF files: leave out --format safetensors")
        shape = replace(shape, recipe=args.type)
    if args.layers is not None and not 1 <= args.layers <= shape.config["num_hidden_layers"]:
        sys.exit(f"--layers {args.layers}: this model has {shape.config['num_hidden_layers']}")
    config = shape.of_layers(args.layers)
    try:
        model = Model(shape, config, routing_of(args, shape, config))
    except TraceError as error:
        sys.exit(str(error))
    vocabulary = Vocabulary(config["vocab_size"])
    write = write_gguf if args.format == "gguf" else write_safetensors
    write(model, args.out, vocabulary)
    files = args.out.glob("*.safetensors") if args.out.is_dir() else [args.out]
    size = sum(path.stat().st_size for path in files)
    print(f"{args.out}: {size / 1e9:.2f} GB, {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()

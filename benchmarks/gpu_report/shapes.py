"""The shapes that are measured, and the names of all measurements. Imports neither torch nor NumPy.

A part is a list of cells; a cell is measured as a whole and has one line in the results.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; `heads` are those of queries, and of keys and values."""

    family: str
    hidden: int
    inner: int
    experts: int
    top_k: int
    architecture: str = ""
    heads: tuple[int, int] = (16, 16)
    head_dim: int = 128
    vocabulary: int = 8192


KERNELS = {
    "qwen3-30b-a3b": Shape("qwen3_moe", 2048, 768, 128, 8),
    "gpt-oss-120b": Shape("gpt_oss", 2880, 2880, 128, 4),
    "deepseek-v3": Shape("deepseek_v3", 7168, 2048, 256, 8),
    "mixtral-8x7b": Shape("mixtral", 4096, 14336, 8, 2),
}
SMALL_KERNELS = {
    "qwen3-30b-a3b": Shape("qwen3_moe", 256, 256, 8, 2),
    "gpt-oss-120b": Shape("gpt_oss", 64, 64, 8, 2),
}
MODELS = {
    "qwen3-30b-a3b": Shape("qwen3_moe", 2048, 768, 128, 8, "Qwen3MoeForCausalLM", (32, 4)),
    "olmoe": Shape("olmoe", 2048, 1024, 64, 8, "OlmoeForCausalLM"),
}
SMALL_MODELS = {
    "qwen3-30b-a3b": Shape(
        "qwen3_moe", 64, 64, 8, 2, "Qwen3MoeForCausalLM", (4, 2), head_dim=16, vocabulary=256
    )
}

ENCODINGS = (
    "plain", "int8", "int4", "mxfp4", "nvfp4", "fp8", "q8_0", "q4_0", "gguf_mxfp4", "q4_k", "q5_k",
    "q6_k", "iq4_xs",
)  # fmt: skip
GROUPED = "grouped_mm"  # transformers' kernel over bfloat16, the baseline of the encodings
SUPER_BLOCKS, SUPER_BLOCK = {"q4_k", "q5_k", "q6_k", "iq4_xs"}, 256  # inputs of a block
FP8_BLOCK = 128  # outputs and inputs that share a scale
SHARES = ("100%", "50%", "25%", "12.5%")  # of the experts that are in the GPU's memory
BLOCKS = (512, 1024, 2048, 4096)  # tokens of a prompt that are read in one pass

PARTS = ("tests", "kernels", "models", "demo")
RUNS = ("cuda auto", "cuda eager", "cpu eager", "cpu auto")  # device and kernels


def kernels(smoke: bool) -> dict[str, Shape]:
    """The shapes of the kernel table."""
    return SMALL_KERNELS if smoke else KERNELS


def models(smoke: bool) -> dict[str, Shape]:
    """The models that are made."""
    return SMALL_MODELS if smoke else MODELS


def tokens(smoke: bool) -> tuple[int, ...]:
    """Tokens of a step of the kernel table."""
    return (1, 20) if smoke else (1, 16, 512, 4096)


def fits(shape: Shape, encoding: str) -> bool:
    """Check that an encoding's blocks divide the sizes of a shape."""
    sizes = shape.hidden, shape.inner
    if encoding == "fp8":
        return all(size % min(FP8_BLOCK, size) == 0 for size in sizes)
    return encoding not in SUPER_BLOCKS or all(size % SUPER_BLOCK == 0 for size in sizes)


def encodings(smoke: bool) -> list[tuple[str, str]]:
    """(shape, encoding) of every row of the kernel table."""
    if smoke:
        return [("qwen3-30b-a3b", "int8"), ("qwen3-30b-a3b", "q4_k"), ("gpt-oss-120b", "mxfp4")]
    shapes = kernels(smoke).items()
    return [(name, kind) for kind in ENCODINGS for name, shape in shapes if fits(shape, kind)]


def cells(part: str, smoke: bool) -> list[str]:
    """The names of a part's cells, in the order in which they are measured."""
    if part == "tests":
        return ["parallel", "fills memory"]
    if part == "kernels":
        table = [f"{shape}:{encoding}" for shape, encoding in encodings(smoke)]
        plain = [f"{shape}:{GROUPED}" for shape in kernels(smoke)]
        return ["memory", "compile", *plain, *table, "sanitizer"]
    if part == "demo":
        return ["cpu eager"] if smoke else list(RUNS)
    shares = ("100%", "25%") if smoke else SHARES
    each = ["link", "transformers", *(f"tier {share}" for share in shares)]
    each += [f"copies {share}" for share in shares[1:]]
    each += ["co-compute 25%", "trace 25%"]
    return [f"{model}:{cell}" for model in models(smoke) for cell in each]

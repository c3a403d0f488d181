"""Measure the exported model and write the results into its card.

    python models/training/evaluate.py

Held-out perplexity by domain, how the router uses the experts (by domain, between neighbouring
tokens, in popularity), samples, and the loss curve. The tables replace what stands between the
``results`` markers of ``models/demo/README.md``; the figure is ``models/demo/loss.png``.
"""

from __future__ import annotations

import argparse
import csv
import math
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import data
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3MoeForCausalLM,
)

ROW = 512
PROMPTS = {
    "c": "static int ",
    "python": 'def read(self, size=-1):\n    """',
    "docs": "The following",
    "man-en": "NAME\n\nfree - ",
    "man-de": "BESCHREIBUNG\n\nDas Programm",
    "man-fr": "DESCRIPTION\n\nLa fonction",
    "man-es": "DESCRIPCIÓN\n\nLa función",
    "man-ru": "ОПИСАНИЕ\n\nФункция",
    "stories": "The captain looks at you and says,",
    "dictionary": "castle\n    n 1:",
    "prose": "The problem with",
    "scripture": "1 And the LORD spake unto",
}
QUESTIONS = ["Hello!", "What is a river?", "What does ls do?", "Tell me a story.", "Was macht tar?"]


@dataclass
class Measured:
    """One domain's held-out loss and routing."""

    nats: float
    bytes_a_token: float
    tokens: int
    use: np.ndarray  # [layers, experts], shares of the requests
    overlap: float  # share of a token's experts that the token before had chosen in that layer


class Routing:
    """The experts chosen in each layer of the latest forward pass."""

    def __init__(self, model: Qwen3MoeForCausalLM) -> None:
        self.chosen: list[torch.Tensor] = []
        for module in model.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(
                    lambda _module, _arguments, output: self.chosen.append(output[2])
                )

    def take(self) -> torch.Tensor:
        """[layers, tokens, top_k]"""
        taken, self.chosen = torch.stack(self.chosen), []
        return taken


@torch.no_grad()
def measure(
    model: Qwen3MoeForCausalLM,
    routing: Routing,
    tokenizer: PreTrainedTokenizerFast,
    domain: data.Domain,
    limit: int,
) -> Measured:
    config = model.config
    available = domain.tokens[: min(limit, len(domain.tokens) - 1) + 1].astype(np.int64)
    use = np.zeros((config.num_hidden_layers, config.num_experts))
    nats, count, shared, pairs = 0.0, 0, 0, 0
    for at in range(0, len(available) - 1, ROW):
        row = torch.from_numpy(available[at : at + ROW + 1])
        logits = model(input_ids=row[None, :-1], use_cache=False).logits[0].float()
        nats += F.cross_entropy(logits, row[1:], reduction="sum").item()
        count += len(row) - 1
        chosen = routing.take()
        for layer, ids in enumerate(chosen):
            use[layer] += np.bincount(ids.flatten().numpy(), minlength=config.num_experts)
        shared += int((chosen[:, 1:, :, None] == chosen[:, :-1, None, :]).sum())
        pairs += chosen[:, 1:].numel()
    size = len(tokenizer.decode(available[1:], skip_special_tokens=True).encode())
    return Measured(
        nats / count, size / count, count, use / use.sum(1, keepdims=True), shared / pairs
    )


def generate(
    model: Qwen3MoeForCausalLM,
    routing: Routing,
    tokenizer: PreTrainedTokenizerFast,
    prompt: str,
    is_chat: bool,
    length: int,
) -> str:
    if is_chat:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not is_chat)
    torch.manual_seed(1)
    out = model.generate(
        **inputs, max_new_tokens=length, do_sample=True, temperature=0.6, top_p=0.9, top_k=40
    )
    routing.chosen.clear()
    new = out[0] if not is_chat else out[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True).strip()


def cells(*values: object) -> str:
    return "| " + " | ".join(map(str, values)) + " |"


def domain_table(measured: dict[str, Measured], experts: int, top_k: int) -> list[str]:
    quarter = experts // 4

    def busiest(use: np.ndarray) -> float:
        return float(np.sort(use, axis=1)[:, -quarter:].sum(1).mean())

    def bits(m: Measured) -> float:
        return m.nats / m.bytes_a_token / math.log(2)

    lines = [
        cells(
            "domain",
            "held-out tokens",
            "perplexity per token",
            "bits per byte",
            "requests to its busiest quarter of the experts",
            "experts shared with the token before",
        ),
        cells(*["---"] * 6),
    ]
    for name, m in measured.items():
        perplexity = f"{math.exp(m.nats):.1f}"
        lines.append(
            cells(
                name,
                m.tokens,
                perplexity,
                f"{bits(m):.2f}",
                f"{busiest(m.use):.0%}",
                f"{m.overlap:.1%}",
            )
        )
    all_of_them = list(measured.values())
    use = np.mean([m.use for m in all_of_them], axis=0)
    lines.append(
        cells(
            "**mean of the domains**",
            sum(m.tokens for m in all_of_them),
            f"{math.exp(np.mean([m.nats for m in all_of_them])):.1f}",
            f"{np.mean([bits(m) for m in all_of_them]):.2f}",
            f"{np.mean([busiest(m.use) for m in all_of_them]):.0%}",
            f"{np.mean([m.overlap for m in all_of_them]):.1%}",
        )
    )
    lines.append(cells("*the same experts for all domains*", "", "", "", f"{busiest(use):.0%}", ""))
    lines.append(
        cells("*uniform routing*", "", "", "", f"{quarter / experts:.0%}", f"{top_k / experts:.1%}")
    )
    return lines


def layer_table(measured: dict[str, Measured]) -> list[str]:
    use = np.array([m.use for m in measured.values()])  # [domains, layers, experts]
    mean = use.mean(0)
    ratio = np.maximum(use, 1e-12) / np.maximum(mean, 1e-12)
    information = (use * np.log2(ratio)).sum(2).mean(0)
    lines = [
        cells("layer", "bits about the domain", "busiest expert", "least used expert", "unused"),
        cells(*["---"] * 5),
    ]
    for layer, shares in enumerate(mean):
        unused = int((shares == 0).sum())
        most, least = f"{shares.max():.1%}", f"{shares.min():.2%}"
        lines.append(cells(layer, f"{information[layer]:.2f}", most, least, unused))
    return lines


def training_line(log: Path) -> str:
    """What the run was, from its log."""
    with log.open(newline="") as file:
        rows = list(csv.DictReader(file))
    end = rows[-1]
    loss = np.mean([float(row["loss"]) for row in rows[-50:]])
    held_out = [row["heldout"] for row in rows if row["heldout"]][-1]
    return (
        f"Training: {end['step']} steps, {int(end['tokens']) / 1e6:.1f} million tokens,"
        f" {float(end['seconds']) / 60:.0f} minutes. Loss at the end: {loss:.2f} nats a token"
        f" (mean of the last 50 steps), {float(held_out):.2f} held out."
    )


def results(
    training: str,
    measured: dict[str, Measured],
    experts: int,
    top_k: int,
    samples: list[tuple[str, str]],
) -> str:
    """The tables and samples of the card."""
    shown = [
        line
        for name, text in samples
        for line in (f"**{name}**", "", "````text", text.replace("````", "```"), "````", "")
    ]
    return "\n".join(
        [
            training,
            "",
            "### Held-out perplexity and routing by domain",
            "",
            *domain_table(measured, experts, top_k),
            "",
            "Routing by layer: what a request's expert says about its domain (mutual information,"
            f" of {math.log2(len(measured)):.1f} bits), and popularity over all domains"
            f" (an even expert would get {1 / experts:.1%} of the requests).",
            "",
            *layer_table(measured),
            "",
            "### Samples",
            "",
            "Temperature 0.6, top-p 0.9, top-k 40, seed 1, not selected. Each begins with its"
            " prompt.",
            "",
            *shown,
        ]
    )


def draw(log: Path, target: Path) -> None:
    """The loss curve: training loss smoothed, held-out loss as measured."""
    with log.open(newline="") as file:
        rows = list(csv.DictReader(file))
    tokens = np.array([int(row["tokens"]) for row in rows]) / 1e6
    loss = np.array([float(row["loss"]) for row in rows])
    window = max(1, min(50, len(loss) // 20))
    smooth = np.convolve(loss, np.ones(window) / window, mode="valid")
    held_out = [(int(row["tokens"]) / 1e6, float(row["heldout"])) for row in rows if row["heldout"]]
    figure, axis = plt.subplots(figsize=(7, 4), dpi=110)
    axis.plot(tokens, loss, color="tab:blue", alpha=0.15, linewidth=0.7)
    axis.plot(
        tokens[window - 1 :], smooth, color="tab:blue", label=f"training (mean of {window} steps)"
    )
    axis.plot(
        *zip(*held_out, strict=True),
        "o-",
        color="tab:orange",
        markersize=3,
        label="held out (domains weigh the same)",
    )
    axis.set(
        xlabel="training tokens (millions)",
        ylabel="cross entropy (nats a token)",
        ylim=(min(smooth) - 0.4, 8.5),
    )
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"))
    parser.add_argument("--model", type=Path, default=Path("models/demo"))
    parser.add_argument("--log", type=Path, default=Path(".corpus/run/log.csv"))
    parser.add_argument("--tokens", type=int, default=12288, help="held-out tokens per domain")
    parser.add_argument("--sample-length", type=int, default=90)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    # The shipped bfloat16 weights, computed in float32.
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    routing = Routing(model)
    measured = {}
    for name, domain in data.load(options.corpus, "heldout", tokenizer).items():
        measured[name] = measure(model, routing, tokenizer, domain, options.tokens)
        print(f"{name:12s} {measured[name].nats:.3f} nats a token", flush=True)
    samples = [
        (name, generate(model, routing, tokenizer, prompt, False, options.sample_length))
        for name, prompt in PROMPTS.items()
    ]
    for question in QUESTIONS:
        answer = generate(model, routing, tokenizer, question, True, options.sample_length)
        samples.append(("chat", f"user: {question}\nassistant: {answer}"))
    experts, top_k = model.config.num_experts, model.config.num_experts_per_tok
    table = results(training_line(options.log), measured, experts, top_k, samples)
    card = options.model / "README.md"
    begin, end = "<!-- results -->", "<!-- end of results -->"
    text = card.read_text(encoding="utf-8") if card.exists() else f"{begin}\n{end}\n"
    before, _, rest = text.partition(begin)
    card.write_text(f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}", encoding="utf-8")
    draw(options.log, options.model / "loss.png")
    print(table)


if __name__ == "__main__":
    main()

"""Train the demo model: a small Qwen3-MoE, from nothing, on the multi-domain corpus.

    python models/training/train.py --minutes 45

Warm-up, a long stretch at full rate, then a linear decay to zero over the last part, by wall time
(``--minutes``) or by steps (``--steps``). Killed at any moment, the same command goes on from the
last checkpoint. Batches depend on the seed and the step alone, so a run by steps that was
interrupted sees the same rows. The state before the decay stays in ``stable.pt``: copied over
``last.pt`` and run with more minutes, training goes on from there.

On a CPU each core computes its own micro-batch in one thread: small products gain nothing from
two threads, and lose much when another process holds one of the cores. On a CUDA device one
worker computes everything in bfloat16 autocast with transformers' grouped experts.
"""

from __future__ import annotations

import argparse
import csv
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import data
import experts
import numpy as np
import torch
from optimizer import Optimizer
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

LOGGED = ["step", "tokens", "seconds", "loss", "balance", "rate", "heldout"]
SHORT_ROW = 256
# Rows of the decay, and how likely each length: long positions are learned here, cheaply.
LONG_ROWS = {256: 0.5, 512: 0.25, 1024: 0.15, 2048: 0.10}
HELD_OUT_ROWS, HELD_OUT_LENGTH = 2, 512


def configuration(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeConfig:
    """About 9.4 million parameters, of which a token uses 2.3 million."""
    return Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=160,
        intermediate_size=256,  # no dense layer uses it; it must be there
        moe_intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=5,
        num_key_value_heads=5,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        router_aux_loss_coef=0.02,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


class TiedCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of ``hidden @ embedding.T``; the gradients are made in the forward pass,
    in pieces, so that the logits are never all in memory."""

    @staticmethod
    def forward(ctx, hidden: Tensor, embedding: Tensor, labels: Tensor) -> Tensor:
        d_hidden, d_embedding = torch.empty_like(hidden), torch.zeros_like(embedding)
        total = hidden.new_zeros(())
        for a in range(0, len(labels), 512):
            piece, wanted = hidden[a : a + 512], labels[a : a + 512, None]
            logits = piece @ embedding.t()
            normaliser = logits.logsumexp(1, keepdim=True)
            total += (normaliser - logits.gather(1, wanted)).sum()
            logits.sub_(normaliser).exp_()
            logits.scatter_add_(1, wanted, -torch.ones_like(normaliser))
            torch.mm(logits, embedding, out=d_hidden[a : a + 512])
            d_embedding.addmm_(logits.t(), piece)
        ctx.save_for_backward(d_hidden, d_embedding)
        ctx.count = len(labels)
        return total / len(labels)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        d_hidden, d_embedding = ctx.saved_tensors
        return d_hidden * (grad / ctx.count), d_embedding * (grad / ctx.count), None


class Trainer:
    """The model, what it sees, and one step of training."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.on_gpu = self.device.type == "cuda"
        self.workers = 1 if self.on_gpu else options.workers
        torch.set_num_threads(1 if not self.on_gpu else os.cpu_count() or 1)
        self.tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
        torch.manual_seed(options.seed)
        config = configuration(self.tokenizer)
        experts.register()
        implementation = "grouped_mm" if self.on_gpu else experts.NAME
        self.model = Qwen3MoeForCausalLM._from_config(
            config, experts_implementation=implementation, dtype=torch.float32
        )
        self.model.to(self.device).train()
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = Optimizer(self.parameters)
        self.pool = ThreadPoolExecutor(self.workers)
        self.local = threading.local()  # each worker's routing, layer by layer
        for module in self.model.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(self._keep_routing)
        self.train = data.load(options.corpus, "train", self.tokenizer)
        self.held_out = data.load(options.corpus, "heldout", self.tokenizer)
        self.step, self.tokens, self.seconds = 0, 0, 0.0

    def _keep_routing(
        self, module: nn.Module, arguments: tuple, output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        self.local.routing.append((output[0], output[2]))

    def losses(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropy, and how uneven the routing is (1 is even), over one micro-batch."""
        self.local.routing = []
        rows = rows.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.on_gpu):
            hidden = self.model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
        labels = rows[:, 1:].flatten()
        hidden = hidden.flatten(0, 1).float()
        loss = TiedCrossEntropy.apply(hidden, self.model.lm_head.weight, labels)
        uneven = []
        for logits, chosen in self.local.routing:
            probability = logits.float().softmax(-1).mean(0)
            used = torch.bincount(chosen.flatten(), minlength=len(probability)) / chosen.numel()
            uneven.append(len(probability) * (probability * used).sum())
        return loss, torch.stack(uneven).mean()

    def micro_batch(self, index: int, length: int) -> tuple[float, float, tuple[Tensor, ...]]:
        rows = data.batch(
            self.train,
            (self.options.seed, self.step, index),
            self.options.micro_tokens // length,
            length,
        )
        loss, uneven = self.losses(rows)
        total = loss + self.model.config.router_aux_loss_coef * uneven
        return (
            loss.item(),
            uneven.item(),
            torch.autograd.grad(total, list(self.parameters.values())),
        )

    def progress(self) -> float:
        """How much of the run is done, from 0 to 1."""
        if self.options.steps:
            return self.step / self.options.steps
        return self.seconds / (60 * self.options.minutes)

    def rate(self) -> float:
        """The schedule's factor on both learning rates."""
        left = max(0.0, 1 - self.progress())
        return min(1.0, (self.step + 1) / self.options.warmup, left / self.options.decay)

    def train_step(self) -> dict[str, float]:
        rate = self.rate()
        decaying = self.progress() > 1 - self.options.decay
        draw = np.random.default_rng((self.options.seed, self.step, 1 << 20))
        lengths = [
            int(draw.choice(list(LONG_ROWS), p=list(LONG_ROWS.values()))) if decaying else SHORT_ROW
            for _ in range(self.options.micro_batches)
        ]
        # Longest first, so that the workers end together.
        results = list(
            self.pool.map(self.micro_batch, range(len(lengths)), sorted(lengths, reverse=True))
        )
        gradients = [
            torch.stack(parts).mean(0) for parts in zip(*(r[2] for r in results), strict=True)
        ]
        self.optimizer.step(
            dict(zip(self.parameters, gradients, strict=True)),
            self.options.muon_rate * rate,
            self.options.adam_rate * rate,
            self.pool,
        )
        self.step += 1
        self.tokens += self.options.micro_tokens * len(lengths)
        return {
            "loss": sum(r[0] for r in results) / len(results),
            "balance": sum(r[1] for r in results) / len(results),
            "rate": rate,
        }

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean loss over the domains, each weighing the same, on the same rows every time."""
        rows = []
        for domain in self.held_out.values():
            rng = np.random.default_rng(0)
            rows.append(
                torch.from_numpy(
                    np.stack(
                        [domain.row(rng, HELD_OUT_LENGTH + 1) for _ in range(HELD_OUT_ROWS)]
                    ).astype(np.int64)
                )
            )
        return float(np.mean(list(self.pool.map(lambda r: self._loss_only(r), rows))))

    @torch.no_grad()
    def _loss_only(self, rows: Tensor) -> float:
        return self.losses(rows)[0].item()

    def save(self, path: Path) -> None:
        """Written beside and renamed: a kill leaves a whole checkpoint, old or new."""
        partial = path.with_suffix(".partial")
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "seconds": self.seconds,
        }
        torch.save(state | {"step": self.step, "tokens": self.tokens}, partial)
        partial.replace(path)

    def resume(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]


def trimmed_log(path: Path, step: int) -> list[dict[str, str]]:
    """The log's rows up to a step: what was logged after the checkpoint is done again."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["step"] and int(row["step"]) <= step]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"))
    parser.add_argument("--tokenizer", type=Path, default=Path(".corpus/tokenizer"))
    parser.add_argument(
        "--run", type=Path, default=Path(".corpus/run"), help="checkpoints and log.csv"
    )
    parser.add_argument(
        "--minutes", type=float, default=45, help="length of the run, over all resumptions"
    )
    parser.add_argument(
        "--steps", type=int, default=0, help="length of the run in steps, instead of minutes"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count(),
        help="threads that each compute micro-batches (CPU)",
    )
    parser.add_argument("--micro-tokens", type=int, default=2048)
    parser.add_argument("--micro-batches", type=int, default=2, help="micro-batches a step")
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--adam-rate", type=float, default=0.004)
    parser.add_argument("--warmup", type=int, default=20, help="steps")
    parser.add_argument("--decay", type=float, default=0.3, help="share of the run that decays")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-every", type=float, default=120, help="seconds between checkpoints")
    parser.add_argument(
        "--heldout-every", type=int, default=100, help="steps between held-out losses"
    )
    options = parser.parse_args()

    options.run.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(options)
    last, stable, log_path = (
        options.run / "last.pt",
        options.run / "stable.pt",
        options.run / "log.csv",
    )
    if last.exists():
        trainer.resume(last)
        print(f"going on from step {trainer.step}", flush=True)
    kept = trimmed_log(log_path, trainer.step)
    with log_path.open("w", newline="") as file:
        log = csv.DictWriter(file, LOGGED)
        log.writeheader()
        log.writerows(kept)
        saved = mark = time.monotonic()
        while trainer.progress() < 1:
            before_decay = trainer.progress() <= 1 - options.decay
            row = trainer.train_step()
            now = time.monotonic()
            trainer.seconds, mark = trainer.seconds + now - mark, now
            ending = trainer.progress() >= 1
            row |= {
                "step": trainer.step,
                "tokens": trainer.tokens,
                "seconds": round(trainer.seconds, 1),
            }
            if trainer.step % options.heldout_every == 0 or ending:
                row["heldout"] = trainer.held_out_loss()
            if before_decay and trainer.progress() > 1 - options.decay:
                trainer.save(stable)
            if now - saved > options.save_every or ending:
                trainer.save(last)
                saved = now
            log.writerow(
                {
                    key: f"{value:.4f}" if isinstance(value, float) else value
                    for key, value in row.items()
                }
            )
            file.flush()
            if trainer.step % 10 == 0:
                print(
                    " ".join(
                        f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
                        for key, value in row.items()
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()

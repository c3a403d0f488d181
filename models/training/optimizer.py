"""Muon for the matrices, Adam for the rest, in one small optimizer.

Muon (Jordan and others, 2024) replaces a matrix's momentum by the nearest orthogonal matrix, found
with five Newton-Schulz iterations. On few tokens it learns clearly faster than Adam. The fused
expert tensors are batches of matrices, so all experts of a layer go through it in one call.
"""

from __future__ import annotations

from concurrent.futures import Executor

import torch
from torch import Tensor

MUON_MOMENTUM = 0.95
ADAM_BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.02


def orthogonalised(matrices: Tensor) -> Tensor:
    """Nearest orthogonal matrices of a batch [n, rows, columns], approximately."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(b * gram, gram, gram, beta=1, alpha=c) @ x
    return x.mT if tall else x


class Optimizer:
    """State of every parameter by name; ``step`` spreads the parameters over an executor."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        self.parameters = parameters
        self.steps = 0
        self.first = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.second = {
            name: torch.zeros_like(p) for name, p in parameters.items() if not self.is_muon(name)
        }

    @staticmethod
    def is_muon(name: str) -> bool:
        return "_proj" in name

    def state_dict(self) -> dict[str, object]:
        return {"steps": self.steps, "first": self.first, "second": self.second}

    def load_state_dict(self, state: dict) -> None:
        self.steps = state["steps"]
        for kept, loaded in ((self.first, state["first"]), (self.second, state["second"])):
            for name in kept:
                kept[name].copy_(loaded[name])

    @torch.no_grad()
    def step(
        self, gradients: dict[str, Tensor], muon_rate: float, adam_rate: float, pool: Executor
    ) -> None:
        self.steps += 1
        tasks = [
            pool.submit(
                self._muon if self.is_muon(name) else self._adam,
                name,
                gradient,
                muon_rate if self.is_muon(name) else adam_rate,
            )
            for name, gradient in gradients.items()
        ]
        for task in tasks:
            task.result()

    @torch.no_grad()
    def _muon(self, name: str, gradient: Tensor, rate: float) -> None:
        parameter, momentum = self.parameters[name], self.first[name]
        momentum.lerp_(gradient, 1 - MUON_MOMENTUM)
        update = gradient.lerp(momentum, MUON_MOMENTUM)
        shape = update.shape
        matrices = update if update.dim() == 3 else update[None]
        if "gate_up" in name:  # two matrices a expert, stacked: gate, then up
            matrices = matrices.reshape(-1, shape[1] // 2, shape[2])
        scale = max(1.0, matrices.shape[1] / matrices.shape[2]) ** 0.5
        parameter.mul_(1 - rate * WEIGHT_DECAY)
        parameter.add_(orthogonalised(matrices).reshape(shape), alpha=-rate * scale)

    @torch.no_grad()
    def _adam(self, name: str, gradient: Tensor, rate: float) -> None:
        first, second = self.first[name], self.second[name]
        first.lerp_(gradient, 1 - ADAM_BETAS[0])
        second.lerp_(gradient.square(), 1 - ADAM_BETAS[1])
        unbiased = first / (1 - ADAM_BETAS[0] ** self.steps)
        spread = (second / (1 - ADAM_BETAS[1] ** self.steps)).sqrt_().add_(1e-10)
        self.parameters[name].addcdiv_(unbiased, spread, value=-rate)

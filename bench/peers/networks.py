"""The three networks and their data in torch alone, for peers whose environment lacks coterie.

``tests/test_peers.py`` holds them to ``coterie.networks.registry``: same shapes, same outputs.
"""

from typing import Any

import torch
from torch import Tensor, nn


def network(model: str) -> nn.Sequential:
    """W1's, W2's or W3's network on 1x28x28."""
    layers: dict[str, list[nn.Module]] = {
        "mlp": [nn.Flatten(), *dense(784, 200)],
        "lenet5": [
            *convolution(1, 6, padding=2),
            *convolution(6, 16, padding=0),
            nn.Flatten(),
            *dense(400, 120),
            *dense(120, 84),
        ],
        "fedavg_cnn": [
            *convolution(1, 32, padding=2),
            *convolution(32, 64, padding=2),
            nn.Flatten(),
            *dense(3136, 512),
        ],
    }
    widths = {"mlp": 200, "lenet5": 84, "fedavg_cnn": 512}
    return nn.Sequential(*layers[model], nn.Linear(widths[model], 10))


def convolution(inputs: int, outputs: int, padding: int) -> list[nn.Module]:
    """5x5, ReLU, pool."""
    return [nn.Conv2d(inputs, outputs, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]


def dense(inputs: int, outputs: int) -> list[nn.Module]:
    """Fully connected, ReLU."""
    return [nn.Linear(inputs, outputs), nn.ReLU()]


def data(spec: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Every client's inputs and labels."""
    total = spec["clients"] * spec["samples"]
    x = torch.randn(total, *spec["shape"], generator=torch.Generator().manual_seed(0))
    y = torch.arange(total) % 10
    return list(zip(x.split(spec["samples"]), y.split(spec["samples"]), strict=True))


def size(module: nn.Module) -> int:
    """How many parameters it has."""
    return sum(p.numel() for p in module.parameters())

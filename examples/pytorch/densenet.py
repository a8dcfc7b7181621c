"""A densely connected network (Huang, Liu, van der Maaten and Weinberger 2017) with group normalisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    """Normalise, mix channels, look around; what came in goes on beside what comes out."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.first, self.mix = norm(channels), nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.second, self.look = norm(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.look(functional.relu(self.second(self.mix(functional.relu(self.first(x))))))
        return torch.cat([x, made], 1)


def norm(channels: int) -> nn.GroupNorm:
    """Groups of some 8 channels: batch normalisation would mix records."""
    return nn.GroupNorm(max(g for g in range(1, channels // 8 + 2) if channels % g == 0), channels)


def densenet(
    blocks: Sequence[int] = (6, 12, 24, 16), growth: int = 32, start: int = 64, channels: int = 3, classes: int = 10
) -> nn.Sequential:
    """DenseNet-121 by default, with a first layer for small images."""
    made: list[nn.Module] = [nn.Conv2d(channels, start, 3, padding=1, bias=False)]
    width = start
    for number, layers in enumerate(blocks):
        if number:
            made += [norm(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
            width //= 2
        for _ in range(layers):
            made.append(Layer(width, growth))
            width += growth
    made += [norm(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)]
    return nn.Sequential(*made)

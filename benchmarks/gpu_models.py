"""Models that people train on GPUs, by torch alone: a GPT and a ResNet-50, and one training step of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional
from workloads import GPT

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT and of its batch."""

    layers: int
    heads: int
    width: int
    batch: int
    length: int
    vocabulary: int = 50_304


GPT_124M = Shape(12, 12, 768, 16, 1024)
GPT_1300M = Shape(24, 16, 2048, 4, 1024)
GPT_TINY = Shape(2, 2, 32, 2, 16, 64)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.path = nn.Sequential(
            *(nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        same = stride == 1 and inside == out
        self.short = (
            nn.Identity() if same else nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images to images."""
        return functional.relu(self.path(x) + self.short(x))


class ResNet(nn.Module):
    """ResNet-50 with the default depths."""

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64) -> None:
        super().__init__()
        stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        layers: list[nn.Module] = [*stem, nn.MaxPool2d(3, 2, 1)]
        inside = width
        for stage, depth in enumerate(depths):
            for number in range(depth):
                layers.append(Bottleneck(inside, width << stage, 2 if stage and not number else 1))
                inside = 4 * (width << stage)
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(inside, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images to logits."""
        logits = self.head(self.layers(x).mean((2, 3)))
        return logits  # noqa: RET504  # as above


def gpt(shape: Shape, device: torch.device, *, compiled: bool = False) -> Callable[[], None]:
    """One training step of a GPT in bfloat16 with AdamW, fused where there is such a kernel."""
    torch.manual_seed(0)
    model = GPT(shape.width, shape.layers, shape.heads, shape.vocabulary, shape.length)
    model.head.weight = model.tokens.weight
    model.to(device, torch.bfloat16)
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    ids = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1), device=device)

    def step() -> None:
        logits = run(ids[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def resnet(device: torch.device, *, tiny: bool = False, compiled: bool = False) -> Callable[[], None]:
    """One training step of a ResNet-50 under autocast, channels last, with SGD."""
    torch.manual_seed(0)
    model = (ResNet((1, 1), 4) if tiny else ResNet()).to(device, memory_format=torch.channels_last)
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.randn(2 if tiny else 128, 3, 32 if tiny else 224, 32 if tiny else 224, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (len(images),), device=device)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = functional.cross_entropy(run(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step

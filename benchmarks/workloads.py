"""Models and training steps that the benchmarks run, by torch alone.

On a CPU a GPT in four sizes, a CNN, an LSTM and many small tensors; on a GPU a GPT and a ResNet-50 of usual sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, width) to the same shape."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, width) to the same shape."""
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """A decoder that returns logits."""

    def __init__(self, width: int, depth: int = 6, heads: int = 8, vocabulary: int = 4096, length: int = 128) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens (batch, length) to logits (batch, length, vocabulary)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Tower(nn.Module):
    """Many small linear layers in a row."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, width) to the same shape."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Recurrent(nn.Module):
    """An LSTM classifier."""

    def __init__(self) -> None:
        """Build two layers of width 256."""
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(1000, 128), nn.LSTM(128, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens (batch, length) to logits (batch, 10)."""
        return self.head(self.lstm(self.embedding(tokens))[0][:, -1])


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


def _convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128), (128, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4, 10))


def _step(model: nn.Module, batch: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        output = model(batch)
        if output.dtype.is_floating_point and target.dtype.is_floating_point:
            loss = functional.mse_loss(output, target)
        else:
            loss = functional.cross_entropy(output.view(-1, output.shape[-1]), target.view(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def _gpt(width: int, depth: int = 6) -> Callable[[], None]:
    tokens = torch.randint(4096, (8, 129))
    return _step(GPT(width, depth), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def large_gpt(shape: Shape, device: torch.device, *, compiled: bool = False) -> Callable[[], None]:
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


WORKLOADS: dict[str, Callable[[], Callable[[], None]]] = {
    "gpt d=256": lambda: _gpt(256),
    "gpt d=128": lambda: _gpt(128),
    "gpt d=512": lambda: _gpt(512),
    "gpt 2x64": lambda: _gpt(64, 2),
    "cnn": lambda: _step(_convolutions(), torch.randn(32, 3, 32, 32), torch.randint(10, (32,))),
    "lstm": lambda: _step(Recurrent(), torch.randint(1000, (16, 64)), torch.randint(10, (16,))),
    "200 layers of 8": lambda: _step(Tower(200, 8), torch.randn(16, 8), torch.randn(16, 8)),
    "200 small layers": lambda: _step(Tower(200, 32), torch.randn(16, 32), torch.randn(16, 32)),
}
"""Name to a function that builds the workload and returns one training step of it."""

"""Models and training steps that the benchmarks run: a GPT in three sizes, a CNN, an LSTM, many small tensors."""

from __future__ import annotations

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


def _gpt(width: int) -> Callable[[], None]:
    tokens = torch.randint(4096, (8, 129))
    return _step(GPT(width), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


WORKLOADS: dict[str, Callable[[], Callable[[], None]]] = {
    "gpt d=256": lambda: _gpt(256),
    "gpt d=128": lambda: _gpt(128),
    "gpt d=512": lambda: _gpt(512),
    "cnn": lambda: _step(_convolutions(), torch.randn(32, 3, 32, 32), torch.randint(10, (32,))),
    "lstm": lambda: _step(Recurrent(), torch.randint(1000, (16, 64)), torch.randint(10, (16,))),
    "200 layers of 8": lambda: _step(Tower(200, 8), torch.randn(16, 8), torch.randn(16, 8)),
    "200 small layers": lambda: _step(Tower(200, 32), torch.randn(16, 32), torch.randn(16, 32)),
}
"""Name to a function that builds the workload and returns one training step of it."""

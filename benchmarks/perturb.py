"""Twenty pairs of runs: does `diff --noise PERTURBED` tell a fault at the size of rounding from rounding itself?

A small GPT trains for some steps. Five variants compute the same in another order or by another kernel (threads, a
fused optimizer, SDPA, torch.compile, a product in two halves); five hold a small fault (an eps, an activation that
goes through bfloat16, a constant of GELU, the scale of attention, label smoothing). Each is compared with the plain run
three times: bit by bit, with a fixed tolerance, and with a run that began one rounding beside it. The table says what
came out, and for a fault whether the module named is the one that holds it. Ten more pairs are of a convolutional net,
an LSTM and a ViT (`fixtures/perturbed.py`).

    python benchmarks/perturb.py [--steps 60] [--seeds 1] [--keep DIRECTORY]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from cases import introspect

SCRIPT = """
import sys
import torch
from torch import nn
from torch.nn import functional as F

variant, steps = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(2 if variant == "threads" else 1)
torch.manual_seed(0)
D, H, L, V, T = 64, 4, 4, 128, 32


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.scale = (D // H) ** -0.5

    def forward(self, x):
        q, k, v = (t.view(*x.shape[:2], H, D // H).transpose(1, 2) for t in self.qkv(x).split(D, -1))
        if variant == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        else:
            scores = (q @ k.transpose(-1, -2)) * self.scale
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            y = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Gelu(nn.Module):
    c = 0.044715

    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + self.c * x * x * x)))


class Halves(nn.Linear):
    def forward(self, x):
        half = self.in_features // 2
        return x[..., half:] @ self.weight[:, half:].T + x[..., :half] @ self.weight[:, :half].T + self.bias


class RoundTrip(nn.Linear):
    def forward(self, x):
        return super().forward(x).bfloat16().float()


class Block(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.ln1, self.ln2, self.attn, self.act = nn.LayerNorm(D), nn.LayerNorm(D), Attention(), Gelu()
        up = {("halves", 1): Halves, ("bf16", 2): RoundTrip}.get((variant, place), nn.Linear)
        self.up, self.down = up(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.down(self.act(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList(Block(place) for place in range(L))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V)

    def forward(self, x):
        h = self.tok(x) + self.pos(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


model = GPT()
if variant == "eps":
    model.blocks[1].ln2.eps = 1.01e-5
if variant == "gelu":
    model.blocks[2].act.c = 0.0447
if variant == "scale":
    model.blocks[3].attn.scale *= 1 + 2e-5
extra = {"fused": True} if variant == "fused" else {"foreach": True}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **extra)
run = torch.compile(model) if variant == "compile" else model
data = torch.Generator().manual_seed(1)
for _ in range(steps):
    x = torch.randint(0, V, (8, T), generator=data).cumsum(1) % V
    smoothing = 1e-6 if variant == "smoothing" else 0.0
    loss = F.cross_entropy(run(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten(), label_smoothing=smoothing)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

BENIGN = {
    "threads": "1 thread against 2",
    "fused": "AdamW foreach against fused",
    "sdpa": "attention by plain operators against SDPA",
    "compile": "eager against torch.compile",
    "halves": "a product summed in two halves",
}
FAULTS = {
    "eps": ("eps of a LayerNorm 1e-5 -> 1.01e-5", "GPT.blocks.1.ln2"),
    "bf16": ("an activation through bfloat16", "GPT.blocks.2.up"),
    "gelu": ("a constant of GELU 0.044715 -> 0.0447", "GPT.blocks.2.act"),
    "scale": ("the scale of attention times 1 + 2e-5", "GPT.blocks.3.attn"),
    "smoothing": ("label smoothing 0 -> 1e-6", "grad_output of GPT.head"),
}
SECOND = {
    "conv": {
        "channels_last": ("a convolutional net in channels_last", ""),
        "unfold": ("a convolution written as a product", ""),
        "eps": ("eps of a BatchNorm 1e-5 -> 1.02e-5", "Conv.blocks.2.norm"),
        "residual": ("a residual times 1 + 1e-6", "Conv.blocks.1"),
    },
    "lstm": {
        "cells": ("nn.LSTM against its cells written out", ""),
        "half": ("a bias through float16", "Lstm.head"),
    },
    "vit": {
        "sdpa": ("a ViT's attention by plain operators against SDPA", ""),
        "fused": ("AdamW foreach against fused, a ViT", ""),
        "floor": ("1e-6 for each place added to the scores", "Vit.blocks.2.attn"),
        "decay": ("weight decay 0.01 -> 0.0101", "param of Vit."),
    },
}
"""Ten more of other models, which were not there when the thresholds were chosen: words, and where a fault is."""
MODELS = Path(__file__).resolve().parent.parent / "fixtures" / "perturbed.py"
TOLERANCES = (1e-6, 1e-5)


def answered(a: Path, b: Path, *options: str) -> tuple[str, str]:
    """`same` and the like, and where the first divergence is: step and module."""
    document = json.loads(introspect("diff", str(a), str(b), "--format", "json", *options).stdout)
    first = document["first"]
    return document["verdict"], f"step {first['step']}, {first['kind']} of {first['fqn']}" if first else ""


def main() -> None:
    """Make the runs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=1, help="perturbed runs")
    parser.add_argument("--keep", type=Path, help="where the runs stay; those that are there are not made again")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        script = folder / "train.py"
        script.write_text(SCRIPT, encoding="utf-8")

        def capture(name: str, *words: str, options: tuple[str, ...] = ()) -> Path:
            run = folder / name
            if (run / "manifest.yaml").exists():
                return run
            done = introspect("capture", "-q", "--force", "-o", str(run), *options, *words, str(given.steps))
            if done.returncode:
                raise SystemExit(f"{name}: {done.stderr}")
            return run

        print(f"{given.steps} steps, {given.seeds} perturbed\n")
        head = ["variant", "bits", *(f"rtol {rtol:g}" for rtol in TOLERANCES), "one rounding", "where it leaves"]
        print("| " + " | ".join(head) + " |\n" + "| --- " * len(head) + "|")
        right = total = 0
        gpt = {name: (words, "") for name, words in BENIGN.items()} | FAULTS
        for model, variants in {"gpt": gpt, **SECOND}.items():
            train = [str(script)] if model == "gpt" else [str(MODELS), model]
            plain = capture(f"{model}-plain", *train, "plain")
            noise: list[str] = []
            for seed in range(given.seeds):
                moved = capture(f"{model}-perturbed-{seed}", *train, "plain", options=("--perturb", str(seed)))
                noise += ["--noise", str(moved)]
            for name, (words, expected) in variants.items():
                run = capture(f"{model}-{name}", *train, name)
                cells = [answered(plain, run)[0]]
                cells += [answered(plain, run, "--rtol", str(rtol))[0] for rtol in TOLERANCES]
                verdict, where = answered(plain, run, *noise)
                total += 1
                right += (verdict == "diverged" and expected in where) if expected else verdict == "same"
                print("| " + " | ".join([words, *cells, verdict, where or "-"]) + " |", flush=True)
        print(f"\n{right} of {total} right by one rounding, the place of each fault included")


if __name__ == "__main__":
    main()

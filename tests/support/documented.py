"""The project in which the commands of the README and the reference are run: a script, its history, and runs of it."""

from __future__ import annotations

import shutil

import numpy as np
import torch
from logs import rewrite
from safetensors.torch import save_file

import introspect_cli
from introspect_cli.store.documents import encode_labels
from introspect_cli.store.frames import LABELS, STEP, Frame

TRAIN = """
import argparse

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.Linear(8, 8)
        self.mlp = nn.Linear(8, 8)

    def forward(self, x):
        x = x + self.attn(x)
        return x + 0.5 * self.mlp(x).tanh()


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.lm_head = nn.Linear(8, 16)

    def forward(self, x):
        x = self.wte(x)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=1)
    words = parser.parse_args()
    torch.manual_seed(0)
    net = GPT()
    optimizer = torch.optim.AdamW(net.parameters(), lr=words.lr)
    for _ in range(min(words.steps, 4)):
        x = torch.randint(16, (4, 6))
        loss = nn.functional.cross_entropy(net(x).flatten(0, 1), x.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
"""

FILES = {
    "train.py": TRAIN,
    "project/train.py": TRAIN,
    "project/__init__.py": "",
    "data/words": "",
    ".gitignore": "*\n!.gitignore\n!train.py\n!notes\n!/project\n!/project/*.py\n!/data\n!/data/*\n",
}

PREPARED = """
git init -q -b main . && git add . && git commit -qm "Train" && git tag v1.2 && git tag v1.4 && git branch my-branch
sed -i 's/0.5 . self.mlp/0.25 * self.mlp/' train.py && git commit -qam "Weigh the branch"
echo > notes && git add . && git commit -qm "Notes"
echo >> notes && git commit -qam "More notes"
introspect capture -q -o runA --save-tensors '*' train.py
introspect capture -q -o runB --save-tensors '*' train.py --lr 2e-3
introspect capture -q -o runA2 --perturb 0 train.py
introspect capture -q -o opA --level op train.py
introspect capture -q -o opB --level op train.py --lr 2e-3
introspect golden save -o golden train.py
introspect export runA --format yaml -o logs/introspection/fit
RANK=0 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=launch introspect capture -q -o node0/run train.py
RANK=1 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=launch introspect capture -q -o node1/run train.py
mkdir run && cp -rn node0/run/. run && cp -rn node1/run/. run
introspect pack node0/run -o node0.introspect.zip
introspect pack node1/run -o node1.introspect.zip
introspect pack runA -o reference.zip
mkdir -p experiments tests/golden
cp -r runA experiments/first && cp -r runB runC
cp -r golden tests/golden/gpt
"""
"""What makes the runs that the commands name, and the commits."""

PLACEHOLDERS = {
    "RUN": "runA", "RUN...": "node0/run node1/run", "RUN_B": "runB", "[RUN_B]": "runB", "A": "runA", "B": "runB",
    "PLACE": "tensorboard:shown", "DIR": "made", "FORMAT": "csv", "SOURCE": "dump", "SITE": "lm_head", "TEXT": "text",
    "PATH": "runA", "VERB": "diff",
}  # fmt: skip
"""What a reader puts in the place of a word of a sentence."""


def write_files(place):
    """What the commands read, but for runs."""
    for name, text in FILES.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)


def write_checkpoints(place):
    """What other tools would have written, of the values in runA; and runA as a framework would number its steps."""
    with introspect_cli.open_run(place / "runA") as run:
        state = {
            record.site.fqn.removeprefix("GPT."): torch.from_numpy(np.array(run.run.tensor(record.summary.checksum)))
            for record in run.records(3)
            if record.site.kind.value == "param"
        }
    for name in ("before.safetensors", "model.safetensors", "checkpoint-40/model.safetensors"):
        (place / name).parent.mkdir(exist_ok=True)
        save_file(state, place / name)
    other = {name: value * 1.5 for name, value in state.items()}
    save_file(other, place / "after.safetensors")
    shutil.copytree(place / "checkpoint-40", place / "checkpoint-500")
    (place / "checkpoint-1000").mkdir()
    save_file(other, place / "checkpoint-1000/model.safetensors")
    torch.save(state, place / "model.pt")
    torch.save({"state_dict": state}, place / "epoch=3-step=40.ckpt")
    for folder in ("dump", "mine"):
        (place / folder / "param").mkdir(parents=True)
        for name, value in state.items():
            np.save(place / folder / "param" / f"{name}.npy", value.numpy())
    rewrite(place / "runA/rank0", with_labels)


def with_labels(frame):
    """A frame, and before that of a step the labels of it."""
    step = frame.step
    labels = {"framework": "trainer", "epoch": 3, "batch": (9 + step, 9 + step)}
    return [Frame(LABELS, [encode_labels(labels)], step=step), frame] if frame.kind == STEP else [frame]

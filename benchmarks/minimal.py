"""Whether `diff` names the changed statement first, and `bisect --changes` finds the smallest set, in how many runs.

A planted fault is an edit of a fixture's text, hidden among edits that change no number: a variable renamed, a line
split, something else printed, an import, a helper. Some faults are two edits that only together do something, or come
beside two edits that cancel.

    python benchmarks/minimal.py [--only PATTERN] [--warm]
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cases import FIXTURES, introspect
from forks import Forks

from introspect_cli.compare.changes.statements import Change
from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.rerun.changes.search import prove
from introspect_cli.store.read.run import open_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.rerun.changes.minimise import Element

Edit = tuple[str, str]

_GPT = (
    ("import math\n", "import math\nimport os\n"),
    ("        for index, block in enumerate(self.blocks):\n            x = block(x)\n",
     "        for index, layer in enumerate(self.blocks):\n            x = layer(x)\n"),
    ("        x = x + self.attn(self.ln1(x))\n",
     "        attended = self.attn(self.ln1(x))\n        x = x + attended\n"),
    ("    decay, plain = [], []\n", "    decay = []\n    plain = []\n"),
    ("    data = torch.tensor([alphabet.index(character) for character in text])\n",
     "    at = {c: place for place, c in enumerate(alphabet)}\n    data = torch.tensor([at[c] for c in text])\n"),
    ('    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(alphabet)} characters")\n',
     "    print(sum(p.numel() for p in model.parameters()), len(alphabet), os.getpid())\n"),
    ('parser.add_argument("--seed", type=int, default=1337)',
     'parser.add_argument("--seed", type=int, default=1337, help="of the weights")'),
    ("def parse():\n", "def unused(x):\n    return x + 1\n\n\ndef parse():\n"),
)  # fmt: skip
_CNN = (
    ("    for index, (label, place) in enumerate(zip(labels.tolist(), places.tolist(), strict=True)):\n",
     "    rows = zip(labels.tolist(), places.tolist())\n    for index, (label, place) in enumerate(rows):\n"),
    ("        y += x\n        return torch.relu_(y)\n", "        y = y.add_(x)\n        return torch.relu_(y)\n"),
    ("        x = self.layer2(self.layer1(self.stem(images)))\n",
     "        x = self.stem(images)\n        x = self.layer1(x)\n        x = self.layer2(x)\n"),
    ('            print(f"step {step} loss {loss.item():.6f}")\n', '            print(f"{step}: {loss.item():.4f}")\n'),
    ("    model = model.to(memory_format=layout)\n",
     "    print(layout)\n    model = model.to(memory_format=layout)\n"),
    ("def main():\n", "def unused():\n    return 2\n\n\ndef main():\n    started = 0\n    print(started)\n"),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A fault.

    Attributes:
        name: what it is called.
        script: the fixture.
        fault: the edits that are the fault, each of one statement.
        base: edits of both versions.
        beside: edits that cancel, in b alone.
    """

    name: str
    script: str
    fault: tuple[Edit, ...]
    base: tuple[Edit, ...] = ()
    beside: tuple[Edit, ...] = ()


_GAIN = (
    ("class Attention(nn.Module):\n", "GAIN = 1.0\nUSES_GAIN = False\n\n\nclass Attention(nn.Module):\n"),
    ("        x = self.drop(x)\n", "        x = self.drop(x) * (GAIN if USES_GAIN else 1.0)\n"),
)

CASES = (
    Case("gpt activation", "train_gpt.py", (('"tanh" if fault == "gelu-tanh" else "none"', '"tanh"'),)),
    Case("gpt layer norm", "train_gpt.py", (('eps=1e-3 if fault == "layernorm-eps" else 1e-5', "eps=1e-3"),)),
    Case("gpt attention", "train_gpt.py", (('1 / width if self.fault == "scaled-attention" else None', "1 / width"),)),
    Case("gpt smoothing", "train_gpt.py", (('0.1 if self.fault == "label-smoothing" else 0.0', "0.1"),)),
    Case("gpt decay", "train_gpt.py", (("if parameter.dim() >= 2 or (", "if parameter.dim() >= 1 or ("),)),
    Case("gpt clipping", "train_gpt.py", (('"--clip", type=float, default=1.0', '"--clip", type=float, default=0.1'),)),
    Case("gpt start", "train_gpt.py", (("std=0.02", "std=0.03"),)),
    Case("gpt beta", "train_gpt.py", (("default=0.95", "default=0.98"),)),
    Case("gpt zero_grad", "train_gpt.py", (('and args.fault != "no-zero-grad"', "and step < 2"),)),
    Case("gpt targets", "train_gpt.py", (("rows[:, 1:]", "rows[:, :-1]"),)),
    Case("gpt pair", "train_gpt.py", (("GAIN = 1.0\n", "GAIN = 2.0\n"), ("GAIN = False", "GAIN = True")), base=_GAIN),
    Case("gpt two causes", "train_gpt.py", (("std=0.02", "std=0.03"), ("default=7)", "default=8)"))),
    Case(
        "gpt beside what cancels",
        "train_gpt.py",
        (('0.1 if self.fault == "label-smoothing" else 0.0', "0.1"),),
        beside=(
            ("            x = self.fc(x)\n", "            x = self.fc(x) * 2\n"),
            ("self.act(x.float())", "self.act(x.float() / 2)"),
        ),
    ),
    Case("cnn padding", "train_cnn.py", (('"reflect" if fault == "padding-reflect" else "zeros"', '"reflect"'),)),
    Case("cnn momentum", "train_cnn.py", (('momentum=0.01 if fault == "momentum-buffer" else 0.1', "momentum=0.01"),)),
    Case("cnn pool", "train_cnn.py", (('if fault == "pool-average" else', 'if fault != "x" else'),)),
    Case("cnn data", "train_cnn.py", (("images[index, 0, 2:4, 2:4] += 0.5", "images[index, 0, 2:4, 2:4] += 0.6"),)),
    Case("cnn loss", "train_cnn.py", (('"sum" if args.fault == "loss-sum" else "mean"', '"sum"'),)),
)


def edited(text: str, edits: tuple[Edit, ...]) -> str:
    """A text with edits, each of which has to be possible."""
    for before, after in edits:
        assert before in text, before
        text = text.replace(before, after, 1)
    return text


def measured(case: Case, directory: Path) -> tuple[bool, list[str]]:
    """Whether the smallest set is right, and the row of the table."""
    harmless = _GPT if "gpt" in case.script else _CNN
    before = edited((FIXTURES / case.script).read_text(), case.base)
    after = edited(edited(edited(before, case.fault), case.beside), harmless)
    wanted = [edit for _, edit in case.fault]
    for name, text in (("a", before), ("b", after)):
        (directory / name).mkdir()
        (directory / name / case.script).write_text(text)
        (directory / name / "data").symlink_to(FIXTURES / "data")
        words = ("capture", "-q", "-o", str(directory / f"run-{name}"), case.script, "--steps", "6")
        introspect(*words, cwd=directory / name).check_returncode()
    began = time.perf_counter()
    proof = prove(
        directory / "run-a", directory / "run-b", (), directory / "kept", None, lambda said: print("   ", said)
    )
    seconds = time.perf_counter() - began
    with open_run(directory / "run-a") as a, open_run(directory / "run-b") as b:
        code = compare_runs(a, b, DiffOptions()).code
    named = _are_edits([one.change for one in code.ranked[:1]] if code is not None else [], wanted)
    right = proof.proven and len(wanted) == len(proof.elements) and _are_edits(proof.elements, wanted)
    places = ", ".join(f"{element.place}" for element in proof.elements if isinstance(element, Change))
    answers = ["yes" if yes else "NO" for yes in (named, right)]
    return right, [case.name, str(proof.changes), *answers, str(proof.runs), f"{seconds:.1f}", places]


def _are_edits(elements: Sequence[Element], wanted: Sequence[str]) -> bool:
    """Whether elements are statements that were edited, each another one."""
    texts = [element.b.text for element in elements if isinstance(element, Change) and element.b is not None]
    edited_ones = [edit for edit in wanted if any(edit.strip().splitlines()[0] in text for text in texts)]
    return len(texts) == len(elements) == len(edited_ones) > 0


def main() -> int:
    """Print the table; the exit status is 0 where every set is right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="names of the cases to run, as a glob")
    parser.add_argument("--warm", action="store_true", help="fork captures from a process that has torch imported")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    forks = Forks() if options.warm else None
    if forks is not None:
        sys.executable = str(forks.stand_in())
    rows = []
    try:
        for case in CASES:
            if fnmatch.fnmatch(case.name, options.only):
                print(case.name, flush=True)
                with tempfile.TemporaryDirectory() as directory:
                    rows.append(measured(case, Path(directory)))
    finally:
        if forks is not None:
            forks.close()
    print(f"{'fault':26} {'changes':>7} {'named':>6} {'right':>6} {'runs':>5} {'seconds':>8}  smallest set")
    for _, (name, changes, named, right, runs, seconds, places) in rows:
        print(f"{name:26} {changes:>7} {named:>6} {right:>6} {runs:>5} {seconds:>8}  {places}")
    print(f"{sum(right for right, _ in rows)} of {len(rows)} right")
    return int(not all(right for right, _ in rows))


if __name__ == "__main__":
    sys.exit(main())

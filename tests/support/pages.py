"""Runs whose pages are looked at."""

from __future__ import annotations

import numpy as np
from synthetic import row, write_run


def step_rows(number, *, shift=0.0, name="Net.layer"):
    rng = np.random.default_rng(number)
    x = rng.standard_normal((4, 8)).astype(np.float32)
    return [
        row("data", "batch", "DataLoader", x, path="[0]"),
        row("forward", "input", name, x, path="[0]", module_class="Linear"),
        row("forward", "output", name, x * 2 + np.float32(shift), module_class="Linear"),
        row("loss", "loss", "loss", np.array(3.0 / (number + 1) + shift, np.float32)),
        row("backward", "grad_output", name, x * 0.1 + np.float32(shift), module_class="Linear"),
        row("optimizer", "hyperparameter", "SGD", 0.1, path="[0]['lr']"),
        row("optimizer", "param", f"{name}.weight", x + np.float32(shift), module_class="Linear"),
    ]


def pair(tmp_path, steps=12, at=5, name="Net.layer"):
    a = [step_rows(number, name=name) for number in range(steps)]
    b = [step_rows(number, shift=0.01 * (number >= at), name=name) for number in range(steps)]
    write_run(tmp_path / "a", a, settings={"command": {"argv": ["--lr", "1"]}})
    write_run(tmp_path / "b", b, settings={"command": {"argv": ["--lr", "2"]}})

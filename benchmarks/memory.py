"""How much memory capturing takes beyond the bare run: peak resident memory of a script run by itself and captured.

Each run is a process of its own. What the capture holds must not grow with the number of steps.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

TARGET = 32
"""Megabytes over the bare run, at most."""
STEPS = (10, 100, 1000)

SCRIPT = """
import sys
import torch
from torch import nn

torch.set_num_threads(1)
model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(12)])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(int(sys.argv[1])):
    loss = model(torch.randn(64, 256)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
with open("/proc/self/status") as status:
    lines = dict(line.split(":", 1) for line in status)
print("memory", *(int(lines[name].split()[0]) // 1024 for name in ("VmHWM", "RssAnon", "RssFile")))
"""


def memory(command: list[str]) -> list[int]:
    """Peak, private and file-backed memory in MB that the script reports at its end."""
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [int(word) for word in done.stdout.split("memory", 1)[1].split()]


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        tool = [sys.executable, "-m", "introspect_cli", "capture", "-q", "--force", "-o", f"{folder}/run"]
        memory([*tool, str(script), "1"])  # compiles the kernels, if nobody has
        print(
            f"{'steps':>6} {'bare MB':>8} {'captured':>9} {'more':>6} {'private':>8} {'of files':>9}  target {TARGET}"
        )
        for steps in STEPS:
            bare = memory([sys.executable, str(script), str(steps)])
            watched = memory([*tool, str(script), str(steps)])
            more, private, files = (after - before for before, after in zip(bare, watched, strict=True))
            verdict = "met" if more <= TARGET else "MISSED"
            print(f"{steps:6} {bare[0]:8} {watched[0]:9} {more:6} {private:8} {files:9}  {verdict}", flush=True)


if __name__ == "__main__":
    main()

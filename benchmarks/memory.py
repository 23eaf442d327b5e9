"""How much memory capturing takes beyond the bare run: peak resident memory alone and captured, for four models.

Each run is a process of its own. What the capture holds must not grow with the number of steps.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

TARGET = 32
"""Megabytes over the bare run, at most."""
MODELS = ("gpt d=128", "cnn", "lstm", "200 small layers")
STEPS = (10, 100)

SCRIPT = f"""
import sys

sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
from workloads import WORKLOADS

torch.set_num_threads(1)
step = WORKLOADS[sys.argv[1]]()
for _ in range(int(sys.argv[2])):
    step()
with open("/proc/self/status") as status:
    lines = dict(line.split(":", 1) for line in status)
print("memory", *(int(lines[name].split()[0]) / 1024 for name in ("VmHWM", "RssAnon", "RssFile")))
"""


def memory(command: list[str]) -> list[float]:
    """Peak, private and file-backed memory in MB that the script reports at its end."""
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [float(word) for word in done.stdout.split("memory", 1)[1].split()]


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        tool = [sys.executable, "-m", "introspect_cli", "capture", "-q", "--force", "-o", f"{folder}/run"]
        memory([*tool, str(script), MODELS[0], "1"])  # compiles the kernels, if nobody has
        print(f"{'model':<16} {'steps':>6} {'bare MB':>8} {'captured':>9} {'more':>6} {'private':>8} {'of files':>9}")
        for model in MODELS:
            for steps in STEPS:
                bare = memory([sys.executable, str(script), model, str(steps)])
                watched = memory([*tool, str(script), model, str(steps)])
                more, private, files = (after - before for before, after in zip(bare, watched, strict=True))
                verdict = "met" if more <= TARGET else "MISSED"
                print(
                    f"{model:<16} {steps:6} {bare[0]:8.0f} {watched[0]:9.0f} {more:6.1f} {private:8.1f} {files:9.1f}  "
                    f"{verdict}: {TARGET}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

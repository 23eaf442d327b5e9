"""Draw `docs/images/terminal.svg`, the README's picture of a terminal, from what its main command really prints.

    python benchmarks/terminal.py [FILE]

It runs in an environment that has introspect; a test compares the picture's words with what is printed now.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 112
ROOT = Path(__file__).resolve().parents[1]
SCRIPT = "fixtures/train_gpt.py"
COMMANDS = (
    f"introspect capture -o runA {SCRIPT} --steps 20",
    f"introspect capture -o runB {SCRIPT} --steps 20 --lr 1.1e-3",
    "introspect diff runA runB",
)


def main() -> None:
    """Run the commands in a directory of their own and draw what they print."""
    target = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs/images/terminal.svg"
    picture = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "fixtures").symlink_to(ROOT / "fixtures")
        for command in COMMANDS:
            picture.print(Text(f"$ {command}", style="bold"))
            picture.print(Text.from_ansi(printed(command, folder)))
    target.write_text(picture.export_svg(title="introspect", unique_id="terminal"), encoding="utf-8")


def printed(command: str, folder: str) -> str:
    """What the last command prints in colour; of a capture only introspect's own lines, not the script's."""
    environment = os.environ | {
        "COLUMNS": str(WIDTH),
        "FORCE_COLOR": "1",
        "LC_ALL": "C.UTF-8",
        "TERM": "xterm-256color",
    }
    environment.pop("NO_COLOR", None)
    words = [sys.executable, "-m", "introspect_cli", *command.split()[1:]]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stderr if "capture" in words else done.stdout


if __name__ == "__main__":
    main()

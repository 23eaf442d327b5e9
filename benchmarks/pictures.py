"""Draw the pictures of the README and the pages from what the commands really give.

    python benchmarks/pictures.py [FILE]     # docs/images/terminal.svg, or FILE: what the README's commands print
    python benchmarks/pictures.py --pages    # docs/images/report-*.png: what `introspect report` makes (wants chromium)

It runs in an environment that has introspect. A test compares the words of the terminal's picture with what is printed
now.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

WIDTH = 92
ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs/images"
SCRIPT = "fixtures/train_gpt.py"
COMMANDS = (
    f"introspect capture -o runA {SCRIPT} --steps 20",
    f"introspect capture -o runB {SCRIPT} --steps 20 --lr 1.1e-3",
    "introspect diff runA runB",
)
PAPER, INK = (244, 246, 249), (31, 35, 40)
COLOURS = TerminalTheme(PAPER, INK, [INK] * 8)
"""A light terminal; the colours that introspect prints in are numbers of its own, not the terminal's."""


def main() -> None:
    """Run the commands in a directory of their own and draw what they give."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "fixtures").symlink_to(ROOT / "fixtures")
        if "--pages" in sys.argv:
            pages(Path(folder))
        else:
            terminal(Path(folder), Path(sys.argv[1]) if sys.argv[1:] else IMAGES / "terminal.svg")


def terminal(folder: Path, target: Path) -> None:
    """What the commands print."""
    picture = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    for command in COMMANDS:
        picture.print(Text(f"$ {command}", style="bold"))
        picture.print(Text.from_ansi(printed(command, folder)))
    before, _, after = CONSOLE_SVG_FORMAT.partition("@font-face")  # a picture loads nothing from elsewhere
    form = before + after[after.index(".{unique_id}-matrix") :]
    svg = picture.export_svg(title="introspect", unique_id="terminal", theme=COLOURS, code_format=form)
    target.write_text(svg, encoding="utf-8")


def printed(command: str, folder: Path) -> str:
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


def pages(folder: Path) -> None:
    """The page of two runs, that of one in the dark, and both on a narrow screen."""
    from PIL import Image
    from selenium import webdriver

    size = f"{SCRIPT} --steps 60 --depth 6"
    for command in (
        f"introspect capture -o runA {size}",
        f"introspect capture -o runB {size} --fault gelu-tanh",
        "introspect report runA runB -o two.html",
        "introspect report runA -o one.html",
    ):
        printed(command, folder)
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    options.binary_location = shutil.which("chromium") or ""
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))

    def draw(page: str, target: Path, scheme: str, width: int, height: int) -> Image.Image:
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        browser.get((folder / page).as_uri())
        browser.save_screenshot(str(target))
        Image.open(target).convert("RGB").quantize(64).save(target, optimize=True)
        return Image.open(target).convert("RGB")

    draw("two.html", IMAGES / "report-light.png", "light", 1400, 900)
    draw("one.html", IMAGES / "report-dark.png", "dark", 1400, 900)
    schemes = {"two.html": "light", "one.html": "dark"}
    narrow = [draw(page, folder / "narrow.png", scheme, 400, 1100) for page, scheme in schemes.items()]
    both = Image.new("RGB", (820, 1100), "white")
    for place, picture in zip((0, 420), narrow, strict=True):
        both.paste(picture, (place, 0))
    both.quantize(200).save(IMAGES / "report-narrow.png", optimize=True)
    browser.quit()


if __name__ == "__main__":
    main()

"""Pictures of the terminal views, as a person's terminal shows them; `INTROSPECT_SCREENSHOTS=DIR` keeps them."""

from __future__ import annotations

import fcntl
import html
import io
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pictures
import pytest
from pages import pair, step_rows
from rich.console import Console
from rich.text import Text
from synthetic import write_run

from introspect_cli.records import ModuleInfo

WIDTH = 110
ROOT = Path(__file__).resolve().parents[2]


def on_a_terminal(*words, cwd):
    """What the command prints on a terminal of WIDTH columns, escape codes included."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, WIDTH, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "COLUMNS"}} | {"TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-m", "introspect_cli", *words], cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs,
        env=environment,
    )  # fmt: skip
    os.close(theirs)
    printed = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux's way of saying that the other end is closed
            break
        if not piece:
            break
        printed += piece
    os.close(ours)
    process.wait()
    return printed.decode().replace("\r\n", "\n")


@pytest.mark.parametrize(
    ("name", "words", "seen"),
    [
        ("diff", ("diff", "a", "b"), "origin"),
        ("tree", ("show", "tree", "c"), "Net"),
    ],
)
def test_a_view_fits_a_terminal_and_can_be_drawn(tmp_path, browser, name, words, seen):
    pair(tmp_path)
    modules = [ModuleInfo("Net", "Net", "train.py:3"), ModuleInfo("Net.layer", "Linear", "", ("weight", "bias"))]
    write_run(tmp_path / "c", [step_rows(0)], modules=modules)
    printed = on_a_terminal(*words, cwd=tmp_path)
    assert seen in printed
    assert max(Text.from_ansi(line).cell_len for line in printed.splitlines()) <= WIDTH
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(printed))
    page = tmp_path / "view.html"
    page.write_text(console.export_html(inline_styles=True), encoding="utf-8")
    browser.get(page.as_uri())
    picture = tmp_path / f"{name}.png"
    assert browser.save_screenshot(str(picture))
    assert picture.stat().st_size > 12_000  # an empty page has 7 kB
    kept = os.environ.get("INTROSPECT_SCREENSHOTS")
    if kept:
        shutil.copy(picture, Path(kept) / picture.name)


def words_of(picture):
    """What an SVG of rich says, without numbers and where the largest is: they may differ with the processor."""
    texts = [html.unescape(text).replace("\xa0", " ") for text in re.findall(r"<text [^>]*>([^<]*)</text>", picture)]
    return [re.sub(r"[\d.,]+(e[-+]\d+)?|(?<= at )GPT\S+", "#", text) for text in texts]


def test_the_readmes_picture_of_a_terminal_shows_what_is_printed_today(tmp_path, monkeypatch, quick_python):
    monkeypatch.setattr(sys, "argv", ["pictures.py", str(tmp_path / "now.svg")])
    pictures.main()
    then = (ROOT / "docs/images/terminal.svg").read_text(encoding="utf-8")
    assert words_of((tmp_path / "now.svg").read_text(encoding="utf-8")) == words_of(then)
    assert any("First divergence" in words for words in words_of(then))

"""How an answer stands on a terminal, in a pipe and in colour, and texts that are shown."""

import os
import re

import numpy as np
import pytest
from synthetic import row, write_run

from introspect_cli.records import ModuleInfo
from introspect_cli.texts import clean, count, human_size


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GPT.blocks.0", "GPT.blocks.0"),
        ("[red]x[/red]", "[red]x[/red]"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\x9b31m", "\\x9b31m"),
        ("abc\u202edef", "abc\\u202edef"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("e\u0301", "e\\u0301"),
        ("\ud800", "\\ud800"),
        ("naïve λ", "naïve λ"),
        ("\u2028", "\\u2028"),
        ("\u00a0", "\\xa0"),
    ],
)
def test_strangers_texts_are_made_harmless(text, shown):
    assert clean(text) == shown
    assert clean(text).encode("utf-8")


def test_long_texts_are_cut_and_numbers_written_short():
    assert clean("x" * 100, 10) == "xxxxxxx..."
    assert " ".join(map(human_size, (12, 1500, 2.5e6, 4e9, 3e13))) == "12 B 1.5 kB 2.5 MB 4.0 GB 30.0 TB"
    counted = count(1, "step"), count(1200, "step"), count(2, "branch", "branches")
    assert counted == ("1 step", "1,200 steps", "2 branches")


NAME = "GPT.blocks.0.attn.qkv"
ODD = "GPT.[bold]x[/bold] :smile: λ"


@pytest.fixture
def said(tmp_path, introspect):
    """What `diff` prints of two runs, with these variables."""
    for run, shift in (("a", 0.0), ("b", 1e-4)):
        names = [(NAME, "Linear"), (ODD, "Linear")]
        rows = [row("forward", "output", name, np.ones(4) + shift, module_class=kind) for name, kind in names]
        write_run(tmp_path / run, [rows], modules=[ModuleInfo(name, kind) for name, kind in names])

    def run(*options, **variables):
        base = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "FORCE_COLOR", "COLUMNS"}}
        done = introspect("diff", *options, "a", "b", env={**base, "TERM": "xterm-256color", **variables})
        assert done.returncode == 1, done.stderr
        return done.stdout

    return run


def test_a_table_gives_up_what_is_said_twice_first_and_no_line_is_wider_than_the_terminal(said):
    for columns, shown in (
        (200, f"forward  {NAME} (Linear)"),
        (77, "forward …blocks.0.attn.qkv (Linear)"),
        (61, "   0 …"),
    ):
        lines = said(COLUMNS=str(columns)).splitlines()
        assert max(map(len, lines)) <= columns
        (row,) = [line for line in lines if line.endswith(" unclear")]
        assert shown in row


def test_a_pipe_has_no_edge_and_no_colour(said):
    text = said()
    assert text.startswith(f"First divergence at step 0: the output of {NAME} (Linear)")
    assert "\x1b" not in text
    assert ODD in text, "markup and emoji are text"


def test_what_the_encoding_lacks_is_replaced(said):
    assert "GPT.[bold]x[/bold] :smile: \\u03bb" in said("--all", PYTHONIOENCODING="latin-1")


def test_colours_are_read_on_black_and_on_white(said, tmp_path, introspect):
    colours = set()
    for names in (("a", "b"), ("a", "a")):
        env = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color"}
        colours |= set(re.findall(r"38;5;(\d+)", introspect("diff", *names, env=env).stdout))
    assert len(colours) > 1
    for colour in colours:
        parts = [(0, 95, 135, 175, 215, 255)[(int(colour) - 16) // power % 6] / 255 for power in (36, 6, 1)]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in parts]
        light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]  # relative luminance, WCAG 2
        for back in (0.0, 1.0):
            assert (max(light, back) + 0.05) / (min(light, back) + 0.05) > 3.5, colour
    assert "38;" not in said(FORCE_COLOR="1", NO_COLOR="1")

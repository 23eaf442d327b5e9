"""Blocks, tables and texts without a terminal, and the terminal with a fake one."""

import io
import math

import pytest
from rich.style import Style

from introspect_cli.render.blocks import (
    Column,
    Line,
    Table,
    cut,
    distance,
    fit,
    line,
    number,
    shape,
    table_lines,
    two_numbers,
)
from introspect_cli.render.console import STYLES, Screen
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


def test_long_texts_are_cut():
    assert clean("x" * 100, 10) == "xxxxxxx..."
    assert cut("GPT.blocks.0.attn.qkv.weight", 20, front=True) == "…s.0.attn.qkv.weight"
    assert cut("GPT", 20) == "GPT"
    assert all(len(cut("GPT.blocks.0.attn.qkv.weight", width, front=True)) <= width for width in range(1, 40))


@pytest.mark.parametrize(
    ("words", "values", "shown"),
    [
        (number, (0.0, 12.0, 1e-8, 123456.7, None, math.nan, math.inf), "0 12 1e-08 1.235e+05 - nan inf"),
        (distance, (None, 0.0, 5e-8, 3.2e-5, 0.0123, 1.5, 2e5), "- <1e-07 <1e-07 3.2e-05 0.0123 1.5 2.0e+05"),
        (shape, ((), (2, 3)), "scalar 2x3"),
        (human_size, (12, 1500, 2.5e6, 4e9, 3e13), "12 B 1.5 kB 2.5 MB 4.0 GB 30.0 TB"),
    ],
)
def test_numbers_are_written_short(words, values, shown):
    assert " ".join(map(words, values)) == shown


def test_two_numbers_are_told_apart_and_counted():
    assert two_numbers(1.000001, 1.000002) == ("1.000001", "1.000002")
    assert two_numbers(0.5, 0.25) == ("0.5", "0.25")
    counted = count(1, "step"), count(1200, "step"), count(2, "branch", "branches")
    assert counted == ("1 step", "1,200 steps", "2 branches")


NAMES = ("GPT.blocks.0.attn.qkv.weight (Linear)", "GPT.head (Linear)")


def table():
    return Table(
        (
            Column("step", right=True),
            Column("phase", drop_at=2),
            Column("module", least=10),
            Column("role"),
        ),
        tuple(("1", "optimizer", name, "propagated") for name in NAMES),
    )


def test_a_table_gives_up_what_is_said_twice_first():
    wide, _ = fit(table(), 100)
    assert [column.title for column in wide.columns] == ["step", "phase", "module", "role"]
    assert wide.rows[0][2] == NAMES[0]
    narrow, _ = fit(table(), 56)
    assert narrow.rows[0] == ("1", "optimizer", "…ks.0.attn.qkv.weight (Linear)", "propagated")
    tight, _ = fit(table(), 32)
    assert tight.rows[0] == ("1", "…weight (Linear)", "propagated")


@pytest.mark.parametrize("width", [30, 46, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal_and_roles_stay_whole(width):
    lines = [row.text for row in table_lines(table(), width)]
    assert max(map(len, lines)) <= width
    assert all(row.endswith("propagated") for row in lines[1:])


class Terminal(io.StringIO):
    def __init__(self, encoding="utf-8", tty=True):
        super().__init__()
        self._encoding, self._tty = encoding, tty

    @property
    def encoding(self):
        return self._encoding

    def isatty(self):
        return self._tty


def drawn(blocks, monkeypatch, width=60, *, env=None, **how):
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (env or {}).items():
        monkeypatch.setenv(name, value)
    stream = Terminal(**how)
    Screen(stream, width=width).draw(blocks)
    return stream.getvalue()


def test_colour_on_a_terminal_only_and_never_with_no_color(monkeypatch):
    blocks = [line("bad", "bad")]
    assert "\x1b[" in drawn(blocks, monkeypatch)
    assert "31m" not in drawn(blocks, monkeypatch, env={"NO_COLOR": "1"})
    assert drawn(blocks, monkeypatch, tty=False) == "bad\n"


def test_markup_and_emoji_are_text(monkeypatch):
    assert drawn([line("[bold]x[/bold] :smile: 12")], monkeypatch, tty=False) == "[bold]x[/bold] :smile: 12\n"


def test_paragraphs_are_wrapped_and_long_words_stay_whole(monkeypatch):
    text = "word " * 30 + "a.very.long.name" * 8
    out = drawn([line(text, indent=2)], monkeypatch, width=40, tty=False).splitlines()
    assert all(len(row) <= 40 for row in out if "very" not in row)
    assert "".join("".join(out).split()) == "".join(text.split())


def test_a_pipe_has_no_edge(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    stream = Terminal(tty=False)
    screen = Screen(stream)
    screen.draw([line("word " * 100), Line((("x" * 500, ""),), wrap=False)])
    assert len(stream.getvalue().splitlines()) == 2


def test_what_the_encoding_lacks_is_replaced(monkeypatch):
    out = drawn([line("a … █ λ ·", wrap=False)], monkeypatch, tty=False, encoding="latin-1")
    assert out == "a ~ # \\u03bb .\n"


@pytest.mark.parametrize("back", [0.0, 1.0])
def test_colours_are_read_on_black_and_on_white(back):
    for name, style in STYLES.items():
        colour = Style.parse(style).color
        if colour is None:
            continue
        parts = [value / 255 for value in colour.get_truecolor()]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in parts]
        light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]  # relative luminance, WCAG 2
        contrast = (max(light, back) + 0.05) / (min(light, back) + 0.05)
        assert contrast > 3.5, (name, contrast)

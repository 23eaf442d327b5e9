"""The one place where an error becomes text and an exit code."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from synthetic import row, write_run

from introspect_cli import __version__, cli
from introspect_cli.cli import VERBS
from introspect_cli.errors import IntrospectError, StoreError, UsageError, abridged

PRETEND = """
import sys
import types
import click
from introspect_cli import cli
from introspect_cli.errors import StoreError, UsageError
@click.command()
@click.option("--count", type=int)
def pretend(count):
    {body}
module = types.ModuleType("introspect_cli.commands.pretend")
module.pretend = pretend
sys.modules[module.__name__] = module
cli.VERBS["pretend"] = "Pretend."
sys.argv[1:] = ["pretend", *sys.argv[1:]]
cli.main()
"""


def pretend(body, *words, **settings):
    """Run the command with a verb `pretend` that does `body`."""
    command = [sys.executable, "-c", PRETEND.format(body=body), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **settings)


def test_the_command_is_installed_under_its_name():
    from importlib.metadata import entry_points

    (entry,) = [entry for entry in entry_points(group="console_scripts") if entry.name == "introspect"]
    assert entry.load() is cli.main


def test_help_lists_every_verb_with_its_line(introspect):
    done = introspect("--help")
    assert done.returncode == 0
    for verb, line in VERBS.items():
        assert f"{verb}  " in done.stdout
        assert line in done.stdout
    assert introspect().stdout == done.stdout
    assert introspect("-h").stdout == done.stdout


def test_the_version_tells_what_a_bug_report_needs(introspect):
    lines = introspect("--version").stdout.splitlines()
    assert lines[0] == f"introspect {__version__}"
    assert lines[1] == f"python {sys.version.split()[0]}"
    assert [line.split()[0] for line in lines[2:-1]] == list(cli._REPORTED)
    assert lines[2].startswith("torch ")
    assert "not installed" not in lines[2]


@pytest.mark.parametrize(
    ("word", "hint"),
    [("dif", "did you mean diff?"), ("xyz", f"choose from {', '.join(VERBS)}")],
)
def test_an_unknown_verb_is_reported_what_there_is(introspect, word, hint):
    done = introspect(word)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match(f"introspect: unknown verb '{word}'[:;] {re.escape(hint)}", done.stderr)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nosuch"], "introspect: No such option"),
        (["capture", "--nosuch", "x.py"], "introspect: No such option"),
        (["capture", "--seed", "x", "x.py"], "introspect: Invalid value for '--seed'"),
        (["capture", "nosuch.py"], "introspect: no such script: 'nosuch.py'"),
        (["capture", "-m", "no.such.module"], "introspect: no module named 'no.such.module'"),
        (["capture"], "introspect: nothing to run"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_sentence_and_exits_with_2(introspect, tmp_path, words, sentence):
    done = introspect(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(sentence)
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [0, 125])
def test_a_verb_returns_its_exit_code(code):
    done = pretend(f"print('done'); return {code}")
    assert (done.returncode, done.stdout, done.stderr) == (code, "done\n", "")


def test_a_verb_may_leave_its_work_until_click_is_gone():
    done = pretend("import traceback; return lambda: print(traceback.format_stack()) or 5")
    assert done.returncode == 5
    assert "click" not in done.stdout


@pytest.mark.parametrize(("error", "later"), [(UsageError, False), (StoreError, True)])
def test_an_introspect_error_is_its_sentence(error, later):
    assert issubclass(error, IntrospectError)
    body = f"def fail(): raise {error.__name__}('what, where, what to do')\n    return fail{'' if later else '()'}"
    done = pretend(body)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "introspect: what, where, what to do\n"


def test_a_bug_is_never_taken_for_an_answer():
    done = pretend("1 / 0")
    assert done.returncode == 2
    assert "ZeroDivisionError" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("introspect: this is a bug in introspect")


@pytest.mark.parametrize("body", ["raise KeyboardInterrupt", "raise click.Abort", "return raiser"])
def test_an_interrupt_is_quiet_and_kills(body):
    body = f"def raiser(): raise KeyboardInterrupt\n    {body}"
    done = pretend(body)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_reader_that_goes_away_is_no_error():
    command = [sys.executable, "-c", PRETEND.format(body="[print('line') for _ in range(100_000)]")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 2


def test_the_script_decides_the_exit_code(introspect, tmp_path):
    (tmp_path / "script.py").write_text("import sys\nprint(sys.argv)\nsys.exit(int(sys.argv[1]))\n")
    for code in (0, 1, 3):
        done = introspect("capture", "-q", "script.py", str(code), "--version")
        assert (done.returncode, done.stderr) == (code, "")
        assert done.stdout == f"['script.py', '{code}', '--version']\n"


def test_an_answer_that_cannot_be_written_is_not_reported_as_a_bug(introspect):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "introspect_cli", "--version"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "introspect: the answer cannot be written: No space left on device\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_stream_that_a_shell_has_closed_is_not_reported_as_a_bug(closed):
    for body, code in (("return 0", 0), ("raise UsageError('no')", 2)):
        source = PRETEND.format(body=body)
        done = subprocess.run(
            ["bash", "-c", f'"$0" -c "$1" {closed}', sys.executable, source],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code
        assert "mistake" not in done.stderr


def test_a_sentence_quotes_what_a_terminal_would_obey_as_its_escape(introspect):
    done = introspect("show", "a\x1b[31m\u202eb\x7f\x9b2J")
    assert done.returncode == 2
    assert "there is no run at a\\x1b[31m\\u202eb\\x7f\\x9b2J;" in done.stderr
    assert done.stderr.isascii()
    assert done.stderr.rstrip("\n").isprintable()


def test_a_name_that_the_system_refuses_is_reported(introspect, tmp_path):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "file").write_text("")
    for words in (["golden", "save", "-o", "n" * 5000], ["golden", "save", "-o", "file"]):
        done = introspect(*words, "train.py")
        assert (done.returncode, done.stdout) == (2, "")
        assert "cannot be used: " in done.stderr
        assert len(done.stderr) < 400


@pytest.mark.parametrize(
    ("words", "end"),
    [
        (("show", "LONG"), "(`introspect runs` lists them)"),
        (("diff", "--rtol", "LONG", "a", "b"), "(`introspect diff --help` tells more)"),
        (("capture", "--steps", "LONG", "train.py"), "such as 0,5,10:20,100::50"),
        (("capture", "-m", "LONG"), "among installed packages"),
        (("LONG",), "verify, zoom"),
    ],
)
def test_a_sentence_keeps_its_end_where_an_argument_is_too_long_to_read(introspect, words, end):
    long = "no such " * 12_500
    done = introspect(*(long if word == "LONG" else word for word in words))
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr) < 2100
    assert " characters)..." in done.stderr
    assert done.stderr.rstrip("\n").endswith(end)


def test_a_sentence_that_can_be_read_is_reported_whole():
    path = "a/" * 150
    assert abridged(f"there is no run at {path}") == f"there is no run at {path}"
    assert abridged("no " + "x" * 1000) == f"no {'x' * 150}...(700 characters)...{'x' * 150}"


def test_a_name_that_is_no_text_is_reported_in_the_answer(introspect, tmp_path):
    write_run(tmp_path / "run", [[row("forward", "output", "Net", np.ones(2, np.float32))]])
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}  # as in most languages; in C, bytes pass
    done = introspect("export", "run", "--format", "csv", "-o", "to\udc80", env=strict)
    assert (done.returncode, done.stderr) == (0, "")
    assert "to\\udc80" in done.stdout


def test_no_code_of_a_file_name_reaches_a_terminal(introspect, tmp_path):
    name = "to\x1b[31m\u202e"
    for path in (tmp_path / name, tmp_path / f"{name}2"):
        write_run(path, [[row("forward", "output", "Net", np.ones(2, np.float32))]])
    for words in (
        ["pack", name, "-o", f"{name}.zip"],
        ["export", name, "--format", "csv", "-o", f"{name}.csv"],
        ["report", name, "-o", f"{name}.html"],
        ["runs", "."],
    ):
        done = introspect(*words)
        assert done.returncode == 0, done.stderr
        assert "to\\x1b[31m" in done.stdout
        assert not {"\x1b", "\u202e"} & set(done.stdout + done.stderr)
    assert introspect("pack", f"{name}2", "-o", "/").returncode == 2

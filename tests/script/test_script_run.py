"""What surrounds a script: checking there is one, callbacks around it, what a callback that fails costs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from verbs import verb


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("absent.py", None, "no such script"),
        ("a" * 200, None, "no such script"),
        ("folder", "folder", r"directory without __main__\.py"),
        ("", None, "nothing to run"),
    ],
)
def test_what_cannot_be_run_is_reported_in_a_sentence(tmp_path, monkeypatch, name, content, sentence):
    monkeypatch.chdir(tmp_path)
    if content == "folder":
        Path(name).mkdir()
    elif content is not None:
        Path(name).write_bytes(content)
    assert re.search(sentence, verb("capture", name).stderr)


@pytest.mark.parametrize("module", ["nosuchmodule", "nosuch.module", ".relative", "train.py"])
def test_unknown_modules_are_reported_in_a_sentence(tmp_path, monkeypatch, module):
    monkeypatch.chdir(tmp_path)
    assert "no module named" in verb("capture", "-m", module).stderr


def test_a_module_in_this_directory_is_found_without_running_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "onlyhere").mkdir()
    (tmp_path / "onlyhere" / "__init__.py").write_text("raise SystemExit('was run')")
    path = list(sys.path)
    assert callable(verb("capture", "-m", "onlyhere.train").returncode), "it is what would run it"
    assert "onlyhere" not in sys.modules
    assert sys.path == path


DRIVER = """
import sys
from introspect_cli.script.ending import leave
from introspect_cli.script.run import run
from introspect_cli.script.target import Target
words = []
def started():
    words.append("started")
    {started}
def ended(ending):
    words.append(ending)
    {ended}
import atexit
atexit.register(lambda: print(*words, sep="\\n"))
target = Target(script=sys.argv[1])
leave(run(target, started=started, ended=ended).exit_code)
"""


def drive(tmp_path, text, *, started="pass", ended="pass"):
    (tmp_path / "script.py").write_text(text)
    command = [sys.executable, "-c", DRIVER.format(started=started, ended=ended), "script.py"]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        ("print('script')", "Ending(exit_code=0, how='returned', exception='')"),
        ("raise SystemExit", "Ending(exit_code=0, how='exit', exception='')"),
        ("raise SystemExit(3)", "Ending(exit_code=3, how='exit', exception='')"),
        ("raise SystemExit('text')", "Ending(exit_code=1, how='exit', exception='')"),
        ("raise ValueError('bad')", "Ending(exit_code=1, how='exception', exception='ValueError: bad')"),
        ("assert 0", "Ending(exit_code=1, how='exception', exception='AssertionError')"),
        ("raise KeyboardInterrupt", "Ending(exit_code=-2, how='interrupt', exception='KeyboardInterrupt')"),
    ],
)
def test_callbacks_are_reported_how_it_ended(tmp_path, text, ending):
    assert drive(tmp_path, text).stdout.splitlines()[-2:] == ["started", ending]


def test_the_end_is_reported_before_the_traceback_and_the_handlers(tmp_path):
    text = "import atexit\natexit.register(print, 'handler')\nraise ValueError('last')"
    done = drive(tmp_path, text, ended="print('ended', file=sys.stderr)")
    assert done.stderr.splitlines()[0] == "ended"
    assert done.stdout.splitlines()[0] == "handler"


@pytest.mark.parametrize("where", ["started", "ended"])
@pytest.mark.parametrize("failure", ["raise ValueError('ours')", "sys.exit(9)", "raise KeyboardInterrupt"])
def test_a_failing_callback_does_not_reach_the_script(tmp_path, where, failure):
    done = drive(tmp_path, "print('script')\nraise SystemExit(4)", **{where: failure})
    assert done.returncode == 4
    assert done.stdout.startswith("script\n")
    assert done.stderr.startswith("introspect: ")
    assert done.stderr.endswith("goes on unrecorded\n")
    assert done.stderr.count("\n") == 1

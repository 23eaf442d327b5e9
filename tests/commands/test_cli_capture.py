"""What `capture` makes of its command line, and where its options end."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from introspect_cli.capture.options import DEFAULT_KINDS, DEFAULT_STATS, KINDS, STATS, CaptureOptions
from introspect_cli.cli import introspect
from introspect_cli.errors import UsageError
from introspect_cli.records import Kind
from introspect_cli.schedule.rules import Schedule


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The target and options that `capture ARGS...` would run with."""
    command = introspect.get_command(click.Context(introspect), "capture")
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('never run')")
    Path("package").mkdir()

    def parse(*args):
        with command.make_context("capture", list(args)) as ctx:
            target, options = command.invoke(ctx).args
        return {name: value for name, value in vars(target).items() if value}, options

    return parse


@pytest.mark.parametrize(
    ("before", "target", "rest"),
    [
        (("--seed", "3", "train.py"), {"script": "train.py"}, ("--seed", "4", "--help", "-m", "x", "--", "-o", "y")),
        (("--seed", "3", "-m", "package"), {"module": "package"}, ("--seed", "4", "-h", "--unknown")),
        (("--seed", "3", "--", "train.py"), {"script": "train.py"}, ("-q",)),
    ],
)
def test_options_before_the_target_are_ours_and_all_after_it_are_the_scripts(asked, before, target, rest):
    assert asked(*before, *rest) == ({**target, "args": rest}, CaptureOptions(seed=3))


def test_without_options_everything_ordinary_is_recorded(asked):
    assert asked("train.py") == ({"script": "train.py"}, CaptureOptions())
    assert CaptureOptions().record == {Kind(name) for name in DEFAULT_KINDS}
    assert set(KINDS) - set(DEFAULT_KINDS) == {"collective"}
    assert CaptureOptions().stats == DEFAULT_STATS
    assert set(STATS) - set(DEFAULT_STATS) == {"med", "mode"}


OPTIONS = [
    (("-o", "run"), {"output": Path("run")}),
    (("--output=run", "--force"), {"output": Path("run"), "force": True}),
    (("--record", "input, output"), {"record": frozenset({Kind.INPUT, Kind.OUTPUT})}),
    (("--record", "grad", "--record", "loss"), {"record": frozenset({Kind.GRAD, Kind.LOSS})}),
    (("--record", "none"), {"record": frozenset()}),
    (("--record", "default"), {}),
    (("--record", "all"), {"record": frozenset(map(Kind, KINDS))}),
    (("--stats", "all"), {"stats": STATS}),
    (("--stats", "none"), {"stats": ()}),
    (("--stats", "max,med,shape"), {"stats": ("shape", "max", "med")}),
    (("--stats", "default,mode"), {"stats": tuple(name for name in STATS if name != "med")}),
    (("--no-sketch",), {"sketch": False}),
    (("--modules", "*.attn", "--modules", "a,b"), {"modules": ("*.attn", "a", "b")}),
    (("--exclude", "x"), {"exclude": ("x",)}),
    (("--max-depth", "0"), {"max_depth": 0}),
    (("--steps", "0,5:9"), {"steps": Schedule.parse("0,5:9")}),
    (("--steps", "::10"), {"steps": Schedule.parse("::10")}),
    (("--eval",), {"eval": True}),
    (("--no-eval",), {"eval": False}),
    (("--seed", "0", "--deterministic"), {"seed": 0, "deterministic": True}),
    (("--no-env", "--no-packages", "--no-source"), {"env": False, "packages": False, "source": False}),
    (("--save-tensors", "a*", "--save-tensors", "b"), {"save_tensors": ("a*", "b")}),
    (("--redact", "MY_*"), {"redact": ("MY_*",)}),
]


@pytest.mark.parametrize(("words", "settings"), OPTIONS, ids=[" ".join(words) for words, _ in OPTIONS])
def test_each_option_sets_its_field(asked, words, settings):
    assert asked(*words, "train.py")[1] == CaptureOptions(**settings)


WRONG = [
    (("--record", "inputs"), "unknown kind 'inputs'; did you mean input\\?"),
    (("--record", "op_output"), "unknown kind 'op_output'"),
    (("--record", ""), "no kind is given"),
    (("--record", "none,input"), "'none' cannot be combined with"),
    (("--stats", "l1"), "unknown statistic 'l1'"),
    (("--stats", "Mean"), "did you mean mean"),
    (("--steps", "ten"), "schedule"),
    (("--steps", "::0"), "stride of 0"),
    (("--seed", "-1"), "--seed"),
    (("--seed", str(2**32)), "--seed"),
    (("--max-depth", "-1"), "--max-depth"),
    (("--modles", "x"), "--modules"),
    (("nosuch.py",), "no such script"),
    (("-m", "nosuchmodule"), "no module named"),
    ((), "nothing to run"),
    (("-m",), "nothing to run"),
    (("package",), "without __main__"),
]


@pytest.mark.parametrize(("words", "sentence"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_what_is_wrong_is_reported(asked, words, sentence):
    with pytest.raises((UsageError, click.UsageError)) as said:
        asked(*words, *(() if words in (item[0] for item in WRONG[-5:]) else ("train.py",)))
    message = said.value.format_message() if isinstance(said.value, click.UsageError) else str(said.value)
    assert re.search(sentence, message), message
    assert "\n" not in message


def test_options_for_the_manifest_are_plain(asked):
    import yaml

    options = asked("--steps", "5:", "--record", "grad,input", "--seed", "1", "--redact", "SECRET_NAME", "train.py")[1]
    shown = options.to_dict()
    assert yaml.safe_load(yaml.safe_dump(shown)) == shown
    assert (shown["record"], shown["steps"], shown["seed"]) == (["input", "grad"], "5:", 1)
    assert "SECRET_NAME" not in str(shown)

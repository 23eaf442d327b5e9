"""What `capture` makes of its command line and configuration file, and where its options end."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from introspect_cli.capture.options.capture_options import CaptureOptions
from introspect_cli.capture.options.option import DEFAULT_KINDS, DEFAULT_STATS, KINDS, STATS
from introspect_cli.capture.options.parse import options_of
from introspect_cli.commands.capture import capture
from introspect_cli.errors import UsageError
from introspect_cli.records import Kind
from introspect_cli.schedule.rules import Schedule
from introspect_cli.script.target import Target


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The target and options that `capture ARGS...` would run with."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('never run')")
    Path("package").mkdir()

    def parse(*args):
        with capture.make_context("capture", list(args)) as ctx:
            return capture.invoke(ctx).args

    return parse


def test_options_before_the_script_are_ours_and_all_after_it_are_the_scripts(asked):
    target, options = asked("--seed", "3", "train.py", "--seed", "4", "--help", "-m", "x", "--", "-o", "y", "--unknown")
    rest = ("--seed", "4", "--help", "-m", "x", "--", "-o", "y", "--unknown")
    assert target == Target(script="train.py", args=rest)
    assert options == CaptureOptions(seed=3)


def test_a_module_takes_all_that_follows_it(asked):
    target, options = asked("-q", "-m", "package", "--seed", "4", "-h")
    assert target == Target(module="package", args=("--seed", "4", "-h"))
    assert options == CaptureOptions(quiet=True)


def test_two_dashes_end_our_options(asked):
    assert asked("-q", "--", "train.py", "-q")[0] == Target(script="train.py", args=("-q",))


def test_without_options_everything_ordinary_is_recorded(asked):
    assert asked("train.py") == (Target(script="train.py"), CaptureOptions())
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
    (("--every", "10"), {"steps": Schedule.parse("::10")}),
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
    (("--every", "0"), "stride of 0"),
    (("--every", "10", "--steps", "10:40"), "--every"),
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


def test_a_file_may_hold_any_option(asked):
    Path("capture.yaml").write_text(
        "# ours\noutput: run\nforce: yes\nquiet: true\nrecord: [input, output]\nstats: mean,max\nsketch: no\n"
        "modules: '*.attn'\nexclude:\n  - a\n  - b\nmax-depth: 2\nsave_tensors: [w]\nsteps: 10:20:5\n"
        "eval: off\nseed: 7\ndeterministic: on\nenv: false\npackages: false\nsource: false\nredact: [MY_*]\n"
    )
    assert asked("--config", "capture.yaml", "train.py")[1] == CaptureOptions(
        output=Path("run"),
        force=True,
        record=frozenset({Kind.INPUT, Kind.OUTPUT}),
        stats=("max", "mean"),
        sketch=False,
        modules=("*.attn",),
        exclude=("a", "b"),
        max_depth=2,
        steps=Schedule.parse("10:20:5"),
        eval=False,
        seed=7,
        deterministic=True,
        env=False,
        packages=False,
        source=False,
        save_tensors=("w",),
        redact=("MY_*",),
        quiet=True,
    )


def test_the_command_line_wins_over_the_file(asked):
    Path("capture.yaml").write_text("seed: 7\nsketch: no\nmodules: [a, b]\nsteps: 0:5\nrecord: grad\n")
    words = ("--seed", "1", "--sketch", "--modules", "c", "--record", "loss", "--config", "capture.yaml")
    options = asked(*words, "train.py")[1]
    assert options == CaptureOptions(seed=1, modules=("c",), steps=Schedule.parse("0:5"), record=frozenset({Kind.LOSS}))


@pytest.mark.parametrize("text", ["", "# nothing\n", "seed:\nmodules: []\nmax-depth: null\n"])
def test_a_file_without_options_changes_nothing(asked, text):
    Path("capture.yaml").write_text(text)
    assert asked("--config", "capture.yaml", "train.py")[1] == CaptureOptions()


def test_a_schedule_in_a_file_may_be_a_list_or_unquoted(asked):
    Path("capture.yaml").write_text("steps: [0, 5, 10:20, 100::50]\n")
    assert asked("--config", "capture.yaml", "train.py")[1].steps == Schedule.parse("0,5,10:20,100::50")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sed: 1\n", "unknown option 'sed'; did you mean seed"),
        ("config: other.yaml\n", "unknown option 'config'"),
        ("seed: abc\n", "in capture.yaml"),
        ("sketch: perhaps\n", "in capture.yaml"),
        ("seed: [1, 2]\n", "takes one value"),
        ("modules: {a: b}\n", "not a mapping"),
        ("- seed\n", "not a mapping of options"),
        ("seed\n", "not a mapping of options"),
        ("seed: [1\n", "not YAML .line 2"),
        ("seed: \0\n", "not YAML"),
        (b"\xff\xfe\xff", "not YAML"),
        ("seed: !!python/object/apply:os.getpid []\n", "takes one value"),
        ("&a seed: *b\n", "not YAML"),
        ("[" * 5000, "not YAML"),
        ("seed: 1\n" * 10_000, "longer than 65,536 characters"),
    ],
)
def test_a_wrong_file_is_reported(asked, text, sentence):
    Path("capture.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises((UsageError, click.UsageError), match=sentence):
        asked("--config", "capture.yaml", "train.py")


def test_a_file_that_is_not_there_is_reported(asked):
    with pytest.raises(UsageError, match=r"'absent\.yaml' cannot be read: No such file"):
        asked("--config", "absent.yaml", "train.py")


def test_options_for_the_manifest_are_plain(asked):
    import yaml

    options = asked("--steps", "5:", "--record", "grad,input", "--seed", "1", "--redact", "SECRET_NAME", "train.py")[1]
    shown = options.to_dict()
    assert yaml.safe_load(yaml.safe_dump(shown)) == shown
    assert (shown["record"], shown["steps"], shown["seed"]) == (["input", "grad"], "5:", 1)
    assert "SECRET_NAME" not in str(shown)


def test_what_statistics_ask_of_the_kernels():
    asked = {names: options_of({"stats": names}) for names in ("none", "shape,dtype", "mean", "mode,med")}
    assert [options.measures for options in asked.values()] == [False, False, True, True]
    assert [options.sorted_stats for options in asked.values()] == [(), (), (), ("med", "mode")]


def test_every_kind_and_statistic_can_be_asked_for():
    assert [options_of({"record": name}).record for name in KINDS] == [{Kind(name)} for name in KINDS]
    assert [options_of({"stats": name}).stats for name in STATS] == [(name,) for name in STATS]


def test_help_names_every_option(introspect):
    text = introspect("capture", "--help").stdout
    for param in capture.params:
        if isinstance(param, click.Option) and not param.hidden:
            assert all(name in text for name in (*param.opts, *param.secondary_opts))
    assert max(map(len, text.splitlines())) <= 80

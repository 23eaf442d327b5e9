"""A run from a stranger, whole by its checks and absurd in every value: answered or refused, never with a traceback."""

from __future__ import annotations

import pytest
from synthetic import write_run

from introspect_cli.records import Kind, Layout, Phase, Site, SiteInfo, Status, Summary

PHASES = {
    Kind.BATCH: "data", Kind.RNG: "start", Kind.LOSS: "loss", Kind.PARAM: "optimizer", Kind.GRAD: "optimizer",
    Kind.BUFFER: "optimizer", Kind.OPTIMIZER_STATE: "optimizer", Kind.HYPERPARAMETER: "optimizer",
    Kind.GRAD_INPUT: "backward", Kind.GRAD_OUTPUT: "backward",
}  # fmt: skip
LAYOUTS = (
    Layout((2**31, 2**31), "float16"),
    Layout((), "", ""),
    Layout((0,), "float32"),
    Layout((3,) * 39, "weird\x00dtype"),
    Layout((2, 2), "float16"),
    Layout((2, 2), "python.str"),
)
STATS = (
    {},
    {"mean": float("inf"), "var": -1.0, "min": 5, "max": -5, "nans": -1},
    {"mean": 1e308, "var": 1e308, "amean": float("-inf"), "nans": 2**62, "zeros": 2**62, "min": -1e308, "max": 1e308},
)
NAMES = ("Net", "Net.a", "Net.a.0." + "x" * 300, "..", "[bold]", "N\nM\x1b[2J", "Net.norm.running_mean")
PATHS = ("", "[0]", "['lr']", "[0]" * 300, "].[['", "['\\'")
TEXTS = ("1e999", "nan", "x\x00y", "{", "12")


def absurd_step(step):
    rows = []
    for kind in Kind:
        for place, layout in enumerate(LAYOUTS):
            for number, stats in enumerate(STATS):
                count = place * 3 + number
                site = Site(Phase(PHASES.get(kind, "forward")), kind, NAMES[count % 7], count, PATHS[place])
                checksum = (place * 7 + number + step * (number % 2)) * 10**17 % 2**64
                status = Status((place + number + step) % 4)
                text = TEXTS[(place + step) % 5]
                summary = Summary(status, layout, checksum, stats, (1.0,) * 16, text)
                rows.append((site, SiteInfo("Tanh" if number else "BatchNorm"), summary))
    return rows


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    place = tmp_path_factory.mktemp("absurd")
    steps = [absurd_step(number) for number in range(12)]
    settings = {
        "optimizers": [{"name": 3, "class": None, "groups": [{"params": ["Net"], "lr": {}}]}, {"groups": 3}, 5],
        "runtime": {"python": [1]},
        "packages": [1],
        "environment": "no",
    }
    manifest = {"argv": [1, {"a": 2}], "not_observed": [None, 3], "exit_code": "x\x1b"}
    write_run(place / "a", steps, ranks=2, manifest=manifest, settings=settings)
    thinned = [[row for place, row in enumerate(rows) if (place + n) % 5] for n, rows in enumerate(steps)]
    write_run(place / "b", thinned)
    return place


@pytest.fixture
def absurd(made, tmp_path):
    for name in "ab":
        (tmp_path / name).symlink_to(made / name)


@pytest.mark.parametrize(
    "words",
    [
        ["check", "a"],
        ["check", "a", "--format", "json"],
        ["report", "a", "-o", "page.html"],
        ["report", "a", "b", "-o", "page.html"],
        *(["export", "a", "--format", form, "-o", "out"] for form in ("parquet", "csv", "jsonl", "yaml", "json-tree")),
    ],
    ids=" ".join,
)
def test_an_absurd_run_is_answered(introspect, absurd, words):
    done = introspect(*words)
    assert done.stderr == ""
    assert done.returncode == (words[0] == "check")
    assert "\x1b" not in done.stdout


def test_what_was_exported_of_it_comes_back(introspect, absurd):
    assert introspect("export", "a", "--format", "yaml", "-o", "yaml").returncode == 0
    done = introspect("import", "yaml", "-o", "back")
    assert done.returncode == 0, done.stderr
    assert introspect("verify", "back").returncode == 0

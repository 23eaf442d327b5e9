"""Effects before causes: what changes no number is told, and is no divergence; what changes one is named as before."""

from __future__ import annotations

import json

import numpy as np
import pytest
from many_sites import timed
from opcapture import captured, compared
from refactored import (
    Called,
    Doubled,
    Exchanged,
    Merged,
    Net,
    Renamed,
    Task,
    adding,
    draws_once_more,
    evaluated,
    fed,
    fit,
    masking,
    two_models,
    with_extra,
    without_bias,
    wrapped_head,
)
from synthetic import row, write_run
from torch import nn

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.compare.terms.result import Verdict
from introspect_cli.records import Kind
from introspect_cli.render.json import diff_document, to_json
from introspect_cli.store.read.run import open_run

RUNS = {
    "plain": fit(Net),
    "renamed": fit(lambda: Net(Renamed)),
    "wrapped": fit(wrapped_head),
    "identity": fit(with_extra(nn.Identity)),
    "dropout": fit(with_extra(lambda: nn.Dropout(0.0))),
    "merged": fit(lambda: Net(Merged)),
    "exchanged": fit(lambda: Net(Exchanged)),
    "beside": fit(Net, around=evaluated(lambda: nn.Sequential(nn.Linear(4, 2), nn.ReLU()))),
    "another": fit(Net, around=evaluated(Net)),
    "drawn": fit(draws_once_more),
    "unbiased": fit(without_bias()),
    "biased": fit(without_bias(bias=True)),
    "task": fit(Task),
    "called": fit(Called),
    "doubled": fit(Doubled, steps=1),
    "halved": fit(lambda: Doubled(as_one=True), steps=1),
    "adds outside": fit(adding(inside=False)),
    "adds inside": fit(adding(inside=True)),
    "adds more inside": fit(adding(inside=True, factor=1.01)),
    "mask": fit(masking(wide=False, table=True)),
    "wide mask": fit(masking(wide=True)),
    "network first": two_models(),
    "target first": two_models(swapped=True),
    "target differs": two_models(swapped=True, target_differs=True),
    "images": fed(),
    "images by workers": fed(workers=2),
    "images with a bias": fed(bias=True),
    "images with a layer": fed(layer=True),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run by its name, captured when it is first asked for."""
    directory = tmp_path_factory.mktemp("runs")

    def find(name):
        path = directory / name.replace(" ", "-")
        return path if path.exists() else captured(path, RUNS[name])

    return find


@pytest.fixture
def diff(run):
    """Compare two runs by their names."""

    def compare(a, b, **options):
        return compared(run(a), run(b), **options)

    return compare


RANDOM = "the random state of torch differs from step 0 on and nothing recorded depends on it"
SAME = [
    ("plain", "renamed", "Names differ: Net.blocks.*.body is Net.blocks.*.mlp in b."),
    ("plain", "wrapped", "Net.head is Net.head.0 in b; only b has Net.head (Sequential) around what is inside it."),
    ("plain", "identity", "only b has Net.extra (Identity), which changes nothing: it gives back what it is given."),
    ("plain", "dropout", "only b has Net.extra (Dropout), which changes nothing: it gives back what it is given."),
    (
        "doubled",
        "halved",
        "Doubled.q and Doubled.k of a are one in b, Doubled.qk: put together, their parameters have",
    ),
    ("plain", "beside", f"only b also runs Sequential; {RANDOM}."),
    ("plain", "another", f"Net is Net#2 (net) in b; only b also runs another Net (other); {RANDOM}."),
    ("plain", "drawn", f"step 2. T{RANDOM[1:]}."),
    ("plain", "task", "Net is Task.net in b; only b has Task around what is inside it."),
    ("plain", "called", "only b has Net.blocks (Sequential) around what is inside it."),
    (
        "network first",
        "target first",
        "Net (network) is Net#2 (network) in b; Net#2 (target_network) is Net (target_network) in b.",
    ),
    ("images", "images by workers", f"step 2. {RANDOM[0].upper()}{RANDOM[1:].replace('step 0', 'step 1')}."),
]


@pytest.mark.parametrize(("a", "b", "said"), SAME, ids=[b for _, b, _ in SAME])
def test_what_changes_no_number_is_the_same(diff, a, b, said):
    result = diff(a, b)
    assert result.verdict is Verdict.SAME, result.sentence
    assert result.sentence.startswith("The runs have the same numbers: ")
    assert said in result.sentence
    assert result.counts.diverged == 0


@pytest.mark.parametrize(("a", "b", "said"), SAME, ids=[b for _, b, _ in SAME])
def test_it_is_the_same_the_other_way_round_too(diff, a, b, said):
    del said
    assert diff(b, a).verdict is Verdict.SAME


@pytest.mark.parametrize("b", [b for a, b, _ in SAME if a == "plain"])
def test_strict_makes_structure_and_random_states_count(diff, b):
    result = diff("plain", b, strict=True)
    assert (result.verdict, b) == (Verdict.SAME if b == "renamed" else Verdict.DIVERGED, b)


def test_without_values_a_rename_is_a_divergence_as_it_was(diff):
    result = diff("plain", "renamed", by_value=False, strict=True)
    assert "the module Net.blocks.0.body exists only in a" in result.sentence
    assert result.suggestions


def test_a_bias_that_is_drawn_explains_the_random_state(diff):
    result = diff("unbiased", "biased")
    assert result.verdict is Verdict.DIVERGED
    assert result.first.site.fqn == "Net.inp.bias"
    assert "the parameter Net.inp.bias exists only in b" in result.sentence
    assert result.explains[-1].code == "random-follows"
    assert result.explains[-1].fields == {"names": "torch"}


@pytest.mark.parametrize(
    ("b", "fqn", "only"),
    [
        ("images with a bias", "Images.layer3.conv1.bias", "the parameter Images.layer3.conv1.bias exists only in b"),
        ("images with a layer", "Images.layer4.weight", "the module Images.layer4 exists only in b (Conv2d)"),
    ],
)
def test_what_was_added_and_draws_comes_before_the_random_state(diff, b, fqn, only):
    result = diff("images", b)
    assert result.verdict is Verdict.DIVERGED
    assert (result.first.site.fqn, result.first.reason) == (fqn, "structure")
    assert only in result.sentence
    assert result.explains[-1].code == "random-follows"
    assert result.explains[-1].fields == {"names": "torch"}


def test_another_seed_is_not_explained_by_structure(tmp_path):
    rng = np.random.default_rng(0)

    def steps(seed, *more):
        values = np.random.default_rng(seed)
        weights = {name: values.normal(size=(3, 3)).astype(np.float32) for name in ("Net.a.weight", "Net.b.weight")}
        return [
            [
                row("start", "rng", "torch", np.arange(4) + seed),
                *(row("start", "param", name, value) for name, value in weights.items()),
                *(row("start", "param", name, rng.normal(size=3)) for name in more),
                row("forward", "output", "Net", weights["Net.b.weight"]),
            ]
        ]

    write_run(tmp_path / "a", steps(1))
    write_run(tmp_path / "b", steps(2, "Net.b.bias"))
    with open_run(tmp_path / "a") as a, open_run(tmp_path / "b") as b:
        result = compare_runs(a, b, DiffOptions())
    assert result.first.site.kind is Kind.RNG
    assert "left: the seed" in result.sentence


def test_a_merge_that_rounds_differs_by_rounding_alone(diff):
    strict_result = diff("plain", "merged")
    assert strict_result.verdict is Verdict.DIVERGED
    assert any(change.change == "merged" and change.b == "Net.blocks.*.qk" for change in strict_result.structure)
    codes = {one.code: one.fields for one in strict_result.explains}
    assert codes["merged"] == {"parts": "Net.blocks.0.q, Net.blocks.0.k", "whole": "Net.blocks.0.qk", "side": "b"}
    assert "first-shared-rounding" in codes
    within = diff("plain", "merged", rtol=1e-4, atol=1e-4)
    assert within.verdict is Verdict.SAME, within.sentence
    assert "of them within the tolerance" in within.sentence


def test_a_swapped_pair_that_differs_is_named_where_it_does(diff):
    result = diff("network first", "target differs")
    assert result.verdict is Verdict.DIVERGED
    assert result.first.site.kind is Kind.LOSS


def test_what_changed_a_number_is_named_though_structure_differs_before_it(run, tmp_path, diff):
    path = captured(tmp_path / "faster", fit(with_extra(nn.Identity), rate=0.06))
    with open_run(run("plain")) as a, open_run(path) as b:
        result = compare_runs(a, b, DiffOptions())
    assert (result.first.reason, result.first.site.kind) == ("optimizer", Kind.PARAM)
    assert "only b has Net.extra (Identity)" in {change.text for change in result.structure}
    assert all("changes nothing" not in change.note for change in result.structure)


def test_json_tells_structure(diff):
    (change,) = json.loads(to_json(diff_document(diff("plain", "renamed"))))["structure"]
    assert (change["change"], change["a"], change["b"]) == ("renamed", "Net.blocks.*.body", "Net.blocks.*.mlp")
    assert change["evidence"].endswith("are equal")


def test_the_command_line_takes_both_options(run, introspect):
    for more, code, said in (
        ([], 0, "Net.blocks.*.body is Net.blocks.*.mlp in b (8 values"),
        (["--match", "name"], 0, "Net.blocks.*.mlp (Sequential)"),
        (["--match", "name", "--strict"], 1, "the module Net.blocks.0.body exists only in a"),
    ):
        answer = introspect("diff", run("plain"), run("renamed"), *more)
        words = " ".join(answer.stdout.split())
        assert (answer.returncode, said) == (code, said if said in words else words)


def lean(path, work, *kinds):
    """A run of which only these kinds are recorded."""
    return captured(path, work, record=frozenset(Kind(kind) for kind in kinds))


def test_without_results_nobody_says_that_an_inserted_module_changed_nothing(tmp_path):
    runs = [
        lean(tmp_path / name, fit(build), "input", "output", "batch")
        for name, build in (("a", Net), ("b", with_extra(nn.Identity)))
    ]
    with open_run(runs[0]) as a, open_run(runs[1]) as b:
        result = compare_runs(a, b, DiffOptions())
    assert result.verdict is Verdict.SAME or "were not recorded" in result.sentence


def test_a_saved_copy_of_a_buffer_that_one_model_lacks_is_structure(tmp_path):
    def rows(*more):
        shared = [row("loss", "loss", "loss", 1.0), row("forward", "product", "net.pt", np.ones(2), path="['net.w']")]
        return [[row("optimizer", "param", "Net.net.w", np.ones(2)), *shared, *more]]

    mask = np.ones((2, 2))
    saved = [row("forward", "product", "net.pt", mask, path=f"['{name}']") for name in ("net.mask", "other")]
    write_run(tmp_path / "a", rows())
    write_run(tmp_path / "b", rows(row("start", "buffer", "Net.net.mask", mask), saved[0]))
    write_run(tmp_path / "c", rows(row("start", "buffer", "Net.net.mask", mask), *saved))
    result = compared(tmp_path / "a", tmp_path / "b")
    assert result.verdict is Verdict.SAME, result.sentence
    assert "only b has the saved tensor ['net.mask'] of net.pt" in result.sentence
    assert compared(tmp_path / "a", tmp_path / "c").verdict is Verdict.DIVERGED


def test_a_tensor_that_is_saved_under_another_name_of_its_model_is_structure(tmp_path):
    def rows(inside, key):
        weight = np.random.default_rng(0).normal(size=(3, 3))
        trained = [row(phase, "param", f"Net.{inside}.w", weight) for phase in ("start", "optimizer")]
        return [
            [*trained, row("loss", "loss", "loss", 1.0), row("forward", "product", "n.pt", weight, path=f"['{key}']")]
        ]

    runs = (("net", "net.w"), ("net", "module.net.w"), ("body", "body.w"), ("net", "average.w"))
    for name, run in zip("abcd", runs, strict=True):
        write_run(tmp_path / name, rows(*run))
    for name, (_, key) in zip("bc", runs[1:3], strict=True):
        result = compared(tmp_path / "a", tmp_path / name)
        assert result.verdict is Verdict.SAME
        assert f"only b has the saved tensor ['{key}'] of n.pt" in result.sentence
    assert compared(tmp_path / "a", tmp_path / "d").verdict is Verdict.DIVERGED


def test_two_models_that_share_nothing_are_not_the_same(tmp_path):
    rng = np.random.default_rng(0)

    def steps(name):
        return [
            [
                row("data", "batch", "DataLoader", np.arange(5)),
                row("start", "param", f"{name}.weight", rng.normal(size=(3, 3))),
                row("optimizer", "param", f"{name}.weight", rng.normal(size=(3, 3))),
            ]
        ]

    write_run(tmp_path / "a", steps("Net"))
    write_run(tmp_path / "b", steps("Other"))
    with open_run(tmp_path / "a") as a, open_run(tmp_path / "b") as b:
        result = compare_runs(a, b, DiffOptions())
    assert result.verdict is Verdict.DIVERGED
    assert result.first.reason == "structure"


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_constants_prove_no_rename(tmp_path, value):
    other = np.random.default_rng(0).normal(size=4)

    def steps(name):
        return [
            [
                row("start", "param", f"Net.{name}.weight", np.full((3, 3), value)),
                row("loss", "loss", "loss", 1.0),
                row("forward", "output", "Net", other),
            ]
        ]

    write_run(tmp_path / "a", steps("old"))
    write_run(tmp_path / "b", steps("new"))
    with open_run(tmp_path / "a") as a, open_run(tmp_path / "b") as b:
        result = compare_runs(a, b, DiffOptions())
    assert {change.change for change in result.structure} == {"only"}


def test_values_that_two_modules_share_prove_no_rename_of_either(tmp_path):
    value = np.random.default_rng(0).normal(size=(3, 3))

    def steps(names):
        rows = [row("start", "param", f"Net.{name}", value) for name in names]
        return [[*rows, row("loss", "loss", "loss", 1.0)]]

    write_run(tmp_path / "a", steps(["one", "two"]))
    write_run(tmp_path / "b", steps(["red", "blue"]))
    with open_run(tmp_path / "a") as a, open_run(tmp_path / "b") as b:
        result = compare_runs(a, b, DiffOptions())
    assert "renamed" not in {change.change for change in result.structure}


def test_a_rename_is_found_in_a_run_of_sampled_steps(tmp_path):
    from introspect_cli.schedule.rules import Schedule

    every = Schedule.parse("1::2")
    runs = [
        captured(tmp_path / name, fit(build, steps=4), steps=every)
        for name, build in (("a", Net), ("b", lambda: Net(Renamed)))
    ]
    with open_run(runs[0]) as a, open_run(runs[1]) as b:
        result = compare_runs(a, b, DiffOptions())
    assert result.verdict is Verdict.SAME
    assert "Net.blocks.*.body is Net.blocks.*.mlp in b" in result.sentence


def test_lean_records_find_a_rename_by_checksums_alone(tmp_path):
    runs = [
        captured(tmp_path / name, fit(build), stats=(), sketch=False, record=frozenset({Kind.PARAM, Kind.LOSS}))
        for name, build in (("a", Net), ("b", lambda: Net(Renamed)))
    ]
    with open_run(runs[0]) as a, open_run(runs[1]) as b:
        result = compare_runs(a, b, DiffOptions())
    assert result.verdict is Verdict.SAME, result.sentence
    assert "Net.blocks.*.body is Net.blocks.*.mlp in b" in result.sentence


def test_many_sites_are_known_under_other_names_in_about_linear_time():
    few = min(timed(5_000)[1] for _ in range(5))
    found, seconds = min((timed(160_000) for _ in range(2)), key=lambda one: one[1])
    assert len(found.renamed) == 3200
    assert found.renamed["Net.blocks.7.body"].name == "Net.blocks.7.mlp"
    # 32 times as many sites take some 35 times as long; where the time grew with the square, it was over 300 times
    assert seconds < 100 * few


def test_runs_whose_results_are_all_equal_are_the_same_and_what_differs_is_reported(diff):
    result = diff("adds outside", "adds inside")
    assert (result.verdict, result.first) == (Verdict.SAME, None)
    said = (
        "the losses, gradients of the parameters, parameters and optimizer states are equal up to and including step 2"
    )
    assert result.sentence.startswith(
        f"The runs have the same results: {said}. What differs changed none of them, first"
    )
    assert "at step 0: the output of Sum.body (Body) differs" in result.sentence


@pytest.mark.parametrize("options", [{"kinds": ("param", "output")}, {"record": ("param", "grad", "loss", "output")}])
def test_results_decide_only_where_all_of_them_are_on_record_and_selected(tmp_path, options):
    """Neither a selection nor a lean capture shows that nothing else differs."""
    kinds = frozenset(map(Kind, options.get("kinds", ())))
    lean = {"record": frozenset(map(Kind, options["record"]))} if "record" in options else {}
    runs = [captured(tmp_path / name, RUNS[name], **lean) for name in ("adds outside", "adds inside")]
    with open_run(runs[0]) as a, open_run(runs[1]) as b:
        result = compare_runs(a, b, DiffOptions(kinds=kinds))
    assert result.verdict is Verdict.DIVERGED, result.sentence


def test_strict_counts_what_changed_no_result(diff):
    result = diff("adds outside", "adds inside", strict=True)
    assert result.verdict is Verdict.DIVERGED
    assert result.sentence.startswith("First divergence at step 0: the output of Sum.body (Body) differs")
    said = "The losses, gradients of the parameters, parameters and optimizer states of all 3 steps compared agree"
    assert result.evidence[-1] == f"{said}: what differs changed none of them."


def test_of_what_one_run_alone_has_it_says_which_value_of_both_differs(diff):
    """As where a library has tables in other places: a buffer that one run alone has is no equal result."""
    result = diff("mask", "wide mask", strict=True)
    assert result.verdict is Verdict.DIVERGED
    assert result.evidence[-1] == (
        "The losses, gradients of the parameters, parameters and optimizer states of all 3 steps compared agree: "
        "what differs changed none of them. "
        "The first value of both runs that differs is the input ['mask'] of Sum.body in step 0."
    )


def test_a_mask_in_another_form_and_a_table_in_another_place_change_nothing(diff):
    result = diff("mask", "wide mask")
    assert result.verdict is Verdict.SAME
    assert "only a has" in result.sentence
    assert any("first the input ['mask'] of Sum.body" in note for note in result.notes)


@pytest.mark.parametrize(
    ("a", "b", "options"),
    [
        ("adds outside", "adds more inside", {}),
        ("adds outside", "adds inside", {"modules": ("body",)}),
        ("network first", "target differs", {}),
        ("plain", "exchanged", {}),
        ("plain", "merged", {}),
        ("unbiased", "biased", {}),
    ],
)
def test_a_divergence_with_another_result_does_not(diff, a, b, options):
    result = diff(a, b, **options)
    assert result.verdict is Verdict.DIVERGED
    assert not any("changed none of them" in line for line in result.evidence)


def test_what_a_capture_left_out_is_not_looked_for_by_value(tmp_path):
    chosen = {"modules": ("q", "k", "qk")}
    runs = [captured(tmp_path / name, RUNS[name], **chosen) for name in ("doubled", "halved")]
    with open_run(runs[0]) as a, open_run(runs[1]) as b:
        result = compare_runs(a, b, DiffOptions())
    assert (result.verdict, result.first.reason) == (Verdict.DIVERGED, "structure"), result.sentence
    assert [one.code for one in result.explains] == ["merged"]

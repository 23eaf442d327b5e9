"""A comparison as blocks: what is said, in which order, in how much room."""

import math
from typing import get_args

import pytest
from rendered import text_of

from introspect_cli.compare.changes.clues import CodeChanges, Nearness, Ranked
from introspect_cli.compare.changes.statements import Change, Side
from introspect_cli.compare.terms.findings import Part, Reach, Restored, Resumption, StepReach, StructureChange
from introspect_cli.compare.terms.result import (
    Counts,
    DiffResult,
    Divergence,
    DivergenceMap,
    Finding,
    Origin,
    Role,
    SettingChange,
    Verdict,
)
from introspect_cli.records import Kind, Layout, Phase, Site, Status, Summary
from introspect_cli.render.blocks import table_lines
from introspect_cli.render.diff_text import diff_blocks
from introspect_cli.render.divergence_text import divergence_table, glance
from introspect_cli.render.findings import findings_blocks, findings_document, page_blocks
from introspect_cli.render.markup import html_of
from introspect_cli.render.plots_text import map_blocks


def side(shape=(2, 3), dtype="float32", status=Status.OBSERVED, checksum=1, text="", **stats):
    return Summary(status, Layout(shape, dtype, "cpu"), checksum, stats, (), text)


def divergence(a, b, *, kind=Kind.OUTPUT, fqn="GPT.blocks.0.attn.qkv", path="", role=Role.ORIGIN, **more):
    about = {"step": 3, "step_b": 3, "rank": 0, "rel_l2": 0.01} | more
    site = Site(Phase.FORWARD, kind, fqn, 0, path)
    return Divergence(sequence=1.0, site=site, module_class="Linear", role=role, reason="module", a=a, b=b, **about)


def result(*divergences, **more):
    about = {
        "verdict": Verdict.DIVERGED,
        "sentence": "First divergence at step 3.",
        "first": divergences[0] if divergences else None,
        "divergences": divergences,
        "counts": Counts(steps_compared=4, steps_diverged=1, diverged=30),
    }
    return DiffResult(a="a", b="b", **(about | more))


@pytest.mark.parametrize(
    ("a", "b", "shown"),
    [
        (side((2, 3)), side((2, 4)), ("2x3", "2x4")),
        (side(dtype="float32"), side(dtype="bfloat16"), ("fp32", "bf16")),
        (side(nans=0), side(nans=3), ("0 NaN", "3 NaN")),
        (side(infs=2), side(infs=0), ("2 Inf", "0 Inf")),
        (side((), mean=1.25), side((), mean=1.5), ("1.25", "1.5")),
        (side(mean=0.0, std=1.0), side(mean=0.5, std=1.0), ("mean 0", "0.5")),
        (side(mean=0.0, std=1.0), side(mean=0.0, std=2.0), ("std 1", "2")),
        (side(mean=0.0, std=1.0, checksum=10), side(mean=0.0, std=1.0, checksum=11), ("#00000000", "#00000000")),
        (side(text="3", status=Status.VALUE), side(text="4", status=Status.VALUE), ("3", "4")),
        (None, side((4,)), ("(none)", "4 fp32")),
        (side((), dtype="python.int", text="7", status=Status.VALUE), None, ("7", "(none)")),
    ],
)
def test_a_and_b_at_a_glance(a, b, shown):
    assert glance(divergence(a, b)) == shown


def test_the_sentence_comes_first_and_the_notes_last():
    settings = (
        SettingChange("hyperparameter", "lr", "0.1", "0.2", explains=True, weight=1.0),
        SettingChange("environment", "X", None, "1", weight=0.2),
    )
    rows = divergence(side(mean=0.0), side(mean=1.0))
    found = result(rows, settings=settings, evidence=("Batches agree.",), notes=("Half seen.",))
    text = text_of(diff_blocks(found, everything=True))
    order = ["First divergence", "- Batches agree.", "lr 0.1 -> 0.2", "X 1, only in b", "origin", "29 not listed"]
    assert [text.index(word) for word in order] == sorted(text.index(word) for word in order)
    assert text.rstrip().endswith("Note: Half seen.")
    assert "lr" not in text_of(diff_blocks(found))


def test_same_says_no_more_than_it_must():
    found = result(
        verdict=Verdict.SAME, sentence="The runs are the same.", settings=(SettingChange("environment", "X", "1", "2"),)
    )
    assert text_of(diff_blocks(found)) == "The runs are the same."


def test_columns_appear_where_they_say_something():
    plain = divergence_table((divergence(side(mean=0.0), side(mean=1.0)),))
    assert [column.title for column in plain.columns] == [
        "step",
        "phase",
        "module",
        "what",
        "a",
        "b",
        "rel. L2",
        "role",
    ]
    noisy = divergence_table((divergence(side(), side(), floor=0.001),))
    assert noisy.rows[0][-2:] == ("10", "origin")
    shifted = divergence_table((divergence(side(), side(), step_b=0),), ranks=True)
    assert [column.title for column in shifted.columns][:3] == ["step", "of b", "rank"]


@pytest.mark.parametrize("width", [80, 100])
def test_the_table_fits_with_long_names(width):
    rows = tuple(
        divergence(
            side(mean=0.0123456, std=1.0),
            side(mean=0.0123457, std=1.0),
            kind=kind,
            fqn=f"GPTLanguageModel.transformer.blocks.{place}.attention.qkv_projection.weight",
            path="['exp_avg_sq']",
            role=Role.PROPAGATED,
        )
        for place, kind in enumerate((Kind.OUTPUT, Kind.OPTIMIZER_STATE))
    )
    lines = [row.text for row in table_lines(divergence_table(rows), width)]
    assert max(map(len, lines)) <= width
    assert all(row.endswith("propagated") for row in lines[1:])
    assert all("weight" in row for row in lines[1:])


def test_candidates_of_several_ranks_are_listed():
    rows = tuple(divergence(side(mean=0.0), side(mean=1.0), rank=rank) for rank in range(2))
    text = text_of(diff_blocks(result(*rows, candidates=rows)))
    assert "First on each rank, by step and phase (no other order is known):" in text
    assert text.count("origin") == len(rows)  # each in one row


def test_details_show_both_sides_and_the_change():
    found = result(divergence(side(mean=1.0, min=0.0), side(mean=1.5)))
    text = text_of(diff_blocks(found, verbose=True))
    assert "mean 1 -> 1.5" in text
    assert "shape" not in text


MAP = DivergenceMap(
    modules=tuple(f"Net.{place}" for place in range(60)),
    steps=tuple(range(300)),
    values=tuple(tuple(0.0 if step < place * 5 else 0.01 for step in range(300)) for place in range(60)),
    behind=((False,) * 300,) * 60,
    unmeasured=((False,) * 300,) * 60,
)


@pytest.mark.parametrize("width", [60, 100, 160])
def test_a_map_is_folded_into_the_width_and_keeps_what_differs_first(width):
    text = text_of(map_blocks(result(map=MAP), 12), width)
    lines = [row for row in text.splitlines() if row.startswith("Net.")]
    assert [row.split()[0] for row in lines] == [f"Net.{place}" for place in range(12)]
    assert max(map(len, lines)) <= width
    assert "48 more rows" in text


def test_a_map_is_shaded_by_distance():
    values = ((0.0, 0.0, 1e-7, 1e-4, 0.05, 2.0, math.inf),)
    behind = ((False, True, *(False,) * 5),)
    blocks = map_blocks(result(map=DivergenceMap(("Net",), tuple(range(7)), values, behind, ((False,) * 7,))))
    assert "··--░░▒▒▓▓████" in text_of(blocks)


FINDINGS = (
    StructureChange("only", None, "Net.extra", "only b has Net.extra", evidence="it is in no step of a"),
    CodeChanges((Ranked(Change("model.py", "Net", Side(4, 4, "x = 1"), Side(4, 4, "x = 2")), Nearness.COMPUTES),)),
    Origin("the random state of torch was not restored", None, "random state of torch"),
    Resumption("b", 4, 0, "counters", (Part("optimizer state", Restored.NO, "step 5 -> 1"),)),
    Reach((1,), 4, 4, StepReach(3, 40.0, "Net.head", "the output of Net.head"), None),
)


def forms(*findings):
    alone = result(divergence(side(mean=0.0), side(mean=1.0)), findings=findings)
    document = {key: value for key, value in findings_document(alone).items() if value}
    return document, text_of(findings_blocks(alone, everything=False)), html_of(page_blocks(alone))


@pytest.mark.parametrize("kind", get_args(Finding), ids=lambda kind: kind.__name__)
def test_every_type_of_finding_is_carried_by_one_list_and_has_its_forms(kind):
    (found,) = (one for one in FINDINGS if isinstance(one, kind))
    assert forms() == ({}, "", "")
    document, text, page = forms(found, Origin("eps 1e-05 -> 0.1", None)) if kind is Origin else forms(found)
    assert len(document) == 1
    assert text or kind is CodeChanges, "it stands among the causes, and under --changes"
    assert page

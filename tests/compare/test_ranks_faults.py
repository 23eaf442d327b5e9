"""Faults that ranks can have, each planted in small trainings: what `check` says of a run alone, `diff` beside another.

All runs come from two launches; a fault that needs no second run is told by `check`, and whatever changes a number by
`diff`, against one process (`1`) and against a sound run of the same layout (`n`).
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from artefacts import artefact
from launches import DISTRIBUTED, SCRIPT, finish, lacks, needs, together

from introspect_cli.compare.answer.compared import copies_note
from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.compare.terms.result import Verdict
from introspect_cli.health.aligned import Ranks
from introspect_cli.health.check import RULES, check
from introspect_cli.health.equal import peers_of
from introspect_cli.records import Kind, Phase, Site
from introspect_cli.render.blocks import Table
from introspect_cli.render.diff_text import diff_blocks
from introspect_cli.store.read.run import open_run

pytestmark = [
    pytest.mark.launch,
    DISTRIBUTED,
]

ALONE = ("hand-none", "hand-batchnorm", "hand-uneven")
FLAGS = ("hand", "ddp", "fsdp2", "tp")
TF32 = "'high' on rank 1 and 'highest' on rank 0"
WENT_IN = "its optimizer takes what went into all_reduce sum of float32 [16, 16] at faults.py:"
ORDER = "came out of collective 0 of ranks 0,1 on one rank and out of collective 1 on another"
HALF = "cover 1/2 of it: ranks 0, 1 hold the same part"
CUT = (("tp", "GPT"), ("fsdp2", "Net"))
EACH = "rank 0 alone and over rank 1 alone"
FOUND = [
    # case, rule, step, rank, site, what the evidence says
    ("hand-unreduced", "reduction", 0, 1, "grad Net.head.bias", "it was not reduced, or not over these ranks"),
    ("ddp-unreduced", "reduction", 0, 1, "grad Net.head.bias", "compared with rank 0 (relative L2"),
    ("hand-alone", "reduction", 0, 1, "grad Net.extra.bias", "its gradient was not reduced on rank 1"),
    ("fsdp2-unreduced", "reduction", 0, 1, "grad Net.head.bias", "it was not reduced"),
    ("hand-group", "reduction", 0, 1, "grad Net.head.weight", "it was not reduced, or not over these ranks"),
    ("ddp-group", "reduction", 0, 1, "grad Net.tok.weight", "reduced"),
    ("hand-weight~collectives", "reduction", 0, 1, "grad Net.extra.weight", f"reduced on rank 1: {WENT_IN}"),
    ("hand-skipped~collectives", "reduction", 0, 1, "grad Net.extra.weight", "it was not reduced, or not over these"),
    ("ddp-skipped~collectives", "reduction", 0, 1, "grad Net.extra.weight", "it was not reduced, or not over these"),
    ("fsdp2-skipped~collectives", "reduction", 0, 1, "grad Net.extra.weight", "it was not reduced, or not over these"),
    ("hand-group~collectives", "reduction", 0, 1, "grad Net.head.weight", f"reduced over {EACH} (all_reduce sum of f"),
    ("hand-order~collectives", "reduction", 0, 1, "grad Net.tok.weight", ORDER),
    (
        "hand-scaled",
        "reduction",
        0,
        1,
        "grad Net.extra.weight",
        "(0.5 x): it is a multiple",
    ),
    ("sp-norm", "reduction", 0, 1, "grad Net.between.weight", "it was not reduced"),
    ("ddp-expert", "copies-differ", 0, 1, "param Experts.expert.weight", "gradients were averaged over them"),
    ("tp-unused", "rank-gradients", 0, 1, "grad GPT.blocks.0.norm.weight", "rank 1 has no gradient of GPT.blocks.0"),
    ("tp-dtype", "rank-layout", 0, 1, "param GPT.blocks.0.norm.weight", "rank 0: float32 [16]; rank 1: bfloat16"),
    ("tpsp-norm", "reduction", 0, 1, "grad GPT.blocks.0.norm.weight", "it was not reduced"),
    ("hand-stale", "copies-differ", 0, 1, "param Net.head.weight", "(1.5 x) from the first step on record"),
    (
        "ddp-stale",
        "copies-differ",
        1,
        1,
        "param Net.head.weight",
        "from step 1 on the parameter Net.head.weight differs on rank 1",
    ),
    ("hand-expert", "copies-differ", 0, 1, "param Experts.expert.weight", "gradients were averaged over them"),
    ("ddp-sum", "summed-gradients", 0, 0, "grad Net.tok.weight", "gave, not their mean: right only where"),
    ("fsdp2-sum", "summed-gradients", 0, 0, "grad Net.tok.weight", "is the sum of what the backward passes of the 2"),
    ("hand-unused", "rank-gradients", 0, 1, "grad Net.extra.weight", "rank 1 has no gradient of Net.extra.weight"),
    ("hand-skip", "rank-steps", 1, 1, "rank 1", "no parameter of rank 1 was changed in step 1, those of rank 0 were"),
    ("ddp-skip", "rank-steps", 1, 1, "rank 1", "rank 1 has 2 losses in step 1 and rank 0 1"),
    ("fsdp2-skip", "rank-steps", 1, 1, "rank 1", "rank 1 has 2 losses in step 1 and rank 0 1"),
    ("tp-skip", "rank-steps", 1, 1, "rank 1", "did not step its optimizer where the others did"),
    ("hand-rate", "rank-settings", 0, 1, "SGD[0]['lr']", "(rank 0: 0.01; rank 1: 0.02)"),
    ("ddp-rate", "rank-settings", 0, 1, "SGD[0]['lr']", "(rank 0: 0.01; rank 1: 0.02)"),
    *((f"{layout}-tf32", "rank-settings", 0, 1, "runtime.float32_matmul_precision", TF32) for layout in FLAGS),
    ("hand-dtype", "rank-layout", 0, 1, "param Net.extra.weight", "rank 0: float32 [16, 16]; rank 1: bfloat16"),
    ("ddp-momentum", "rank-settings", 0, 1, "Net.between.momentum", "is 0.3 on rank 1 and 0.1 on rank 0"),
    ("ddp-autocast", "rank-layout", 0, 1, "output Net.extra", "in dtype (rank 0: float32; rank 1: bfloat16)"),
    (
        "ddp-unreduced-clipped",
        "reduction",
        0,
        1,
        "grad Net.head.bias",
        "; 4 other gradients differ by a factor, as cl",
    ),
    ("hand-same-samples", "same-samples", 0, 1, "batch", "the same batch as rank 0 in 6 of 6 draws"),
    ("ddp-same-samples", "same-samples", 0, 1, "batch", "the same batch as rank 0 in 6 of 6 draws"),
    ("fsdp2-same-samples", "same-samples", 0, 1, "batch", "the same batch as rank 0 in 6 of 6 draws"),
    ("ddp-same-inputs", "same-samples", 0, 1, "input", "the same inputs as rank 0 in 3 of 3 calls"),
    ("hand-uneven", "uneven-batches", 2, 1, "batch", "rank 0: 4, rank 1: 2"),
    ("ddp-uneven-inputs", "uneven-batches", 0, 0, "input", "inputs of step 0 are of different sizes (rank 0: 2"),
    ("fsdp2-uneven", "uneven-batches", 2, 1, "batch", "samples of the smaller batch count for more"),
    ("tp-dropout", "rank-outputs", 0, 1, "output GPT.blocks.1.norm.1", "the random states it draws from differ"),
    ("tp-dropout", "reduction", 0, 1, "grad GPT.tok.weight", "the ranks had diverged before it"),
    ("hand-faulty", "rank-outputs", 1, 1, "output Net.extra", "in 1 of 2 calls: nothing it was given explains why"),
    ("tp-offset", "shards", 0, 0, "param GPT.blocks.0.up.weight", "rank 1 holds the same values as rank 0"),
    ("fsdp2-offset", "shards", 0, 0, "param Net.head.weight", "at another place of the whole"),
    *((f"{layout}-mesh", "shards", 0, 0, f"param {name}.tok.weight", HALF) for layout, name in CUT),
    (
        "tpsp-dropout",
        "rank-outputs",
        0,
        1,
        "output GPT.head.1",
        "in 3 of 3 calls: the random states it draws from differ",
    ),
    ("hand-batchnorm", "buffers-differ", 0, 1, "buffer Net.between.running_mean", "to the last, and nobody broadcasts"),
    ("ddp-nobroadcast", "buffers-differ", 0, 1, "buffer Net.between.running_mean", "its wrapper broadcasts none"),
    ("ddp-mode", "rank-settings", 1, 1, "Net.between.training", "is False on rank 1 and True on rank 0"),
    ("ddp-join", "uneven-batches", 1, 1, "rank 1", "1 step before the others: every step has its loss, so its"),
    ("fsdp2-twice", "rank-steps", 2, 0, "rank 0", "rank 1 stepped its optimizer once more, without a forward pass"),
    ("tp-sampler", "peers-differ", 0, 1, "input GPT.tok", "tables are parts of one whole: their batches differ"),
    ("tp-sampler", "reduction", 0, 1, "grad GPT.tok.weight", "the ranks had diverged before it"),
    ("gpipe-untied", "tied-weights", 0, 1, "param GPT.head.weight", "begin equal, as tied weights do, and differ"),
    ("1f1b-untied", "tied-weights", 0, 1, "param GPT.head.weight", "their gradients were not added up"),
]
HALVED = "b is 0.5 times a"
TOLD = [
    # case, against, rank of the first divergence, what the sentence says or finds, by codes
    ("hand-sum", "1", 0, "the gradient of Net.head.weight|summed"),
    ("hand-sum", "n", 0, "step 0, on both ranks: the gradient of Net.head.weight|summed"),
    ("ddp-sum", "1", 0, "the gradient of Net.tok.weight|summed"),
    ("ddp-sum", "n", 0, "the gradient of Net.tok.weight|summed"),
    ("fsdp2-sum", "1", 0, "the gradient of Net.tok.weight|summed"),
    ("fsdp2-sum", "n", 0, "the gradient of Net.tok.weight|summed"),
    ("ddp-kept", "n", 0, "plus 0.5 x that of the step before: zero_grad is missing or late on 1 of 2 ranks in b"),
    ("ddp-nobroadcast", "n", 1, "in a, DDP broadcasts buffers before each forward pass, and not in b (broadcast_buf"),
    ("hand-halved", "n", 1, f"step 0, rank 1: the gradient of Net.tok.weight|{HALVED}"),
    ("fsdp2-halved", "n", 1, f"step 0, rank 1: the gradient of Net.tok.weight|{HALVED}"),
    ("gpipe-scale", "n", 0, "summed"),
    ("1f1b-scale", "n", 0, "summed"),
    ("hand-unreduced", "1", 0, "Net.head.bias|copies|not-reduced-proved"),
    ("ddp-unreduced", "n", 0, "copies|not-reduced-proved"),
    ("fsdp2-unreduced", "1", 0, "Net.head.bias|copies|not-reduced-proved"),
    ("ddp-unreduced-clipped", "n", 0, "copies"),
    ("hand-group", "n", 0, "the gradient of Net.head.weight|copies|not-reduced-proved"),
    ("hand-skipped", "1", 0, "Net.extra.weight|copies|not-reduced-proved"),
    ("ddp-skipped", "n", 0, "Net.extra.weight|copies|not-reduced-proved"),
    ("hand-weight", "1", 0, "the gradient of Net.extra.weight|not-reduced-on"),
    ("hand-weight", "n", 1, "the gradient of Net.extra.weight|not-reduced-on"),
    ("hand-stale", "n", 1, "step 0, rank 1: the parameter Net.head.weight differs before any training"),
    ("hand-stale", "1", 0, "Net.head.weight differs before any training|copies"),
    ("ddp-stale", "n", 1, "step 1, rank 1: only b has the parameter Net.head.weight|changed-outside"),
    ("hand-rate", "n", 1, "step 0, rank 1: the parameter|cause: lr 0.01 -> 0.02"),
    ("hand-rate", "1", 0, "in b, lr is 0.01 on rank 0 and 0.02 on rank 1|copies"),
    ("hand-same-samples", "n", 1, "step 0, rank 1: the batch from DataLoader"),
    ("fsdp2-same-samples", "n", 1, "step 0, rank 1: the batch from DataLoader"),
    ("hand-dtype", "n", 1, "step 0, rank 1: the parameter Net.extra.weight|cast"),
    ("hand-skip", "n", 1, "step 1, rank 1: the gradient of Net.head.bias|0 Inf against 1"),
    ("tp-offset", "n", 1, "step 0, rank 1: the parameter GPT.blocks.0.up.weight differs before any training"),
    ("fsdp2-offset", "1", 0, "the parameter Net.head.weight differs before any training"),
    ("tp-mesh", "n", 0, f"GPT.tok.weight|in b its parts are not the whole: the parts of it on record {HALF}"),
    ("fsdp2-mesh", "n", 0, f"Net.tok.weight|in b its parts are not the whole: the parts of it on record {HALF}"),
    ("fsdp2-mesh", "1", 0, f"in b its parts are not the whole: the parts of it on record {HALF}"),
    ("hand-batchnorm", "1", 0, "the output of Net.between (BatchNorm1d) differs"),
    ("ddp-batchnorm", "1", 0, "the output of Net.between (BatchNorm1d) differs"),
    ("hand-uneven", "1", 0, "step 2: the loss differs|split-uneven"),
    ("hand-local-clip", "n", 0, "the gradient of Net.tok.weight|its reduction over the ranks, clipping"),
    ("fsdp2-local-clip", "n", 0, "the gradient of Net.tok.weight|clipping"),
]  # fmt: skip
THREE_QUARTERS = "cover 3/4 of it: ranks 1, 2 hold the same part"
FOUR = [
    # case, rule, rank, site, what the evidence says: replicas of two ranks each
    (
        "hand-halves",
        "reduction",
        2,
        "grad Net.head.weight",
        "it is one gradient on ranks 0, 1 and another on ranks 2, 3",
    ),
    (
        "hand-unreduced",
        "reduction",
        1,
        "grad Net.head.bias",
        "ranks 1, 2, 3, compared with rank 0 (relative L2",
    ),
    ("fsdp2-mesh", "shards", 0, "param Net.tok.weight", THREE_QUARTERS),
    ("fsdp2tp-dropout", "rank-outputs", 1, "output GPT.blocks.1.norm.1", "on rank 1 differs from that on rank 0"),
    ("fsdp2tp-dropout", "reduction", 1, "grad GPT.blocks.0.down.bias", "the ranks had diverged before it"),
]
"""What four ranks can do that two cannot."""

MANY = [
    # world, case, what is said or found beside a sound run of as many ranks
    (3, "hand-sum", "on all 3 ranks: the gradient of Net.head.weight|summed"),
    (4, "hand-sum", "on all 4 ranks: the gradient of Net.head.weight|summed"),
    (4, "fsdp2-mesh", f"Net.tok.weight|in b its parts are not the whole: the parts of it on record {THREE_QUARTERS}"),
]

SOUND = ("sp-none", "ddp-experts", "hand-none", "hand-dropout", "hand-experts",
         "hand-none~collectives", "ddp-none~collectives",
         "ddp-none", "ddp-batchnorm", "ddp-dropout", "fsdp2-none",
         "ddp-clipped", "tp-none", "tpsp-none", "gpipe-none", "1f1b-none")  # fmt: skip


@pytest.fixture(scope="module")
def runs():
    return artefact("faults", made)


def made(folder):
    script = SCRIPT.parent / "faults.py"
    cases = sorted({*SOUND, *(case for case, *_ in FOUND), *(case for case, *_ in TOLD)})
    four = {"hand-none", "fsdp2-none", "fsdp2tp-none", "hand-sum", *(case for case, *_ in FOUR)}
    for world, every in ((1, ALONE), (2, cases), (3, ("hand-none", "hand-sum")), (4, sorted(four))):
        wanted = [case for case in every if not lacks(case)]
        said = finish(together(folder, world, folder / str(world), *wanted, script=script))
        missing = [case for case in wanted if not (folder / str(world) / case / "manifest.yaml").exists()]
        assert not missing, (missing, said)


def other_run(runs, case, against):
    layout, _, fault = case.partition("-")
    if against == "n":
        sound = "clipped" if fault.endswith("clipped") else "batchnorm" if fault == "nobroadcast" else "none"
        return runs / "2" / f"{layout}-{sound}"
    return runs / "1" / (f"hand-{fault}" if f"hand-{fault}" in ALONE else "hand-none")


@pytest.mark.parametrize(("case", "rule", "step", "rank", "site", "words"), FOUND)
def test_check_names_a_planted_fault_of_ranks(runs, case, rule, step, rank, site, words):
    needs(case)
    with open_run(runs / "2" / case) as run:
        found = [finding for finding in check(run).findings if finding.rule == rule]
    assert len(found) == 1
    assert (found[0].step, found[0].rank, found[0].site) == (step, rank, site)
    assert words in found[0].evidence


@pytest.mark.parametrize(("case", "rule", "rank", "site", "words"), FOUR)
def test_check_names_the_fault_of_four_ranks(runs, case, rule, rank, site, words):
    needs(case)
    with open_run(runs / "4" / case) as run:
        found = [finding for finding in check(run).findings if finding.rule == rule]
    assert (found[0].step, found[0].rank, found[0].site) == (0, rank, site)
    assert words in found[0].evidence


@pytest.mark.parametrize("case", ["hand-none", "fsdp2tp-none"])
def test_four_sound_ranks_are_found_sound(runs, case):
    needs(case)
    with open_run(runs / "4" / case) as run:
        assert check(run).findings == ()


@pytest.mark.parametrize(("case", "against", "rank", "words"), TOLD)
def test_diff_names_a_planted_fault_of_ranks(runs, case, against, rank, words):
    needs(case)
    with open_run(other_run(runs, case, against)) as a, open_run(runs / "2" / case) as b:
        result = compare_runs(a, b, DiffOptions())
    assert result.verdict is Verdict.DIVERGED
    assert result.first.rank == rank
    said = {one.code for one in result.explains}
    assert [part for part in words.split("|") if part not in said and part not in result.sentence] == []


@pytest.mark.parametrize(("world", "case", "words"), MANY)
def test_diff_names_the_fault_of_more_than_two_ranks(runs, world, case, words):
    needs(case)
    folder = runs / str(world)
    with open_run(folder / f"{case.partition('-')[0]}-none") as a, open_run(folder / case) as b:
        result = compare_runs(a, b, DiffOptions())
    said = {one.code for one in result.explains}
    assert [part for part in words.split("|") if part not in said and part not in result.sentence] == []


@pytest.mark.parametrize("case", SOUND)
def test_what_is_as_it_should_be_is_not_found(runs, case):
    needs(case)
    with open_run(runs / "2" / case) as run:
        assert check(run).findings == ()


@pytest.mark.parametrize(("case", "rule"), [("tp-none", "summed-gradients")])
def test_a_rule_about_scaled_gradients_that_lacks_records_says_with_which_option_it_has_them(runs, case, rule):
    needs(case)
    with open_run(runs / "2" / case) as run:
        result = check(run)
    assert rule not in result.checked
    assert "capture --record default" in dict(result.unseen)[rule]


@pytest.mark.parametrize("case", ["hand-none~collectives", "ddp-none~collectives"])
def test_gradients_that_are_averaged_are_checked_and_found_sound(runs, case):
    with open_run(runs / "2" / case) as run:
        result = check(run)
    assert "summed-gradients" in result.checked
    assert result.findings == ()


@pytest.mark.parametrize("backwards", [False, True])
def test_one_rank_that_computes_in_another_precision_is_no_other_order_of_sums(runs, backwards):
    with open_run(runs / "1" / "hand-none") as a, open_run(runs / "2" / "ddp-autocast") as b:
        result = compare_runs(*((b, a) if backwards else (a, b)), DiffOptions())
    assert result.first.site.fqn == "Net.extra"
    assert "bfloat16" in result.sentence
    assert "another precision: " in result.sentence


def test_a_rank_that_did_not_reduce_is_reported_in_one_sentence(runs):
    with open_run(runs / "2" / "hand-alone") as run:
        (said,) = [finding.evidence for finding in check(run).findings]
    far = r"\(relative L2 \d\.\de-0\d\)"
    assert re.match(
        rf"from step 0 on the gradient of Net\.extra\.bias that the optimizer takes differs on rank 1, compared with "
        rf"rank 0 {far}: its gradient was not reduced on rank 1 \(3 steps looked at\)$",
        said,
    )


def test_a_batch_that_all_ranks_share_is_reported_beside_one_process(runs):
    with open_run(runs / "1" / "hand-none") as a, open_run(runs / "2" / "ddp-same-samples") as b:
        notes = compare_runs(a, b, DiffOptions()).notes
    assert notes[0] == "In run b all 2 ranks were given the same batch."


@pytest.mark.parametrize(("fqn", "is_said"), [("Net", True), ("Net.a", False)])
def test_so_is_an_input_that_came_from_no_loader(fqn, is_said):
    whole, part = (SimpleNamespace(layout=SimpleNamespace(shape=(rows, 3)), joined=None) for rows in (8, 4))
    first = SimpleNamespace(site=Site(Phase.FORWARD, Kind.INPUT, fqn), a=whole, b=part)
    runs = [SimpleNamespace(recorded=[*range(size)], world_size=size) for size in (1, 2)]
    assert copies_note(first, runs) == ["In run b all 2 ranks were given the same batch."] * is_said


def test_the_first_divergence_is_that_of_the_rank_where_it_began(runs):
    """What rank 1's learning rate does arrives on rank 0 with the next reduction."""
    with open_run(runs / "2" / "hand-none") as a, open_run(runs / "2" / "hand-rate") as b:
        result = compare_runs(a, b, DiffOptions())
    assert [(found.rank, found.step) for found in result.candidates] == [(1, 0), (0, 1)]


def test_a_layer_that_one_run_alone_has_is_no_other_layout(runs):
    with open_run(runs / "2" / "ddp-none") as a, open_run(runs / "2" / "ddp-batchnorm") as b:
        result = compare_runs(a, b, DiffOptions())
    assert [found.rank for found in result.candidates] == [0, 1]
    assert not any("layouts differ" in note for note in result.notes), result.notes


@pytest.mark.parametrize("grouped", [True, False])
def test_the_first_of_each_rank_stand_in_one_table_the_first_one_first(runs, grouped):
    with open_run(runs / "2" / "hand-none") as a, open_run(runs / "2" / "hand-rate") as b:
        result = compare_runs(a, b, DiffOptions())
    tables = [block for block in diff_blocks(result, grouped=grouped) if isinstance(block, Table)]
    places = [[row[:2] for row in table.rows] for table in tables if table.columns[1].title == "rank"]
    assert places[0] == [("0", "1"), ("1", "0")]
    rows = [row for table in tables for row in table.rows]
    assert len(rows) == len(set(rows))
    assert sum(row == rows[0] for row in rows) == 1
    assert len(places) == 1 if grouped else len(places) == 2


def test_parameters_that_differ_by_less_than_a_factor_shows_are_reported_by_their_distance(runs):
    """Not as 1 x."""
    with open_run(runs / "2" / "ddp-unreduced-clipped") as run:
        said = " ".join(finding.evidence for finding in check(run).findings)
    assert "(1 x)" not in said
    assert "compared with rank 0 (relative L2" in said


def test_a_setting_that_one_rank_alone_has_is_noted(runs):
    """A rate leaves no trace where gradients are zero, and the settings of a run are those of its first rank."""
    said = {}
    for case in ("hand-rate", "hand-tf32", "hand-sum"):
        with open_run(runs / "2" / "hand-none") as a, open_run(runs / "2" / case) as b:
            said[case] = [note for note in compare_runs(a, b, DiffOptions()).notes if note.startswith("On rank")]
    assert said["hand-rate"] == ["On rank 1 alone a setting differs: lr 0.01 -> 0.02 (optimizers)."]
    assert any("float32_matmul_precision highest -> high" in note for note in said["hand-tf32"])
    assert not said["hand-sum"]


@pytest.mark.parametrize(
    ("sharing", "peers"),
    [
        ([{0, 1}], []),
        ([{0, 2}, {1, 3}], [[0, 1], [2, 3]]),
        ([{0, 1, 2}, {0, 1, 3}, {0, 2, 3}, {1, 2, 3}], []),  # as HSDP has it, whose ranks know their row and column
        ([], [[0, 1, 2, 3]]),
    ],
)
def test_peers_are_given_the_same_samples(sharing, peers):
    numbers = range(2 if sharing == [{0, 1}] else 4)
    assert peers_of(numbers, [frozenset(group) for group in sharing]) == peers


def test_packages_and_sources_that_differ_between_ranks_are_named():
    def settings_of(rank):
        return {"packages": {"numpy": f"2.{rank}"}, "sources": {"lib.py": f"hash {rank}"}, "runtime": {"torch": "2.13"}}

    run = SimpleNamespace(manifests={0: {}, 1: {}}, settings_of=settings_of)
    rule = next(rule for rule in RULES if rule.id == "rank-settings")
    hits = rule.find(Ranks(run, numbers=(0, 1), steps=[3]))
    assert [(hit.rank, hit.step, hit.evidence) for hit in hits] == [
        (1, 3, "packages.numpy is '2.1' on rank 1 and '2.0' on rank 0"),
        (1, 3, "sources.lib.py is 'hash 1' on rank 1 and 'hash 0' on rank 0"),
    ]

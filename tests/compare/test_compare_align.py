"""Sites of two runs brought together: offsets, tolerances, distances, hardware, and steps that are not opened."""

from __future__ import annotations

import json

import numpy as np
import pytest
from opcapture import compared
from small_runs import train
from synthetic import row, write_run
from verbs import verb

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions, Restored, Verdict
from introspect_cli.records import Kind, ModuleInfo
from introspect_cli.store.run import open_run

F32 = np.float32
X = np.arange(6, dtype=F32).reshape(2, 3)


@pytest.fixture
def diff(tmp_path):
    def run(a, b, options=None, noise=(), about_a=None, about_b=None):
        write_run(tmp_path / "a", a, force=True, **(about_a or {}))
        write_run(tmp_path / "b", b, force=True, **(about_b or {}))
        for number, steps in enumerate(noise):
            write_run(tmp_path / f"n{number}", steps, force=True)
        with open_run(tmp_path / "a") as one, open_run(tmp_path / "b") as two:
            opened = [open_run(tmp_path / f"n{number}") for number in range(len(noise))]
            result = compare_runs(one, two, options or DiffOptions(), opened)
            for other in opened:
                other.close()
            return result

    return run


def chain(names, values=None, module="Linear"):
    """One step of modules that run one after another."""
    rows = []
    for place, name in enumerate(names):
        value = X + place if values is None else values[place]
        rows += [row("forward", "input", name, X, path="[0]", module_class=module)]
        rows += [row("forward", "output", name, value, module_class=module)]
    return [rows]


def modules(names, module="Linear"):
    return [ModuleInfo("Net", "Net"), *(ModuleInfo(name, module, "", ("weight",)) for name in names)]


class TestNames:
    @pytest.mark.parametrize(("name", "words"), [("Net.h", r"^Net\.h=Net.blocks"), ("Net.a=b", r"a\=b=blocks")])
    def test_a_rename_is_read_from_the_command_line(self, tmp_path, name, words):
        for run, module in (("a", name), ("b", "Net.blocks")):
            write_run(tmp_path / run, [[row("start", "param", f"{module}.weight", X)]])
        for options, told in (((), ["renamed"]), (("--rename", words), [])):
            done = verb("diff", *options, "--format", "json", tmp_path / "a", tmp_path / "b")
            assert [change["change"] for change in json.loads(done.stdout)["structure"]] == told

    @pytest.mark.parametrize("text", ["abc", "=x", "(=x", r"a=\3"])
    def test_rename_that_cannot_be_meant(self, tmp_path, text):
        assert "rename" in verb("diff", "--rename", text, tmp_path, tmp_path).stderr


class TestAlignment:
    def test_a_subtree_is_compared_under_the_name_that_is_asked_for(self, diff):
        a, b = ["Net.h", "Net.h.0", "Net.h.1"], ["Net.blocks", "Net.blocks.0", "Net.blocks.1"]
        about = {"about_a": {"modules": modules(a)}, "about_b": {"modules": modules(b)}}
        renamed = DiffOptions(rename=((r"^Net\.h\b", "Net.blocks"),))
        assert diff(chain(a), chain(b), renamed, **about).verdict is Verdict.SAME


class TestSteps:
    def test_equal_steps_are_never_opened(self, tmp_path, monkeypatch):
        write_run(tmp_path / "a", [[row("forward", "output", "Net", X)]] * 50)
        write_run(tmp_path / "b", [[row("forward", "output", "Net", X + (k == 30))] for k in range(50)])
        with open_run(tmp_path / "a") as a, open_run(tmp_path / "b") as b:
            opened = []
            reader = type(a.rank(0))
            read_row = reader.read_row
            monkeypatch.setattr(reader, "read_row", lambda self, row: (opened.append(row), read_row(self, row))[1])
            compare_runs(a, b, DiffOptions())
        assert set(opened) <= {24, 29, 30, 49}  # the middle and last, where it differs, and the one before

    @pytest.mark.parametrize(("stopped", "verdict"), [(True, Verdict.UNDECIDED), (False, Verdict.DIVERGED)])
    def test_what_an_interrupt_cut_off_is_no_divergence(self, diff, stopped, verdict):
        def rows(moved, names=("weight", "bias")):
            after = [row("optimizer", "param", f"Net.{name}", X + moved, module_class="SGD") for name in names]
            return [*chain(["Net"])[0], row("loss", "loss", "loss", X[0, 1]), *after]

        about = {"manifest": {"how": "interrupt", "remainder": True}} if stopped else {}
        result = diff([rows(1), rows(2)], [rows(1), rows(2, ["weight"])], about_b=about)
        assert result.verdict is verdict

    def test_a_module_without_parameters_is_an_origin_even_then(self, diff):
        def steps(value):
            return [[row("forward", "input", "Net.act", X, path="[0]"), row("forward", "output", "Net.act", value)]]

        about = {"numbers": [5], "modules": [ModuleInfo("Net.act", "GELU")]}
        result = diff(steps(X), steps(X + 1), about_a=about, about_b=about)
        assert result.first.reason == "module"


class TestOffset:
    def resumed(self, *faults, kinds=(Kind.PARAM, Kind.BUFFER, Kind.OPTIMIZER_STATE)):
        """A run from the middle of `train()` on, with what it starts from recorded as a capture does."""
        whole = train(*faults, steps=6, rng=False)
        tail = [list(rows) for rows in whole[3:]]
        start = [
            row("start", site.kind.value, site.fqn, value, path=site.path, module_class=info.module_class)
            for site, info, value in whole[2]
            if site.phase.value == "optimizer" and site.kind in kinds
        ]
        return [start + tail[0], *tail[1:]]

    def test_equal_parameters_alone_are_no_resumed_run(self, diff):
        """A note tells of them, and how to compare the runs as that."""
        result = diff(train(steps=6, rng=False), self.resumed(kinds=(Kind.PARAM, Kind.BUFFER)))
        assert result.verdict is Verdict.DIVERGED
        assert result.resumed is None
        assert result.first.step_b == result.first.step == 0
        said = next(note for note in result.notes if "--offset 3" in note)
        assert "nothing else says that it is resumed" in said

    def test_what_a_resumed_run_lost_is_no_unknown_cause(self, diff):
        about = {"settings": ON_RECORD}
        result = diff(train("module", steps=6, at=4), self.resumed(), about_a=about, about_b=about)
        assert result.resumed is not None
        assert not [line for line in result.evidence if "What is left" in line]

    def test_a_checkpoint_that_one_run_alone_read_says_so(self, diff):
        read = {"settings": {"beginning": {"read": ["checkpoints/last.pt"]}}}
        resumed = self.resumed(kinds=(Kind.PARAM, Kind.BUFFER))
        result = diff(train(steps=6, rng=False), resumed, about_b=read)
        assert (result.resumed.run, result.resumed.at) == ("b", 3)
        state = next(part for part in result.resumed.parts if part.part == "optimizer state")
        assert state.state is Restored.UNSEEN  # though it is equal after the first step
        both = diff(train(steps=6, rng=False), resumed, about_a=read, about_b=read)
        assert both.resumed is None

    def test_an_offset_is_taken_of_runs_that_recorded_no_tensors_of_a_model(self, diff):
        result = diff(chain(["Net"]) * 3, chain(["Net"]) * 3, DiffOptions(offset=1))
        assert (result.resumed.run, result.resumed.at) == ("b", 1)


class TestCoverage:
    def test_what_only_one_side_saw_leaves_it_undecided(self, diff):
        a = [[row("forward", "input", "Net", X), row("forward", "output", "Net", X)]]
        b = [[row("forward", "input", "Net", X), row("forward", "output", "Net", None)]]
        result = diff(a, b)
        assert result.verdict is Verdict.UNDECIDED
        assert "the output of Net in step 0" in result.sentence
        assert result.counts.not_observed == 1

    @pytest.mark.parametrize(("ranks", "verdict"), [(1, Verdict.DIVERGED), (2, Verdict.SAME)])
    def test_what_writes_to_a_buffer_before_a_call_is_looked_for_with_one_rank_alone(self, diff, ranks, verdict):
        given, written = row("forward", "input", "Net", X), row("forward", "buffer", "Net.table", X)
        kinds = {"observed": ["input", "output", "buffer"]}
        about = {"about_a": {"manifest": kinds}, "about_b": {"manifest": kinds | {"world_size": ranks}}}
        result = diff([[written, given]], [[given]], **about)
        assert result.verdict is verdict

    def test_what_writes_to_a_buffer_of_a_compiled_module_is_not_seen(self, diff):
        calls = [row("forward", kind, "Net.part", X) for kind in ("input", "output")]
        eager = [row("forward", "buffer", "Net.part.table", X), *calls, row("loss", "loss", "loss", 1.0)]
        compiled = [row("forward", "output", "Net.part", None), row("loss", "loss", "loss", 1.0)]
        begins, ends = row("start", "buffer", "Net.part.table", 2 * X), row("optimizer", "buffer", "Net.part.table", X)
        assert diff([[begins, *eager, ends]], [[begins, *compiled, ends]]).verdict is not Verdict.DIVERGED

    def test_what_neither_saw_is_noted_and_where_that_is_most_it_is_undecided(self, diff):
        some = [
            [
                row("forward", "input", "Net", X),
                row("forward", "output", "Net", X),
                row("forward", "output", "Net.c", None),
            ]
        ]
        result = diff(some, some)
        assert result.verdict is Verdict.SAME
        assert any("could not be observed" in note for note in result.notes)
        most = [[row("forward", "input", "Net", None), row("forward", "output", "Net", None)]]
        assert diff(most, most).verdict is Verdict.UNDECIDED

    def test_what_neither_saw_is_counted_though_the_last_step_was_seen(self, diff):
        seen = [row("forward", "output", f"Net.{name}", X) for name in "abcd"]
        steps = [[*seen[:3], row("forward", "output", "Net.d", None)]] * 4
        result = diff([*steps, seen], [*steps, seen])
        assert result.verdict is Verdict.SAME
        assert any("About 4 of 20 records" in note for note in result.notes)

    def test_device_and_strides_are_no_divergence(self, diff):
        from dataclasses import replace

        from synthetic import summary

        there = summary(X)
        moved = replace(there, layout=replace(there.layout, device="cuda:0", strides="channels_last"))
        result = diff([[row("forward", "output", "Net", there)]], [[row("forward", "output", "Net", moved)]])
        assert result.verdict is Verdict.SAME


class TestTolerance:
    def test_absolute_difference_is_a_root_mean_square(self, diff):
        a, b = chain(["Net"], [X]), chain(["Net"], [X + F32(0.01)])
        assert diff(a, b, DiffOptions(atol=0.02)).verdict is Verdict.SAME
        assert diff(a, b, DiffOptions(atol=0.004)).verdict is Verdict.DIVERGED

    @pytest.mark.parametrize(
        ("one", "two"),
        [
            (np.array([1, 2, 300]), np.array([1, 2, 301])),
            (np.ones((2, 3), F32), np.ones((3, 2), F32)),
            (np.array([1, np.nan], F32), np.array([1, 2], F32)),
        ],
        ids=["integers", "shape", "nan"],
    )
    def test_a_tolerance_does_not_apply_to_integers_other_shapes_and_nans(self, diff, one, two):
        options = DiffOptions(rtol=0.5, atol=0.5)
        assert diff(chain(["Net"], [one]), chain(["Net"], [two]), options).verdict is Verdict.DIVERGED

    def test_random_states_tolerate_nothing(self, diff):
        a, b = [[row("start", "rng", "torch", X)]], [[row("start", "rng", "torch", X * F32(1.0001))]]
        assert diff(a, b, DiffOptions(rtol=1.0, strict=True)).verdict is Verdict.DIVERGED


class TestNoise:
    def noisy(self, sizes):
        return [
            [row("forward", "output", "Net", X * F32(1 + size)), row("forward", "output", "Net.b", X)] for size in sizes
        ]

    def test_what_stands_out_is_reported_with_the_floor(self, diff):
        a, b, repeat = self.noisy([0, 0, 0]), self.noisy([1e-4, 1e-2, 1e-4]), self.noisy([1e-4, 1e-4, 1e-4])
        result = diff(a, b, noise=[repeat])
        assert (result.first.step, result.counts.diverged) == (1, 1)
        assert result.first.rel_l2 / result.first.floor == pytest.approx(100, rel=0.3)

    def test_a_site_without_noise_tolerates_nothing(self, diff):
        a, repeat = self.noisy([0]), self.noisy([1e-3])
        b = [[row("forward", "output", "Net", X), row("forward", "output", "Net.b", X * F32(1 + 1e-6))]]
        assert diff(a, b, noise=[repeat]).first.site.fqn == "Net.b"


# --- other names, found by values of several steps: copies, chance, rounding, and runs that hold different steps


def renames(result):
    return {(change.a, change.b) for change in result.structure if change.change == "renamed"}


def test_a_resumed_run_is_aligned_with_the_steps_it_repeats(tmp_path):
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(3, 3)) for _ in range(6)]

    def steps(name, first):
        return [[row("start", "param", f"Net.{name}.weight", each), row("loss", "loss", "loss", each.sum())]
                for each in values[first:]]  # fmt: skip

    write_run(tmp_path / "a", steps("old", 0))
    write_run(tmp_path / "b", steps("new", 3))
    result = compared(tmp_path / "a", tmp_path / "b", offset=3)
    assert ("Net.old", "Net.new") in renames(result), result.sentence


def test_constants_that_steps_of_one_size_move_are_no_evidence_for_a_name(tmp_path):
    ones, up = np.ones(4, F32), np.array([1, 1, -1, 1], F32) * F32(1e-3)

    def run(name, moves):  # Adam moves each element by the learning rate at first
        begins, after = [row("start", "param", f"Net.{name}", ones)], ones + moves
        return [[*begins, row("optimizer", "param", f"Net.{name}", after), row("loss", "loss", "loss", moves[0])]]

    write_run(tmp_path / "a", run("norm.weight", up))
    write_run(tmp_path / "b", run("other.g", up[::-1].copy()))
    assert not renames(compared(tmp_path / "a", tmp_path / "b"))


# --- steps after the first divergence are counted as long as that takes seconds; then the answer says where it stopped


STEPS, FROM = 10, 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of which one layer's output differs from step 3 on."""
    folder = tmp_path_factory.mktemp("later")

    def steps(by):
        return [
            [row("forward", "output", f"Net.{name}", step + by * (name == 1 and step >= FROM)) for name in range(4)]
            for step in range(STEPS)
        ]

    return [write_run(folder / name, steps(by)) for name, by in (("a", 0.0), ("b", 0.5))]


def counted(runs, **options):
    with open_run(runs[0]) as a, open_run(runs[1]) as b:
        return compare_runs(a, b, DiffOptions(**options))


def test_what_is_not_opened_is_neither_counted_nor_called_equal(runs):
    whole, part = counted(runs), counted(runs, later=16)
    assert (whole.counts.steps_compared, whole.counts.steps_diverged, whole.notes) == (
        STEPS,
        STEPS - FROM,
        (),
    )
    assert part.counts.steps_compared == FROM + 3  # the first, and 8 records each of two more
    assert (part.counts.steps_diverged, part.counts.records, part.counts.equal) == (3, 4 * 6, 4 * 6 - 3)
    assert (part.counts.steps_a, part.counts.steps_b) == (STEPS, STEPS)
    assert part.notes == (
        f"{STEPS - FROM - 3} later steps were not compared: the first divergence does not depend on them (see --map).",
    )
    assert (part.first, part.sentence, part.verdict) == (whole.first, whole.sentence, whole.verdict)


@pytest.mark.parametrize("asked", [{"want_map": True}, {"limit": None}])
def test_all_steps_are_compared_where_all_are_asked_for(runs, asked):
    assert counted(runs, later=0, **asked).counts == counted(runs, **asked).counts


# --- distances: from sketches, exactly from stored tensors, in units of rounding, and as factors


@pytest.mark.parametrize(("factor", "verdict"), [(1 + 1e-6, Verdict.SAME), (1.5, Verdict.DIVERGED)])
def test_without_sketches_statistics_tell_what_is_beyond_a_tolerance(tmp_path, factor, verdict):
    values = np.random.default_rng(0).standard_normal(64)
    for name, number in (("a", 1.0), ("b", factor)):
        rows = [row("forward", "output", "Net", values * number), row("loss", "loss", "loss", values[:1])]
        write_run(tmp_path / name, [rows], sketch=False)
    assert compared(tmp_path / "a", tmp_path / "b", rtol=1e-2).verdict is verdict


@pytest.mark.parametrize("change", ["noise", "element", "column", "scale"])
def test_sketched_distances_are_near_the_true_ones(tmp_path, change):
    random = np.random.default_rng(3)
    ratios = []
    for run in range(5):
        a = random.normal(size=(64, 32)).astype(np.float32)
        b = a.copy()
        if change == "noise":
            b += random.normal(size=a.shape).astype(np.float32) * np.float32(1e-3)
        elif change == "element":
            b[3, 4] += 1
        elif change == "column":
            b[:, 7] = 0
        else:
            b *= np.float32(1.01)
        write_run(tmp_path / f"a{run}", [[row("forward", "output", "Net", a)]])
        write_run(tmp_path / f"b{run}", [[row("forward", "output", "Net", b)]])
        with open_run(tmp_path / f"a{run}") as one, open_run(tmp_path / f"b{run}") as two:
            found = compare_runs(one, two, DiffOptions()).first
        true = np.linalg.norm(a.astype(float) - b) / max(np.linalg.norm(a), np.linalg.norm(b))
        ratios.append(found.rel_l2 / true)
        assert not found.exact
    assert 0.7 < np.median(ratios) < 1.4


# --- hardware among the settings: named where one run alone used it, and left as a cause where nothing else differs


OF_FC = (ModuleInfo("Net", "Net"), ModuleInfo("Net.fc", "Linear", "", ("weight",)))
GPU = {"name": "H100", "uuid": "GPU-1234"}


def products(wrong=None):
    """Five steps of one product each; in one of them an element is wrong."""
    weight = np.random.default_rng(1).normal(size=(8, 8)).astype(F32)
    for step in range(5):
        x = np.random.default_rng(step).normal(size=(4, 8)).astype(F32)
        y = x @ weight
        if step == wrong:
            y[1, 3] *= F32(1.5)
        yield [
            row("start", "param", "Net.fc.weight", weight, module_class="Linear"),
            *(row("forward", "input", module.fqn, x, path="[0]", module_class=module.module_class) for module in OF_FC),
            *(row("forward", "output", module.fqn, y, module_class=module.module_class) for module in OF_FC[::-1]),
        ]


def with_settings(folder, *settings):
    """What a comparison finds of a run and one in which an element is wrong, each with its settings."""
    for name, wrong, kept in zip("ab", (None, 1), settings, strict=True):
        write_run(folder / name, list(products(wrong)), modules=OF_FC, settings=kept)
    return compared(folder / "a", folder / "b")


def test_a_gpu_that_one_run_alone_used_is_named_and_not_what_comes_with_it(tmp_path):
    gpu = {"hardware": {"gpus": [{"name": "H100", "uuid": "GPU-1"}] * 2}, "runtime": {"cudnn": 91900, "nccl": "2.28.9"}}
    cpu = {"hardware": {}, "runtime": {"cudnn": None, "nccl": None}}
    result = with_settings(tmp_path, gpu, cpu)
    assert [(change.name, change.a, change.b) for change in result.settings] == [("GPU", "2 x H100", "none used")]


ON_RECORD = {"sources": {}, "packages": {"torch": "2.9"}, "environment": {}, "command": {"argv": ["train.py"]}}


@pytest.mark.parametrize("gpu", [GPU, GPU | {"name": "A100"}, {"name": "H100", "uuid": "GPU-2"}])
def test_hardware_is_left_as_a_cause_where_nothing_else_differs(tmp_path, gpu):
    result = with_settings(tmp_path, *({**ON_RECORD, "hardware": {"gpus": [each]}} for each in (GPU, gpu)))
    (said,) = (line for line in result.evidence if "What is left" in line)
    assert said.startswith(
        "No source file, package or setting that could explain it differs on record. What is left: ran"
    )
    assert "the hardware" in said

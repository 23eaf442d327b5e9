"""Rules on steps and limits of long runs: what is kept, what is dropped, and that readers say so."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from neutrality import watched
from store_kills import rows
from synthetic import batch
from torch import nn

import introspect_cli
from introspect_cli.capture.options.capture_options import CaptureOptions
from introspect_cli.capture.options.parse import options_of, parse_size
from introspect_cli.errors import StoreError, UsageError
from introspect_cli.schedule.rule import Moment, When
from introspect_cli.schedule.rules import Every, EverySeconds, First, Last, Schedule, parse_rule
from introspect_cli.store.format.index import Thinned, add_thinned, parse_thinned
from introspect_cli.store.read.run import RunState, open_run
from introspect_cli.store.read.verify import verify_run
from introspect_cli.store.remote.pack import pack
from introspect_cli.store.write.run_writer import StoreWriter

# --- rules


def kept(rule, steps, epoch=None):
    """The steps that are left at the end of a run."""
    alive = {}
    memory = {}
    for step in range(steps):
        expiry = rule.bounds(Moment(step, epoch and epoch(step), float(step), {"step": step}, memory))[1]
        if expiry > step:
            alive[step] = expiry
        alive = {old: until for old, until in alive.items() if until > step}
    return sorted(alive)


rules = st.recursive(
    st.one_of(
        st.builds(First, st.integers(1, 9)),
        st.builds(Last, st.integers(1, 9)),
        st.builds(Every, st.integers(1, 9)),
        st.sampled_from([Schedule("3:11:2"), When("step > 5 and step < 9"), EverySeconds(7)]),
    ),
    lambda inner: st.one_of(st.builds(lambda a, b: a | b, inner, inner), st.builds(lambda a, b: a & b, inner, inner)),
    max_leaves=5,
)
ALONE = {
    "First": lambda x, steps: range(min(x.steps, steps)),
    "Last": lambda x, steps: range(max(steps - x.steps, 0), steps),
    "Every": lambda x, steps: range(0, steps, x.steps),
    "Schedule": lambda _, steps: range(steps)[3:11:2],
    "When": lambda _, steps: range(steps)[6:9],
    "EverySeconds": lambda x, steps: range(0, steps, x.seconds),
}


def meant(rule, steps):
    """The same, by the rules' own definition: sets of steps, their unions and intersections."""
    if hasattr(rule, "one"):
        one, two = meant(rule.one, steps), meant(rule.two, steps)
        return one | two if rule.sign == "|" else one & two
    return set(ALONE[type(rule).__name__](rule, steps))


@given(rules, st.integers(1, 25))
def test_a_composed_rule_keeps_the_union_or_intersection_and_its_text_means_it_again(rule, steps):
    assert set(kept(rule, steps)) == meant(rule, steps)
    again = parse_rule(rule.expression)
    assert set(kept(again, steps)) == meant(rule, steps)
    assert again.expression == rule.expression


@pytest.mark.parametrize(
    "text",
    ["", "first", "first(0)", "first(10", "last('x')", "import os", "first(1)(2)", "when('loss')[0]", "first(steps=1)"],
)
def test_what_is_no_rule_is_reported(text):
    with pytest.raises(UsageError):
        parse_rule(text)


def test_conditions_are_arithmetic_and_nothing_else():
    usual = {"loss": 4.0, "median": 1.0, "step": 3.0}
    assert When("loss > 3 * median").holds(usual)
    assert not When("loss > 5 * median or not step == 3").holds(usual)
    assert When("loss > 3 * median").holds(usual | {"loss": float("nan")}), "a NaN counts as infinite"
    assert not When("loss > 3 * median").holds({"loss": 4.0}), "nothing is said of what is usual"
    assert not When("1 / 0 < 3").holds(usual)
    for text in ("__import__('os')", "loss.real > 1", "[loss]", "lambda: 1", "los > 3", "loss > 'a'", "loss >", "max"):
        with pytest.raises(UsageError):
            When(text)


def test_sizes_are_read_with_their_units():
    assert [parse_size(text) for text in ("2GB", "500 mb", "1.5GiB", 10**6)] == [
        2 * 10**9,
        5 * 10**8,
        1610612736,
        10**6,
    ]
    for text in ("2 apples", "1kB", "-3GB", ""):
        with pytest.raises(UsageError):
            parse_size(text)


# --- the store


def thinned_store(path, steps, drop_after=None, width=20):
    """A store of which each `drop_after` steps the middle ones are dropped."""
    store = StoreWriter.create(path)
    writer = store.rank(0)
    for step in range(steps):
        writer.append(step, batch(writer, rows(step, width)), {"epoch": step})
        if drop_after and step % drop_after == drop_after - 1:
            writer.thin(range(1, step), "max_size")
    return store, writer


def test_what_is_left_is_as_it_was_written(tmp_path):
    store, writer = thinned_store(tmp_path / "run", 50, drop_after=7)
    size = sum(file.stat().st_size for file in (tmp_path / "run" / "rank0").iterdir() if file.suffix != ".jsonl")
    assert writer.bytes_written - (tmp_path / "run" / "rank0" / "labels.jsonl").stat().st_size == size
    with open_run(tmp_path / "run") as run:
        assert run.state is RunState.RUNNING
        reader = run.rank(0)
        assert [entry.step for entry in reader.steps] == [0, 48, 49]
        assert list(reader.labels) == [0, 48, 49]
        assert reader.thinned == (Thinned("max_size", 47, 1, 47, 7),)
        for step in (0, 48, 49):
            texts = [record.summary.text for record in reader.records(step)]
            assert texts == [repr(value) for _, _, value in rows(step, 20)]
        writer.thin([48], "last")  # while it is read
        assert len(list(reader.records(48))) == 20
    store.write_manifest({"status": "complete"})
    store.close()
    assert verify_run(tmp_path / "run").sound
    with open_run(tmp_path / "run") as run:
        assert run.state is RunState.COMPLETE
        assert [entry.step for entry in run.rank(0).steps] == [0, 49]
    assert pack(tmp_path / "run", tmp_path / "run.zip")
    with open_run(tmp_path / "run.zip") as run:
        assert str(run.rank(0).thinned[1]) == "step 48 (recorded, then dropped by --last)"
    StoreWriter.create(tmp_path / "run", force=True).close()


def test_the_last_step_stays_whatever_is_asked(tmp_path):
    store, writer = thinned_store(tmp_path / "run", 3)
    writer.thin([0, 1, 2], "last")
    store.close()
    with open_run(tmp_path / "run") as run:
        assert [entry.step for entry in run.rank(0).steps] == [2]


def test_a_store_that_cannot_be_thinned_loses_nothing(tmp_path, monkeypatch):
    store, writer = thinned_store(tmp_path / "run", 9)
    fine = os.rename
    monkeypatch.setattr(os, "rename", lambda *_args, **_settings: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(StoreError, match=r"cannot drop steps from .*no space left"):
        writer.thin([3], "last")
    monkeypatch.setattr(os, "rename", fine)
    assert not [name for name in os.listdir(tmp_path / "run" / "rank0") if name.startswith((".", "records-"))]
    writer.append(9, batch(writer, rows(9, 20)))
    writer.thin([3], "last")
    store.close()
    with open_run(tmp_path / "run") as run:
        assert [entry.step for entry in run.rank(0).steps] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert verify_run(tmp_path / "run").sound


def test_what_was_recorded_before_training_began_is_taken_back_after_a_thinning_too(tmp_path):
    store, writer = thinned_store(tmp_path / "run", 5)
    writer.thin([2], "last")
    writer.restart()
    writer.append(0, batch(writer, rows(0, 5)))
    store.write_manifest({"status": "complete"})
    store.close()
    assert verify_run(tmp_path / "run").sound
    with open_run(tmp_path / "run") as run:
        assert [entry.step for entry in run.rank(0).steps] == [0]


@pytest.mark.parametrize("seed", range(12))
def test_a_kill_while_steps_are_dropped_loses_no_other(tmp_path, seed):
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            store = StoreWriter.create(tmp_path / "run")
            writer = store.rank(0)
            for step in range(10**6):
                writer.append(step, batch(writer, rows(step, 200)))
                os.write(write_end, step.to_bytes(4, "little"))
                if step % 6 == 5:
                    writer.thin(range(1, step - 2), "last")
        finally:
            os._exit(1)
    os.close(write_end)
    os.read(read_end, 4)
    time.sleep(random.Random(seed).uniform(0.0, 0.15))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    said = b""
    while piece := os.read(read_end, 1 << 16):
        said += piece
    os.close(read_end)
    last = int.from_bytes(said[-4:], "little") if said else 0
    report = verify_run(tmp_path / "run")
    assert report.sound, report.findings
    with open_run(tmp_path / "run") as run:
        assert run.state is RunState.INTERRUPTED
        steps = [entry.step for entry in run.rank(0).steps]
        assert steps[0] == 0
        assert steps[-1] in (last, last + 1)
        latest = range(max(steps[-1] - 2, 0), steps[-1] + 1)
        assert set(latest) <= set(steps), "what nobody dropped is there"
        for step in steps[-2:]:
            texts = [record.summary.text for record in run.rank(0).records(step)]
            assert texts == [repr(value) for _, _, value in rows(step, 200)]


def test_what_a_strangers_index_says_of_dropped_steps_is_checked():
    from introspect_cli.errors import IntrospectError
    from introspect_cli.store.format.arrow_schema import Malformed

    fine = b'{"generation":2,"thinned":[["last",3,1,9,1]]}'
    assert parse_thinned(fine) == (2, (Thinned("last", 3, 1, 9, 1),))
    for bad in (fine.replace(b"2", b"-1"), fine.replace(b'"last"', b'"../x"'), fine.replace(b"9", b"0"), fine[:-1]):
        with pytest.raises((Malformed, IntrospectError)):
            parse_thinned(bad)
    assert add_thinned((Thinned("last", 3, 1, 9, 1),), "last", [12, 11]) == (Thinned("last", 5, 1, 12, 2),)


# --- captures


def train(steps=40, lr=0.05, spike=None, nan=None):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for step in range(steps):
        x = torch.randn(4, 6)
        loss = (net(x) - 1).square().mean() * (50 if step == spike else 1) * (float("nan") if step == nan else 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def recorded(path):
    with open_run(path) as run:
        return [entry.step for entry in run.rank(0).steps], run.rank(0).thinned


def asked(**given):
    return {name: value for name, value in vars(options_of(given)).items() if value != vars(CaptureOptions())[name]}


def test_a_ring_keeps_the_last_steps(tmp_path):
    with watched(tmp_path / "run", **asked(last=5, first=2)):
        train(60)
    steps, thinned = recorded(tmp_path / "run")
    assert steps == [0, 1, 55, 56, 57, 58, 59]
    assert [(each.why, each.count, each.first, each.last) for each in thinned] == [("last", 53, 2, 54)]


def test_a_run_ends_at_its_first_nan_and_holds_what_came_before(tmp_path, introspect):
    (tmp_path / "train.py").write_text(
        "import torch\ntorch.manual_seed(0)\nnet = torch.nn.Linear(3, 1)\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "for step in range(90):\n"
        "    loss = net(torch.ones(2, 3)).square().mean() * (float('nan') if step == 50 else 1)\n"
        "    optimizer.zero_grad(); loss.backward(); optimizer.step()\nprint('not reached')\n"
    )
    done = introspect("capture", "--last", "4", "--until-nan", "-o", "run", "train.py")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "step 50 made a NaN; the script is ended (--until-nan)" in done.stderr
    assert "dropped 47 of them again" in done.stderr
    assert recorded(tmp_path / "run")[0] == [47, 48, 49, 50]
    shown = introspect("show", "run")
    assert "not held: 47 steps between 0 and 46 (recorded, then dropped by --last)" in shown.stdout
    done = introspect("show", "step", "12", "run")
    assert "does not hold 47 steps between 0 and 46" in done.stderr


def test_a_run_stays_below_its_size_with_its_first_and_latest_steps(tmp_path):
    limit = 400_000
    with watched(tmp_path / "run", **asked(max_size="400kB", save_tensors=["*.0"])):
        train(150)
    size = sum(file.stat().st_size for file in (tmp_path / "run").rglob("*") if file.is_file())
    assert size < limit + 50_000, "settings and labels are not counted"
    steps, thinned = recorded(tmp_path / "run")
    assert (steps[0], steps[-1]) == (0, 149)
    assert steps[-5:] == [145, 146, 147, 148, 149]
    assert len(steps) + thinned[0].count == 150
    assert verify_run(tmp_path / "run").sound
    with open_run(tmp_path / "run") as run:
        for step in (0, 149):
            stored = [r for r in run.rank(0).records(step) if run.tensor(r.summary.checksum) is not None]
            assert stored, "whole tensors of the steps that are kept are kept"


def test_of_what_was_dropped_nothing_is_called_equal(tmp_path):
    for name, settings in (("a", {}), ("b", {"last": 10}), ("c", {"last": 10})):
        with watched(tmp_path / name, **asked(**settings)):
            train(40)
    with watched(tmp_path / "d", **asked(last=10)):
        train(40, spike=12)
    same = introspect_cli.diff(tmp_path / "a", tmp_path / "b")
    assert same.same
    assert "10 steps that both runs kept agree" in same.sentence
    answered = "Run b does not hold 30 steps between 0 and 29 (recorded, then dropped by --last): what was there is not"
    assert answered in " ".join(same.result.notes)
    assert same.result.counts.steps_compared == 10
    assert introspect_cli.diff(tmp_path / "b", tmp_path / "c").result.counts.steps_compared == 10
    diverged = introspect_cli.diff(tmp_path / "b", tmp_path / "d")
    assert not diverged.same
    assert "the steps between, which cannot be compared" in diverged.sentence, diverged.sentence

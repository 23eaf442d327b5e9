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
from sweeps import sliced
from synthetic import batch
from torch import nn
from verbs import verb

import introspect_cli
from introspect_cli.capture.options import CaptureOptions, options_of
from introspect_cli.errors import StoreError, UsageError
from introspect_cli.schedule.rules import ALWAYS, Schedule, parse_rule
from introspect_cli.store.run import RunState, open_run
from introspect_cli.store.run_writer import StoreWriter
from introspect_cli.store.verify import verify_run

BEYOND = 640  # beyond all starts and strides


def python_slice(start, stop, stride):
    return ":".join("" if number is None else str(number) for number in (start, stop, stride))


number = st.one_of(st.none(), st.integers(0, 120))
slices = st.builds(python_slice, number, number, st.one_of(st.none(), st.integers(1, 17)))
parts = st.lists(st.one_of(st.integers(0, 120).map(str), slices), min_size=1, max_size=4)


def wanted(texts):
    """What python's own slices select of the steps below `BEYOND`."""
    steps = set()
    for text in texts:
        if ":" in text:
            bounds = [int(word) if word else None for word in text.split(":")]
            steps.update(range(BEYOND)[slice(*bounds)])
        else:
            steps.add(int(text))
    return steps


@given(parts)
def test_it_wants_what_python_slices_select(texts):
    if any(not wanted([text]) for text in texts):
        with pytest.raises(UsageError):
            Schedule.parse(",".join(texts))
        return
    schedule = Schedule.parse(",".join(texts))
    expected = wanted(texts)
    assert {step for step in range(BEYOND) if schedule.wants(step)} == expected
    again = Schedule.parse(str(schedule))
    assert again == schedule
    assert str(again) == str(schedule)


@pytest.mark.parametrize(
    "text",
    ["", ",", "5,", "x", "-1", "5:x", "1:2:3:4", "::0", "5:5", "9:3", "1.5", "٣", "1" * 30, "0x10", "1_0", "all"],
)
def test_what_is_no_schedule_is_reported(text):
    with pytest.raises(UsageError, match="schedule"):
        Schedule.parse(text)


# --- rules on steps and limits of long runs: what is kept, what is dropped, and that readers say so


def kept(rule, steps):
    """The steps that are left at the end of a run."""
    alive = {}
    for step in range(steps):
        expiry = rule.expiry(step, {"step": step})
        if expiry > step:
            alive[step] = expiry
        alive = {old: until for old, until in alive.items() if until > step}
    return sorted(alive)


ALONE = {
    "first(4)": lambda steps: range(min(4, steps)),
    "last(3)": lambda steps: range(max(steps - 3, 0), steps),
    "every(5)": lambda steps: range(0, steps, 5),
    "steps('3:11:2')": lambda steps: range(steps)[3:11:2],
    "when('step > 5 and step < 9')": lambda steps: range(steps)[6:9],
}


RULES = st.lists(st.lists(st.sampled_from(list(ALONE)), min_size=1, max_size=3), min_size=1, max_size=3)


@given(RULES, st.integers(1, 25))
def test_a_composed_rule_keeps_the_union_or_intersection(either, steps):
    text = " | ".join(" & ".join(both) for both in either)
    meant = set().union(*(set.intersection(*(set(ALONE[one](steps)) for one in both)) for both in either))
    assert set(kept(parse_rule(text), steps)) == meant
    assert kept(parse_rule(str(parse_rule(text))), steps) == sorted(meant)
    assert parse_rule(text).forgets == ("last" in text)


@pytest.mark.parametrize(
    "text",
    ["", "first", "first(0)", "first(10", "last('x')", "import os", "first(1)(2)", "when('loss')[0]", "first(steps=1)"],
)
def test_what_is_no_rule_is_reported(text):
    with pytest.raises(UsageError):
        parse_rule(text)


def test_options_are_put_together():
    def kept_by(**given):
        return str(options_of(given).steps)

    assert kept_by() == ":"
    with pytest.raises(UsageError, match="no loss is recorded"):
        options_of({"steps": "when('loss > 3')", "record": "param"})
    with pytest.raises(UsageError, match="leave out --stats none"):
        options_of({"until_nan": True, "stats": "none"})


def holds(condition, values):
    return parse_rule(f"when({condition!r})").expiry(0, values) == ALWAYS


def test_conditions_are_arithmetic_and_nothing_else():
    usual = {"loss": 4.0, "median": 1.0, "step": 3.0}
    assert holds("loss > 3 * median", usual)
    assert holds("max(loss, median) > 3 and not step == 4", usual)
    assert not holds("loss > 5 * median or not step == 3", usual)
    assert holds("loss > 3 * median", usual | {"loss": float("nan")}), "a NaN counts as infinite"
    assert not holds("loss > 3 * median", {"loss": 4.0}), "nothing is said of what is usual"
    assert not holds("1 / 0 < 3", usual)
    strange = ("__import__('os')", "loss.real > 1", "[loss]", "lambda: 1", "los > 3", "loss > 'a'", "loss >", "max")
    for text in (*strange, "9**9**9**9 > loss", "1 << 2 > loss", "max(loss, key=abs)", "(lambda: 1)()"):
        with pytest.raises(UsageError):
            parse_rule(f"when({text!r})")


# --- the store


def thinned_store(path, steps, drop_after=None, width=20):
    """A store of which each `drop_after` steps the middle ones are dropped."""
    store = StoreWriter.create(path)
    writer = store.rank(0)
    for step in range(steps):
        writer.append(step, batch(writer, rows(step, width)), {"epoch": step}, expires=True)
        if drop_after and step % drop_after == drop_after - 1:
            writer.thin(range(1, step))
    return store, writer


def test_what_is_left_is_as_it_was_written(tmp_path):
    store, writer = thinned_store(tmp_path / "run", 50, drop_after=7, width=200)
    log = (tmp_path / "run" / "rank0" / "log.bin").stat()
    assert writer.written.length == log.st_size > 2 * log.st_blocks * 512, "the file system got the room back"
    with open_run(tmp_path / "run") as run:
        assert run.state is RunState.RUNNING
        reader = run.rank(0)
        assert [entry.step for entry in reader.steps] == [0, 48, 49]
        assert list(reader.labels) == [0, 48, 49]
        assert reader.thinned == ("47 steps between 1 and 47 (recorded, then dropped by --steps)",)
        for step in (0, 48, 49):
            texts = [record.summary.text for record in reader.records(step)]
            assert texts == [repr(value) for _, _, value in rows(step, 200)]
        writer.thin([48])  # while it is read
        with pytest.raises(StoreError, match=r"step 48 of .* was dropped while it was read: try again"):
            reader.read(48)
    store.write_manifest({"status": "complete"})
    store.close()
    assert verify_run(tmp_path / "run").sound
    with open_run(tmp_path / "run") as run:
        assert run.state is RunState.COMPLETE
        assert [entry.step for entry in run.rank(0).steps] == [0, 49]
    assert verb("pack", tmp_path / "run", "-o", tmp_path / "run.zip").returncode == 0
    with open_run(tmp_path / "run.zip") as run:
        assert run.rank(0).thinned == ("48 steps between 1 and 48 (recorded, then dropped by --steps)",)
    StoreWriter.create(tmp_path / "run", force=True).close()


def test_the_last_step_stays_whatever_is_asked(tmp_path):
    store, writer = thinned_store(tmp_path / "run", 3)
    writer.thin([0, 1, 2])
    store.close()
    with open_run(tmp_path / "run") as run:
        assert [entry.step for entry in run.rank(0).steps] == [2]


def test_a_store_that_cannot_be_thinned_loses_nothing(tmp_path, monkeypatch):
    store, writer = thinned_store(tmp_path / "run", 9)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda *_args: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(StoreError, match=r"cannot drop steps from .*no space left"):
            writer.thin([3])
    writer.append(9, batch(writer, rows(9, 20)))
    writer.thin([3])
    store.close()
    with open_run(tmp_path / "run") as run:
        assert [entry.step for entry in run.rank(0).steps] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert verify_run(tmp_path / "run").sound


def test_what_was_recorded_before_training_began_is_taken_back_after_a_thinning_too(tmp_path):
    store, writer = thinned_store(tmp_path / "run", 5)
    writer.thin([2])
    writer.restart()
    writer.append(0, batch(writer, rows(0, 5)))
    store.write_manifest({"status": "complete"})
    store.close()
    assert verify_run(tmp_path / "run").sound
    with open_run(tmp_path / "run") as run:
        assert [entry.step for entry in run.rank(0).steps] == [0]


@pytest.mark.parametrize("seed", sliced(range(12), range(3)))
def test_a_kill_while_steps_are_dropped_loses_no_other(tmp_path, seed):
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            store = StoreWriter.create(tmp_path / "run")
            writer = store.rank(0)
            for step in range(10**6):
                writer.append(step, batch(writer, rows(step, 200)), expires=True)
                os.write(write_end, step.to_bytes(4, "little"))
                if step % 6 == 5:
                    writer.thin(range(1, step - 2))
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


def test_a_run_ends_at_its_first_nan_and_holds_what_came_before(tmp_path, introspect):
    (tmp_path / "train.py").write_text(
        "import torch\ntorch.manual_seed(0)\nnet = torch.nn.Linear(3, 1)\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "for step in range(90):\n"
        "    loss = net(torch.ones(2, 3)).square().mean() * (float('nan') if step == 50 else 1)\n"
        "    optimizer.zero_grad(); loss.backward(); optimizer.step()\nprint('not reached')\n"
    )
    done = introspect("capture", "--steps", "last(4)", "--until-nan", "-o", "run", "train.py")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "step 50 made a NaN; the script is ended (--until-nan)" in done.stderr
    assert "dropped 47 of them again" in done.stderr
    assert recorded(tmp_path / "run")[0] == [47, 48, 49, 50]
    shown = introspect("show", "run")
    assert "not held: 47 steps between 0 and 46 (recorded, then dropped by --steps)" in shown.stdout
    done = introspect("show", "step", "12", "run")
    assert "does not hold 47 steps between 0 and 46" in done.stderr


def test_of_what_was_dropped_nothing_is_called_equal(tmp_path):
    for name, options in (("a", {}), *((name, {"steps": "last(10)"}) for name in "bc")):
        with watched(tmp_path / name, **asked(**options)):
            train(40)
    with watched(tmp_path / "d", **asked(steps="last(10)")):
        train(40, spike=12)
    same = introspect_cli.diff(tmp_path / "a", tmp_path / "b")
    assert same.same
    assert "10 steps that both runs kept agree" in same.sentence
    answered = "Run b does not hold 30 steps between 0 and 29 (recorded, then dropped by --steps)"
    assert answered in " ".join(same.result.notes)
    assert same.result.counts.steps_compared == 10
    assert introspect_cli.diff(tmp_path / "b", tmp_path / "c").result.counts.steps_compared == 10
    diverged = introspect_cli.diff(tmp_path / "b", tmp_path / "d")
    assert not diverged.same
    assert "the steps between, which cannot be compared" in diverged.sentence, diverged.sentence


def test_what_is_no_condition_is_said_before_anything_runs(tmp_path, introspect):
    (tmp_path / "train.py").write_text("print(1)")
    done = introspect("capture", "--steps", "when('los > 3')", "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "asks for 'los'; choose from loss, median" in done.stderr

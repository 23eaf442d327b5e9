"""`capture --keep-around`: whole tensors of the last steps, held and written only when something happens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from neutrality import assert_neutral
from torch import nn

from introspect_cli.api import recording
from introspect_cli.store.run import open_run
from introspect_cli.store.run_writer import StoreWriter
from introspect_cli.store.verify import verify_run


class InPlace(nn.Module):
    """Writes over what was recorded of it."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu_())


def train(log=lambda *_: None, steps=6, odd=-1, by=1e-3, nan=-1):
    torch.manual_seed(0)
    net = InPlace()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for step in range(steps):
        batch = torch.randn(8, 4)
        if step == odd:
            batch[2, 1] += by
        if step == nan:
            batch[0, 0] = float("nan")
        out = net(batch)
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in net.parameters():
            parameter.grad.clamp_(-0.1, 0.1)
        for tensor in (batch, out, loss):
            tensor.detach().zero_()
        optimizer.step()
        log(net, optimizer)


def captured(path, work=train, options=None, **asked):
    """A run of a training."""
    torch.manual_seed(0)
    with recording(None, path, env=False, packages=False, source=False, **(options or {})):
        work(**asked)
    return path


def stored(path):
    """The files of whole tensors, by name."""
    return {file.name: file.read_bytes() for file in (path / "rank0/tensors").glob("*")}


def named(path, *steps):
    """The checksums that records of some steps name, as files."""
    with open_run(path) as run:
        records = [record for step in steps for record in run.rank(0).records(step)]
    return {f"{record.summary.checksum:016x}.safetensors" for record in records if record.summary.checksum}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that stored everything."""
    return captured(tmp_path_factory.mktemp("whole") / "a", options={"save_tensors": ["*"]})


def test_training_is_the_same_to_the_bit_and_nothing_is_written_unless_something_happens(tmp_path, whole):
    assert_neutral(train, tmp_path / "run", keep_around=2)
    assert not (tmp_path / "run/rank0/tensors").exists()
    assert_neutral(train, tmp_path / "beside", keep_around=2, against=str(whole))


def test_what_is_written_is_what_was_recorded_whatever_was_written_over_it_since(tmp_path, whole):
    odd = captured(tmp_path / "odd", odd=3, options={"save_tensors": ["*"]})
    held = captured(tmp_path / "held", odd=3, options={"keep_around": 2, "against": str(whole)})
    files = stored(held)
    assert files.keys() >= named(held, 2, 3) & stored(odd).keys()
    assert files.keys() <= named(held, 2, 3)
    assert all(stored(odd)[name] == data for name, data in files.items())
    kinds = {record.site.kind.value for record in open_run(held).rank(0).records(3) if record.summary.checksum}
    assert kinds >= {"input", "output", "grad", "param", "buffer", "optimizer_state", "loss"}
    assert verify_run(held).sound
    with open_run(held) as run:
        [wrote] = run.manifest["kept_around"]
        assert (wrote["why"], wrote["steps"]) == ("divergence", [2, 3])


def test_elements_and_ulps_are_there_without_running_again(tmp_path, whole, introspect):
    held = captured(tmp_path / "held", odd=3, by=1e-6, options={"keep_around": 1, "against": str(whole)})
    done = introspect("diff", whole, held, "--values")
    assert done.returncode == 1, done.stderr
    assert "every element there" in done.stdout
    assert introspect("report", whole, held, "-o", tmp_path / "report.html").returncode in (0, 1)
    page = (tmp_path / "report.html").read_text()
    assert 'class="closeup"' in page
    assert "every element there" in page
    assert "ULPs" in page


def test_a_nan_or_an_infinite_loss_writes_the_steps_before_it(tmp_path, introspect):
    run = captured(tmp_path / "run", nan=4, options={"keep_around": 3})
    with open_run(run) as opened:
        [wrote] = opened.manifest["kept_around"]
    assert (wrote["why"], wrote["steps"]) == ("nan", [2, 3, 4])
    assert stored(run).keys() <= named(run, 2, 3, 4)
    shown = introspect("show", "values", "InPlace.first", run, "--step", "4", "--kinds", "output")
    assert "nan" in shown.stdout, shown.stderr


def test_what_there_is_no_room_for_is_said_and_the_rest_is_held(tmp_path, capfd, monkeypatch):
    def work(width):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, width), nn.Linear(width, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            loss = net(torch.ones(2, 4)).mean() * (float("nan") if step == 2 else 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    read_text = Path.read_text
    texts = {"/proc/meminfo": "MemAvailable: 1172 kB"}
    monkeypatch.setattr(Path, "read_text", lambda path, **how: texts.get(str(path)) or read_text(path, **how))
    options = {"keep_around": 1, "quiet": False}
    run = captured(tmp_path / "run", work, options, width=30_000)
    said = capfd.readouterr().err
    assert "whole tensors of the last 1 step are held, in 300 kB of memory at most (a quarter of what is free)" in said
    assert "param of Sequential.1.weight, and maybe more, is not held whole: there are 100 kB for a step" in said
    with open_run(run) as opened:
        assert any("is not held whole" in note for note in opened.manifest["not_observed"])
    sizes = [len(data) for data in stored(run).values()]
    assert sizes
    assert max(sizes) < 100_000


@pytest.mark.parametrize("at", [0, 3])
def test_a_process_that_is_killed_while_it_writes_leaves_no_half_file(tmp_path, at, monkeypatch):
    child = os.fork()
    if not child:
        try:
            from introspect_cli.store import files

            left, original = [at], files.write_all

            def write_all(fd, pieces, begin=0):
                if len(pieces) > 1 and b"tensor" in bytes(pieces[0][:200]):
                    left[0] -= 1
                    if left[0] < 0:
                        os.write(fd, bytes(pieces[0])[:50])
                        os.kill(os.getpid(), 9)
                return original(fd, pieces, begin)

            files.write_all = write_all
            captured(tmp_path / "run", nan=4, options={"keep_around": 2})
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == 9
    with open_run(tmp_path / "run") as run:
        assert run.last_step == 4
    assert verify_run(tmp_path / "run").counts["tensors"] == at


def test_a_store_without_room_costs_the_tensors_and_not_the_run(tmp_path, monkeypatch):
    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StoreWriter, "save_tensor", full)
    run = captured(tmp_path / "run", nan=3, options={"keep_around": 2})
    with open_run(run) as opened:
        assert opened.last_step == 5
        assert any("are no longer held" in note for note in opened.manifest["not_observed"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--keep-around", "2", "--stats", "none"), "--keep-around look at statistics"),
        (("--keep-around", "0"), "--keep-around"),
    ],
)
def test_what_cannot_be_meant_is_said_before_anything_runs(introspect, tmp_path, words, said):
    (tmp_path / "train.py").write_text("print(1)")
    done = introspect("capture", *words, "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr

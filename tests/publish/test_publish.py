"""A run is published while it goes on, by each logger's own client, and training notices nothing of it."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

import introspect_cli
from introspect_cli.capture.background import BackgroundProcess, Publishers

pytestmark = pytest.mark.usefixtures("quick_python")

TRAIN = """\
import os, random, sys, time
import torch
torch.manual_seed(0)
random.seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(6):
    loss = net(torch.ones(2, 4)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
try:
    print("child", os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print("no child")
print(random.random(), loss.item(), sorted({"mlflow", "wandb", "tensorboard"} & set(sys.modules)))
"""
PATIENT = """
from introspect_cli.capture.background import BackgroundProcess
from introspect_cli.cli import main
BackgroundProcess.patience = 600.0  # a busy machine imports three clients for longer than people wait
main()
"""
PLACES = ("tensorboard:tb", "mlflow", "wandb", "file://{}/far")
HERE = {"MLFLOW_ALLOW_FILE_STORE": "true", "WANDB_MODE": "offline"}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    pytest.importorskip("mlflow", reason="MLflow's client is not installed")
    pytest.importorskip("wandb", reason="the client of Weights & Biases is not installed")
    place = tmp_path_factory.mktemp("published")
    (place / "train.py").write_text(TRAIN)
    bare = subprocess.run([sys.executable, "train.py"], cwd=place, capture_output=True, text=True, check=True)
    words = [word for text in PLACES for word in ("--publish", text.format(place))]
    command = [sys.executable, "-c", PATIENT, "capture", "--no-packages", *words, "-o", "run", "train.py"]
    settings = {**os.environ, **HERE, "MLFLOW_TRACKING_URI": f"file:{place}/mlruns"}
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False, env=settings)
    return place, done, bare


@pytest.fixture(scope="module")
def losses(published):
    with introspect_cli.open_run(published[0] / "run") as run:
        return run.to_arrow(kinds=["loss"]).column("mean").to_pylist()


def test_training_notices_nothing_of_it(published):
    _, done, bare = published
    assert (done.returncode, done.stdout) == (0, bare.stdout), done.stderr
    assert bare.stdout.startswith("no child\n")
    for text in PLACES:
        assert f"published 6 steps of run to {text.format(published[0])}" in done.stderr


def events_in(path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(path))
    events.Reload()
    return events


def test_tensorboard_opens_what_was_published(published, losses):
    events = events_in(published[0] / "tb")
    found = events.Scalars("introspect/loss")
    assert [event.step for event in found] == list(range(6))
    assert [event.value for event in found] == pytest.approx(losses)
    assert {"introspect/grad_norm", "introspect/param_norm", "introspect/learning_rate"} <= set(
        events.Tags()["scalars"]
    )


def test_mlflow_reads_what_was_published(published, losses, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(f"file:{published[0]}/mlruns")
    [run] = client.search_runs([client.get_experiment_by_name("introspect").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    found = sorted(client.get_metric_history(run.info.run_id, "introspect/loss"), key=lambda metric: metric.step)
    assert [metric.value for metric in found] == pytest.approx(losses)


def wandb_records(data):
    """The records of an offline run, a log as LevelDB writes them: blocks of 32 kB, pieces of crc, length and kind."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if at % 32768 > 32768 - 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def test_weights_and_biases_holds_what_was_published(published, losses):
    from wandb.proto import wandb_internal_pb2

    [file] = (published[0] / "wandb").glob("offline-run-*/*.wandb")
    history = []
    for data in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            history.append((json.loads(items["_step"]), json.loads(items["introspect/loss"])))
    assert [step for step, _ in history] == list(range(6))
    assert [loss for _, loss in history] == pytest.approx(losses)


def test_a_url_holds_the_run_itself(published):
    far = published[0] / "far" / "run"
    assert introspect_cli.diff(f"file://{far}", published[0] / "run").same
    assert not list(far.glob("*.zip"))


def test_what_is_selected_is_published_of_a_run_that_is_over(published, introspect):
    place = published[0]
    options = ("--kinds", "grad", "--modules", "*.0", "--stats", "l2")
    done = introspect("publish", "run", "tensorboard:again", *options, cwd=place)
    assert done.returncode == 0, done.stderr
    assert {name for name in events_in(place / "again").Tags()["scalars"] if "/grad/" in name} == {
        "introspect/grad/Sequential.0.weight/l2",
        "introspect/grad/Sequential.0.bias/l2",
    }
    done = introspect("publish", "run", "tensorboard:again", "--stats", "l3", cwd=place)
    assert (done.returncode, "unknown statistic 'l3'" in done.stderr) == (2, True)
    done = introspect("publish", "run", "mlfow:7", cwd=place)
    said = "cannot publish to 'mlfow:7': choose from tensorboard, mlflow"
    assert (done.returncode, said in done.stderr) == (2, True)


def test_a_place_that_fails_costs_its_own_numbers_and_nothing_else(tmp_path, introspect):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "file").write_text("in the way")
    places = ("--publish", "tensorboard:file", "--publish", "tensorboard:tb")
    done = introspect("capture", "--no-packages", *places, "-o", "run", "train.py")
    assert done.returncode == 0
    assert done.stdout.startswith("no child\n")
    assert "run was not published to tensorboard:file completely: " in done.stderr
    assert "published 6 steps of run to tensorboard:tb" in done.stderr
    with introspect_cli.open_run(tmp_path / "run") as run:
        assert run.steps == list(range(6))


def test_what_a_killed_run_recorded_is_published(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN.replace("try:", "print('here', flush=True); time.sleep(900)\ntry:"))
    command = [sys.executable, "-m", "introspect_cli", "capture", "--no-packages", "--publish", "tensorboard:tb"]
    process = subprocess.Popen([*command, "-o", "run", "train.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    seen, until = [], time.monotonic() + 600
    while len(seen) < 6 and time.monotonic() < until:
        time.sleep(0.1)
        events = events_in(tmp_path / "tb") if (tmp_path / "tb").exists() else None
        seen = events.Scalars("introspect/loss") if events and events.Tags()["scalars"] else []
    assert [event.step for event in seen] == list(range(6))


def test_nobody_waits_for_a_logger_that_hangs(tmp_path, monkeypatch):
    hanging = tmp_path / "hangs"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(hanging))
    monkeypatch.setattr(BackgroundProcess, "patience", 0.2)
    publishing = Publishers(tmp_path / "run", ["mlflow"], SimpleNamespace(around=lambda *_: nullcontext()))
    began = time.monotonic()
    assert publishing.finish() == ["still publishing to mlflow, in the background"]
    assert time.monotonic() - began < 30


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 1200, reason="no descriptor is as high as that")
def test_a_script_may_have_as_many_files_open_as_it_likes(monkeypatch):
    pipe = os.pipe

    def high():
        ends = pipe()
        above = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 1100) for end in ends)
        for end in ends:
            os.close(end)
        return above

    monkeypatch.setattr(os, "pipe", high)
    said, ended = BackgroundProcess("introspect_cli.cli", ["--version"], "what answers").rest(60)
    assert ended, said
    assert introspect_cli.__version__.encode() in said

"""Runs in object storage: sent while they are written, read where they lie, and what is said where that fails."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from hashlib import blake2b

import numpy as np
import pytest
from storage import only, serving
from synthetic import batch, row

from introspect_cli.cli import main
from introspect_cli.errors import StoreError
from introspect_cli.publish.send import Sender
from introspect_cli.store import remote
from introspect_cli.store.files import DamageError
from introspect_cli.store.run import RunState, open_run
from introspect_cli.store.run_writer import Launch, StoreWriter

s3fs = pytest.importorskip("s3fs", reason="the client of s3:// is not installed")
pytest.importorskip("moto", reason="the server of object storage is not installed")

STEPS = 12


@pytest.fixture(scope="module")
def bucket():
    with serving() as served, pytest.MonkeyPatch.context() as patch:
        for name, value in served.settings.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()  # of a server that earlier tests had
        yield served


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(remote, "CACHE", {})
    monkeypatch.setattr(remote, "_LARGEST_CACHE", 1 << 24)


def rows(step, rank, *, changed=False):
    values = [[float(step + number), float(rank), 1.0 + changed] for number in range(30)]
    return [row("forward", "output", f"Net.{number}", value) for number, value in enumerate(values)]


class Writing:
    """A run that is written step by step: of one process, or of a rank of a launch."""

    def __init__(self, path, rank=None, ranks=1, attempt=0):
        launch = None if rank is None else Launch(f"a{attempt}" * 16, "ab" * 16, rank, ranks, attempt)
        self.path, self.rank = path, rank or 0
        self.store = StoreWriter.create(path, launch=launch)
        about = {"rank": rank, "world_size": ranks} if rank is not None else {}
        self.about = {"tool": {"name": "introspect", "version": "0"}, "script": "train.py", "argv": [], **about}
        self.store.write_manifest({**self.about, "status": "running"})
        self.store.write_settings("environment", {"python": "3", "rank": self.rank})
        self.writer = None

    def steps(self, *numbers, changed=()):
        self.writer = self.writer or self.store.rank(self.rank)
        for step in numbers:
            self.writer.append(step, batch(self.writer, rows(step, self.rank, changed=step in changed)), expires=True)
        return self

    def end(self):
        self.store.write_manifest({**self.about, "status": "complete", "exit_code": 0})
        self.store.close()
        return self.path


def launch(path, ranks=3, changed=()):
    for rank in range(ranks):
        Writing(path, rank, ranks).steps(*range(STEPS), changed=changed if rank == 1 else ()).end()
    return path


@pytest.fixture(scope="module")
def runs(bucket, tmp_path_factory):
    """Two runs of three ranks, of which step 7 of rank 1 differs, here and there."""
    place = tmp_path_factory.mktemp("runs")
    for name, changed in (("a", ()), ("b", (7,)), ("again", ())):
        launch(place / name, changed=changed)
        Sender(place / name, f"{bucket.url}/runs/{name}").send()
    return place


@pytest.fixture
def ask(monkeypatch, capsys):
    """Run `introspect ARGS...` in this process, which has the client of s3:// already."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["introspect", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return ended.value.code, said.out, said.err

    return run


def test_every_verb_answers_of_a_run_there_as_of_one_here(runs, bucket, ask, tmp_path):
    asked = {"diff": ("a", "b"), "check": ("b",), "show": ("step", "7", "b"), "verify": ("a",)}
    for verb, words in asked.items():
        here = ask(verb, *(runs / word if len(word) == 1 and word != "7" else word for word in words))
        there = ask(verb, *(f"{bucket.url}/runs/{word}" if len(word) == 1 and word != "7" else word for word in words))
        plain = [re.sub(rf"{re.escape(str(runs))}|{bucket.url}/runs", "RUNS", said) for _, said, _ in (here, there)]
        assert (there[0], plain[1]) == (here[0], plain[0]), there[2]
        assert here[1], (verb, here)
    code, _, err = ask("pack", f"{bucket.url}/runs/a", "-o", tmp_path / "a.zip")
    assert code == 0, err
    assert ask("diff", tmp_path / "a.zip", runs / "a")[0] == 0


def fetched(asked, kind):
    return [(path, span) for method, path, span in asked if method == "GET" and re.search(kind, path.partition("?")[0])]


def test_catalogues_are_read_once_and_objects_at_most_once(runs, bucket, ask):
    urls = [f"{bucket.url}/runs/{name}" for name in "ab"]
    with bucket.failing(lambda method, path: None) as asked:
        code, out, _ = ask("diff", *urls)
    assert code == 1
    assert "First divergence at step 7, rank 1" in out
    assert len(fetched(asked, "catalogue")) == 6
    assert len(fetched(asked, r"log\.bin\.\d")) == len(set(fetched(asked, r"log\.bin\.\d"))) <= 6
    with bucket.failing(lambda method, path: None) as asked:
        assert ask("diff", urls[0], f"{bucket.url}/runs/again")[0] == 0
    again = [name for name, _ in fetched(asked, r"log\.bin\.\d") if "/runs/a/" not in name]
    assert len(again) <= 1, "the names of one rank, which the others have alike"


@pytest.mark.parametrize(("what", "where"), [("500", "log.bin"), ("cut", "catalogue")])
def test_a_request_that_fails_once_changes_no_answer(what, where, runs, bucket):
    with bucket.failing(only(what, rf"GET .*{where}", 1)) as asked, open_run(f"{bucket.url}/runs/a") as run:
        there = [list(run.rank(rank).records(5)) for rank in run.ranks]
    with open_run(runs / "a") as run:
        assert there == [list(run.rank(rank).records(5)) for rank in run.ranks]
    assert asked


@pytest.mark.parametrize(
    ("what", "where", "says"),
    [
        ("500", "GET .*rank1/catalogue", r"cannot read s3://bucket/runs/a/rank1/catalogue: .*Internal"),
        ("404", "GET .*rank1/.*log.bin", r"a/rank1/log\.bin\.0{10}64 is damaged: it is missing; publish the run again"),
        ("spoil", "GET .*rank1/.*log.bin", r"a/rank1/log.bin is damaged: .* are not those that were"),
        ("spoil", "GET .*rank1/catalogue", r"a/rank1/catalogue is damaged: its bytes are not those that were sent"),
    ],
)
def test_a_fault_that_lasts_is_one_sentence_with_the_url(what, where, says, runs, bucket):
    def read():
        with open_run(f"{bucket.url}/runs/a") as run:
            return [list(run.rank(rank).records(step)) for rank in run.ranks for step in range(STEPS)]

    with bucket.failing(only(what, where)), pytest.raises(StoreError, match=says) as answered:
        read()
    assert "\n" not in str(answered.value)


def test_another_run_is_not_written_over(runs, bucket, tmp_path):
    other = Writing(tmp_path / "other").steps(0).end()
    Sender(other, f"{bucket.url}/once").send()
    third = Writing(tmp_path / "third").steps(0).end()
    with pytest.raises(StoreError, match="s3://bucket/once holds another run: choose another URL"):
        Sender(third, f"{bucket.url}/once").send()


# --- while it is written


SENT = r"What is there was sent by [-\d]+ [:\d]+ UTC"


def test_what_was_sent_of_a_run_that_goes_on_or_was_lost_is_a_prefix(bucket, tmp_path, monkeypatch, ask):
    url = f"{bucket.url}/lost"
    begun = [Writing(tmp_path / "run", rank, 2) for rank in (0, 1)]
    for one in begun:
        one.steps(*range(5))
    Sender(tmp_path / "run", url).send()
    begun[0].steps(*range(5, 9)).end()
    begun[1].steps(*range(5, 9))
    Sender(tmp_path / "run", url, 0).send()  # the machine of rank 1 is gone
    with open_run(url) as run:
        assert (run.state, run.last_step, len(run.rank(0))) == (RunState.RUNNING, 4, 9)
        assert re.fullmatch(rf"{SENT}: more was to follow, .*", *run.endings)
    monkeypatch.setattr(remote, "now", lambda: 1e12)
    with open_run(url) as run:
        assert (run.state, run.last_step) == (RunState.INTERRUPTED, 4)
        assert any(re.match(SENT, sentence) for sentence in run.endings)
        assert "Rank 1 of 2 was cut off after step 4" in run.endings
    begun[1].end()
    Sender(tmp_path / "run", url).send()
    with open_run(url) as run:
        assert (run.state, run.last_step, run.endings) == (RunState.COMPLETE, 8, [])
    assert ask("diff", url, tmp_path / "run")[0] == 0


def test_a_script_that_was_killed_is_interrupted_there_as_here(bucket, tmp_path):
    one = Writing(tmp_path / "run")
    sender = Sender(tmp_path / "run", f"{bucket.url}/killed")
    sender.send()  # before there is a step
    with open_run(f"{bucket.url}/killed") as run:
        assert (run.state, run.last_step) == (RunState.RUNNING, None)
    one.steps(*range(4))
    sender.send()
    one.steps(4)
    one.store.abandon()
    sender.send()
    with open_run(f"{bucket.url}/killed") as run:
        assert (run.state, run.last_step, run.endings) == (RunState.INTERRUPTED, 4, [])


def test_a_sender_goes_on_where_another_stopped_and_mends_what_is_missing(bucket, tmp_path):
    url = f"{bucket.url}/resumed"
    one = Writing(tmp_path / "run").steps(*range(6))
    Sender(tmp_path / "run", url).send()
    one.steps(6).end()
    with bucket.failing(lambda method, path: None) as asked:
        Sender(tmp_path / "run", url).send()
    puts = [path for method, path, _ in asked if method == "PUT"]
    assert [re.sub(r"\d+$", "N", path.partition("resumed/")[2]) for path in puts] == [
        "rank0/log.bin.N",
        "rank0/catalogue",
    ]
    system = Sender(tmp_path / "run", url).storage.system
    system.rm("bucket/resumed/rank0/log.bin.000000000064")
    with pytest.raises(DamageError, match="it is missing"), open_run(url) as run:
        list(run.rank(0).records(3))
    Sender(tmp_path / "run", url).send()
    with open_run(url) as there, open_run(tmp_path / "run") as here:
        assert there.state is RunState.COMPLETE
        assert [list(there.rank(0).records(step)) for step in range(7)] == [
            list(here.rank(0).records(step)) for step in range(7)
        ]


def test_steps_that_were_dropped_or_taken_back_are_dropped_there_as_well(tmp_path):
    one = Writing(tmp_path / "run").steps(*range(6))
    url = f"file://{tmp_path}/far"
    sender = Sender(tmp_path / "run", url)
    sender.send()
    one.writer.thin([1, 2])
    sender.send()
    with open_run(url) as run:
        assert run.rank(0).entries["step"].tolist() == [0, 3, 4, 5]
        assert run.rank(0).thinned
        list(run.rank(0).records(4))
    one.writer.restart()
    one.steps(0, 1, changed=(0, 1)).end()
    sender.send()
    with open_run(url) as there, open_run(tmp_path / "run") as here:
        assert there.state is RunState.COMPLETE
        for step in (0, 1):
            assert list(there.rank(0).records(step)) == list(here.rank(0).records(step))


def test_memory_is_a_place_as_well_and_whole_tensors_and_sources_go_there(tmp_path):
    one = Writing(tmp_path / "run").steps(*range(3))
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    one.store.save_tensor(0xABC, memoryview(values).cast("B"), "float32", values.shape)
    digest = blake2b(b"x = 1", digest_size=8).hexdigest()
    one.store.save_source(digest, b"x = 1")
    one.end()
    Sender(tmp_path / "run", "memory://there/run").send()
    with open_run("memory://there/run") as run:
        assert (run.tensor(0xABC) == values).all()
        assert not run.kept_sources
    Sender(tmp_path / "run", "memory://there/run", sources=True).send()
    with open_run("memory://there/run") as run:
        assert run.source(digest) == b"x = 1"
        assert (run.state, run.last_step, run.settings["environment"]) == (
            RunState.COMPLETE,
            2,
            {"python": "3", "rank": 0},
        )


def test_a_catalogue_from_a_stranger_is_no_way_out():
    said = remote.Catalogue("ab", inline={"manifest.json": b"abc"}, objects={"rank0/log.bin": [3, 4]})
    whole = said.encoded()
    assert remote.decode_catalogue(whole, "x") == said
    for at in range(len(whole)):
        with pytest.raises(DamageError):
            remote.decode_catalogue(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :], "x")
    outside = [("inline", {"../../etc/passwd": b"abc"}), ("objects", {"../other": [3]}), ("run_id", "../x")]
    outside += [("objects", {"rank0/log.bin": sizes}) for sizes in ([-2], [1.5], ["1"], 3, None)]
    for name, value in outside:
        with pytest.raises(DamageError):
            remote.decode_catalogue(remote.Catalogue(**{name: value}).encoded(), "x")


# --- beside training

TRAIN = """\
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    loss = net(torch.ones(2, 4)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
print(loss.item())
"""
HURRIED = """
from introspect_cli.capture.background import BackgroundProcess
from introspect_cli.cli import main
BackgroundProcess.patience = 0.0  # what is published in the background, nobody waits for
main()
"""
LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "one"}


@pytest.mark.usefixtures("quick_python")
def test_a_rank_sends_its_own_and_storage_that_does_not_answer_holds_it_back_in_nothing(bucket, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    bare = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    command = [sys.executable, "-c", HURRIED, "capture", "--no-packages", "--publish", f"{bucket.url}/slow"]
    command += ["-o", "run", "train.py"]
    with bucket.failing(lambda method, path: "hang"):
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ | LAUNCHED
        )
        assert (done.returncode, done.stdout) == (0, bare.stdout), done.stderr
        with open_run(tmp_path / "run") as run:
            assert (run.rank(1).ended, run.last_step) == (True, 3)
    bucket.release.set()
    there = None
    while there is None:  # as long as a test may take
        with contextlib.suppress(StoreError), open_run(f"{bucket.url}/slow/run") as run:
            if run.ranks and run.rank(1).ended and not run.rank(1).unfinished:
                there = run.endings, run.ranks, run.last_step
        time.sleep(0.2)
    assert there == (["Rank 0 of 2 left nothing"], (1,), 3)

"""`capture --against`: a run is compared while it is written, and training notices nothing of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from against import HANGS, TRAIN, ended, pids
from synthetic import row, write_run

from introspect_cli.api import recording
from introspect_cli.capture.against import Against
from introspect_cli.capture.options.capture_options import CaptureOptions
from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.errors import StoreError
from introspect_cli.rerun.live import Digests, LiveReference, compare_live
from introspect_cli.store.read.run import open_run
from introspect_cli.store.write.run_writer import StoreWriter

pytestmark = pytest.mark.usefixtures("quick_python")


@pytest.fixture(scope="module")
def place(tmp_path_factory, forks):
    """A script, its run of 40 steps, and one whose sixth batch is another."""
    folder = tmp_path_factory.mktemp("against")
    (folder / "train.py").write_text(TRAIN)
    for name, fault in (("ref", "-1"), ("noise", "5")):
        done = forks("capture", "-o", name, "train.py", "40", fault, "0", cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


def started(text):
    """Processes that compare that run, waited for."""
    until = time.monotonic() + HANGS
    while not (found := pids(text)):
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


def test_training_is_the_same_to_the_bit_with_and_without(place, introspect, tmp_path):
    words = ("train.py", "6", "-1", "0")
    bare = introspect("capture", "-o", tmp_path / "bare", *words, cwd=place)
    done = introspect("capture", "--against", "ref", "-o", tmp_path / "run", *words, cwd=place)
    assert (done.returncode, done.stdout) == (0, bare.stdout), done.stderr
    with open_run(tmp_path / "bare") as one, open_run(tmp_path / "run") as two:
        assert one.rank(0).entries["digest"].tobytes() == two.rank(0).entries["digest"].tobytes()
        assert "against" not in two.manifest["options"]


def test_the_first_divergence_is_said_when_it_happens_and_the_verdict_at_the_end(place, introspect, tmp_path):
    words = ("-o", tmp_path / "run", "train.py", "40", "5", "0")
    done = introspect("capture", "--against", "ref", *words, cwd=place)
    assert done.returncode == 0, done.stderr
    assert "introspect: against ref: First divergence at step 5: the input [0] of Linear differs" in done.stderr
    assert "introspect: against ref, at the end: " in done.stderr
    assert ended(str(tmp_path))


def test_stop_ends_the_script_there_with_the_status_of_diff(place, introspect, tmp_path):
    words = ("--stop", "--against", "ref", "-o", tmp_path / "run", "train.py", "4000", "3", "0.02")
    done = introspect("capture", *words, cwd=place)
    assert done.returncode == 1, done.stderr
    assert "(--stop)" in done.stderr
    assert done.stdout == ""  # the script's last line was not reached
    with open_run(tmp_path / "run") as run:
        assert 3 < len(run.rank(0)) < 4000
    assert "at its first divergence (--stop)" in introspect("runs", tmp_path).stdout


EVALUATED = """\
import time, torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
with torch.no_grad():
    for _ in range(8):
        net(torch.ones(2, 4)), time.sleep(PAUSE)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    loss = net(torch.ones(8, 4)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def test_an_evaluation_before_training_which_is_taken_back_is_no_divergence(introspect, tmp_path):
    for name, pause in (("quick", "0"), ("slow", "0.3")):
        (tmp_path / f"{name}.py").write_text(EVALUATED.replace("PAUSE", pause))
    assert introspect("capture", "-o", "ref", "quick.py").returncode == 0
    done = introspect("capture", "--stop", "--against", "ref", "-o", "run", "slow.py")
    assert "First divergence" not in done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("asked", "code", "said"),
    [
        ("--kinds input --steps 6:", 0, "The runs are the same"),
        ("--kinds 'output,loss' --modules Linear", 1, "First divergence at step 5: the output of Linear"),
        ("--noise noise", 0, "within"),
        ("--steps 300:", 2, "not compared with ref any further: "),
    ],
)
def test_it_is_asked_with_the_options_of_diff(place, introspect, tmp_path, asked, code, said):
    words = ("--diff", asked, "--stop", "--against", "ref", "-o", tmp_path / "run", "train.py", "40", "5", "0")
    done = introspect("capture", *words, cwd=place)
    assert done.returncode == code, done.stderr
    assert said in done.stderr


RESUMED = """\
import sys, time, torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
begin = 0
if len(sys.argv) > 1:
    kept = torch.load("kept.pt")
    net.load_state_dict(kept["net"])
    begin = 8
    if sys.argv[1] == "whole":
        optimizer.load_state_dict(kept["optimizer"])
for step in range(begin, 20):
    torch.manual_seed(step)
    loss = net(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    time.sleep(0.1 if begin else 0)
    if step == 7:
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, "kept.pt")
"""


def test_a_resumed_run_is_compared_from_where_it_goes_on(introspect, tmp_path):
    (tmp_path / "train.py").write_text(RESUMED)
    assert introspect("capture", "-o", "ref", "train.py").returncode == 0
    for asked, code in (("whole", 0), ("part", 1)):
        done = introspect("capture", "--stop", "--against", "ref", "-o", asked, "train.py", asked)
        assert done.returncode == code, done.stderr
        answer = introspect("diff", "ref", asked, "--format", "json")
        assert answer.returncode == code
        answer = json.loads(answer.stdout)
        assert any("(--offset 8)" in note for note in answer["notes"])
        assert f"against ref{'' if code else ', at the end'}: {answer['sentence']}\n" in done.stderr
        assert done.stderr.count("against ref") == 1 + code


def damaged(run):
    log = run / "rank0" / "log.bin"
    data = bytearray(log.read_bytes())
    data[70] ^= 255
    log.write_bytes(data)


def newer(run):
    manifest = run / "manifest.yaml"
    text = manifest.read_text()
    manifest.write_text(
        text.replace(text.split("\n", 1)[0], "format: 99") if text.startswith("format") else "format: 99"
    )


@pytest.mark.parametrize(
    ("harm", "said"), [(damaged, "damaged"), (newer, "format 99"), (shutil.rmtree, "there is no run")]
)
def test_a_reference_that_cannot_be_read_is_said_in_one_line_and_training_goes_on(
    place, introspect, tmp_path, monkeypatch, harm, said
):
    shutil.copytree(place / "ref", tmp_path / "ref")
    shutil.copy(place / "train.py", tmp_path)
    if harm is shutil.rmtree:  # while the run goes on
        script = (place / "train.py").read_text().replace("import", "import shutil; shutil.rmtree('ref')\nimport", 1)
        (tmp_path / "train.py").write_text(script)
    else:
        harm(tmp_path / "ref")
    done = introspect("capture", "--against", "ref", "-o", "run", "train.py", "6", "-1", "0")
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stderr.splitlines() if "against" in line or "compared" in line]
    assert line.startswith("introspect: not compared with ref any further: ")
    assert said in line


@pytest.fixture
def url(tmp_path):
    """The address of a directory on a web server."""
    pytest.importorskip("aiohttp")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_pack_at_a_url_and_a_golden_run_are_references_too(place, introspect, tmp_path, url):
    assert introspect("pack", "ref", "-o", tmp_path / "ref.zip", cwd=place).returncode == 0
    words = ("-o", tmp_path / "golden", "--steps", "6", "train.py", "6", "-1", "0")
    assert introspect("golden", "save", *words, cwd=place).returncode == 0
    words = ("capture", "--stop", "--force", "-o", tmp_path / "run", "--against")
    for reference in (f"{url}/ref.zip", tmp_path / "golden"):
        done = introspect(*words, reference, "train.py", "40", "2", "0", cwd=place)
        assert done.returncode == 1, done.stderr
        assert "First divergence at step 2" in done.stderr
    done = introspect(*words, f"{url}/none.zip", "train.py", "4", "2", "0", cwd=place)
    assert done.returncode == 2, done.stderr
    assert (
        f"not compared with {url}/none.zip any further: there is no run at {url}/none.zip: check the URL\n"
        in done.stderr
    )


def test_no_process_stays_when_training_is_killed(place, tmp_path):
    run = str(tmp_path / "run")
    words = ["capture", "--against", "ref", "-o", run, "train.py", "4000", "0", "0.05"]
    process = subprocess.Popen([sys.executable, "-m", "introspect_cli", *words], cwd=place, stderr=subprocess.DEVNULL)
    try:
        started(run)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert ended(str(tmp_path))


def test_a_comparison_that_is_killed_is_said_and_one_that_takes_long_is_left(place, tmp_path):
    options = CaptureOptions(against=str(place / "ref"))
    with StoreWriter.create(tmp_path / "run") as store:  # a run that goes on
        store.write_manifest({"status": "running"})
        first = Against(tmp_path / "run", options)
        started(str(tmp_path / "run"))
        first.patience = 0.0
        left = first.finish()
        assert [line.split(": ")[1] for line in left] == [
            "it took more than 0 seconds; `introspect diff` compares them"
        ]
        assert ended(str(tmp_path / "run"))
        against = Against(tmp_path / "run", options)
        os.kill(started(str(tmp_path / "run"))[0], signal.SIGKILL)
        assert against.look(0) == []
        against.patience = HANGS
        [line] = against.finish()
        assert "to the end: what compares has ended early" in line


def test_a_comparison_that_falls_behind_holds_nothing_back(place, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(Against, "patience", HANGS)
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train(steps):
        began = time.monotonic()
        for _ in range(steps):
            optimizer.zero_grad()
            net(torch.ones(8, 4)).square().mean().backward()
            optimizer.step()
            time.sleep(0.01)
        return time.monotonic() - began

    with recording(net, tmp_path / "run", against=str(place / "ref"), rtol=1e9, quiet=False):
        while not (found := pids(str(tmp_path / "run"))):
            train(1)
        os.kill(found[0], signal.SIGSTOP)  # one that is slow
        try:
            assert train(100) < 20, "training waited for it"
        finally:
            os.kill(found[0], signal.SIGCONT)
    assert "at the end" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--against", "nowhere"), "there is no run at nowhere to compare with"),
        (("--stop",), "name a run with --against"),
        (("--rtol", "1e-3"), "name a run with --against"),
        (("--diff", "--kinds loss"), "name a run with --against"),
        (("--against", "ref", "--diff", "--kinds nothing"), "nothing"),
        (
            ("--against", "ref", "--diff", "--no-such loss"),
            "that change the answer of `introspect diff`: No such option",
        ),
        (("--against", "ref", "--diff", "--map"), "that change the answer of `introspect diff`"),
        (("--against", "ref", "--diff", "other"), "that change the answer of `introspect diff`"),
        (("--against", "ref", "--diff", "'"), "--diff ': no closing quotation"),
        (("--against", "ref", "-o", "ref"), "ref is the run to compare with: name another directory"),
    ],
)
def test_what_cannot_be_meant_is_said_before_anything_runs(place, introspect, words, said):
    done = introspect("capture", *words, "train.py", "1", "-1", "0", cwd=place)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


# --- the loop, without processes


def written(path, values, **options):
    return write_run(path, [[row("backward", "grad", "Net", value)] for value in values], **options)


def ask(one, two):
    return compare_runs(one, two, DiffOptions())


def test_steps_whose_digests_agree_are_not_asked_about(tmp_path):
    with (
        open_run(written(tmp_path / "a", [1.0, 2.0, 3.0])) as one,
        open_run(written(tmp_path / "b", [1.0, 2.0, 4.0])) as two,
    ):
        digests = Digests()
        assert not digests.differ(one, one)
        digests.looked.clear()
        assert digests.differ(one, two)
        assert not digests.differ(one, two), "what was looked at once is not looked at again"


def test_a_reference_that_is_rewritten_when_it_is_opened_is_opened_again(tmp_path):
    run, reference, opened = written(tmp_path / "b", [1.0, 2.0]), written(tmp_path / "a", []), []

    def opening():
        opened.append(open_run(reference))
        if len(opened) == 1:
            assert opened[0].last_step is None  # its files are opened before they are exchanged
            written(tmp_path / "a", [1.0, 3.0], force=True)
        return opened[-1]

    result = compare_live(LiveReference(opening, ask), run, print, pause=0.0)
    assert (result.verdict.value, result.first.step, len(opened)) == ("diverged", 1, 2)


def test_a_run_that_is_gone_is_an_error_after_a_few_looks(tmp_path):
    written(tmp_path / "a", [1.0])
    with pytest.raises(StoreError):
        compare_live(LiveReference(lambda: open_run(tmp_path / "a"), ask), tmp_path / "nowhere", print, pause=0.0)

"""Whenever an interrupt comes while a capture finishes: the run is whole, and the process dies of it without a word."""

from __future__ import annotations

import signal

import pytest

from introspect_cli.store.read.run import RunState, open_run
from introspect_cli.store.read.verify import verify_run

PARTS = 20
"""Of the thousand instants: a minute each, so that none runs into its limit on a busy machine."""

SCRIPT = """
import atexit, os, signal, sys
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(3):
    net(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
number, at, seen, over = getattr(signal, sys.argv[1]), int(sys.argv[2]), 0, False
def handler(*_):
    raise {"SIGALRM": TimeoutError, "SIGTERM": SystemExit}[sys.argv[1]](9)
if number != signal.SIGINT:
    signal.signal(number, handler)
def watch(frame, event, arg):
    # where python looks for signals: at a function's beginning, and after each call of one in C
    global seen, over
    if over or event not in ("call", "c_return"):
        return
    if frame.f_code.co_name == "_shutdown":
        over = True
        return
    seen += 1
    if seen == at:
        over = True
        os.kill(os.getpid(), number)
def tell():
    sys.setprofile(None)
    print("instants", seen)
atexit.register(tell)
sys.setprofile(watch)
"""


@pytest.fixture(scope="module")
def finished(forks, tmp_path_factory):
    """Runs the script, a signal sent at an instant of the finish; what it did, and its run."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "train.py").write_text(SCRIPT)

    def run(number, at):
        done = forks("capture", "--force", "-o", "run", "train.py", number, str(at), cwd=folder)
        return done, folder / "run"

    return run


@pytest.fixture(scope="module")
def instants(finished):
    done, _ = finished("SIGINT", -1)
    assert done.returncode == 0, done.stderr
    count = int(done.stdout.split()[-1])
    assert count > 1000
    return count


def problems(finished, number, codes, every):
    """What went wrong at which instants."""
    found, sent = [], 0
    for at in every:
        done, path = finished(number, at)
        if int(done.stdout.split()[-1]) < at:
            continue  # this finish was shorter by a few instants
        sent += 1
        if done.returncode not in codes:
            found.append(f"{at}: exit code {done.returncode}, {done.stderr}")
        if "introspect_cli" in done.stderr:
            found.append(f"{at}: {done.stderr}")
        with open_run(path) as run:
            if run.state is not RunState.COMPLETE or [entry.step for entry in run.rank(0).steps] != [0, 1, 2]:
                found.append(f"{at}: {run.state}, {len(run.rank(0).steps)} steps")
        if not verify_run(path).sound:
            found.append(f"{at}: damaged")
    assert sent > len(every) // 2
    return found


def spread(last, count):
    """The first instants and the last ones one by one, and some between."""
    edge = count // 4
    between = range(edge, last - edge, max((last - 2 * edge) // (count - 2 * edge), 1))
    return sorted({*range(1, edge + 1), *between, *range(last - edge, last + 1)})


def test_an_interrupt_while_a_capture_finishes(finished, instants):
    """It was swallowed by what it happened to meet, or ended in introspect's traceback and a run that is not closed."""
    assert problems(finished, "SIGINT", {-signal.SIGINT}, spread(instants, 10)) == []


@pytest.mark.parametrize(("number", "codes"), [("SIGTERM", {9}), ("SIGALRM", {0, 1})])
def test_a_handler_of_the_script_that_raises_while_a_capture_finishes(finished, instants, number, codes):
    """Whoever ends in time has no timeout: alone, the process would have been gone."""
    assert problems(finished, number, codes, spread(instants, 4)) == []


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
def test_an_interrupt_at_a_thousand_instants_of_the_finish(finished, instants, part):
    """Each part goes over the whole finish, from its first instant to its last."""
    assert problems(finished, "SIGINT", {-signal.SIGINT}, spread(instants, 1000)[part::PARTS]) == []

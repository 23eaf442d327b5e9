"""Interrupts at any instant of a step's or a capture's end: each arrives, and no step is lost or mixed with another."""

from __future__ import annotations

import signal

import pytest

from introspect_cli.store.run import RunState, open_run
from introspect_cli.store.verify import verify_run

PARTS = 20
"""Of the thousand instants: a minute each, so that none runs into its limit on a busy machine."""

FINISHING = """
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
    (folder / "train.py").write_text(FINISHING)

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


@pytest.mark.parametrize(
    ("number", "codes", "count"),
    [
        ("SIGINT", {-signal.SIGINT}, 6),
        ("SIGTERM", {9}, 4),
        ("SIGALRM", {0, 1}, 4),  # whoever ends in time has no timeout: alone, the process would have been gone
    ],
)
def test_an_interrupt_or_a_handler_that_raises_while_a_capture_finishes(finished, instants, number, codes, count):
    """It was swallowed by what it happened to meet, or ended in introspect's traceback and a run that is not closed."""
    flushes = 7, 11  # of stderr and stdout, whose errors are ignored
    assert problems(finished, number, codes, [*flushes, *spread(instants, count)]) == []


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
def test_an_interrupt_at_a_thousand_instants_of_the_finish(finished, instants, part):
    """Each part goes over the whole finish, from its first instant to its last."""
    assert problems(finished, "SIGINT", {-signal.SIGINT}, spread(instants, 1000)[part::PARTS]) == []


# --- interrupts that a script catches and trains on after: each arrives, and no step is lost or mixed with another


STEPS = 40
EACH = 5  # instants further from step to step; the end of one has some 170
SCRIPT = f"""
import os, signal, sys
import torch
times, stride, gap = map(int, sys.argv[1:])
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
inside, seen, sent, came, wanted = 0, 0, 0, 0, []
def watch(frame, event, arg):
    # where python looks for signals: at a function's beginning, and after each call of one in C
    global inside, seen, sent
    if frame.f_code.co_name == "tick":
        inside += (event == "call") - (event == "return")
    if inside and event in ("call", "c_return"):
        seen += 1
        if seen in wanted:
            sent += 1
            os.kill(os.getpid(), signal.SIGINT)
for step in range({STEPS}):
    net(torch.randn(2, 4)).square().mean().backward()
    inside, seen, wanted = 0, 0, [1 + step * stride + gap * again for again in range(times)]
    if times > 1 and step % 4:
        wanted = []
    try:
        sys.setprofile(watch)
        optimizer.step()
    except KeyboardInterrupt:
        came += 1
    sys.setprofile(None)
    optimizer.zero_grad()
print(sent, came, seen)
"""


@pytest.fixture(scope="module")
def trained(forks, tmp_path_factory):
    """Runs the script, interrupted so often in each end of a step, later from step to step."""
    folder = tmp_path_factory.mktemp("interrupted")
    (folder / "train.py").write_text(SCRIPT)

    def run(times, stride=0, *options, gap=0):
        arguments = map(str, (times, stride, gap))
        done = forks("capture", "--force", "-o", f"run{times}", *options, "train.py", *arguments, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert verify_run(folder / f"run{times}").sound
        with open_run(folder / f"run{times}") as opened:
            reader = opened.rank(0)
            found = {entry.step: bytes(entry.digest) for entry in reader.steps}
        return found, [int(word) for word in done.stdout.split()]

    return run


@pytest.fixture(scope="module")
def undisturbed(trained):
    found, _ = trained(0)
    assert list(found) == list(range(STEPS))
    return found


def test_an_interrupt_in_the_end_of_a_step_arrives_and_loses_nothing(trained, undisturbed):
    found, (sent, came, seen) = trained(1, EACH)
    assert sent == came > STEPS / 2, seen
    assert found == undisturbed


def test_of_interrupts_that_come_twice_no_step_is_mixed_with_another(trained, undisturbed):
    found, (sent, came, _) = trained(2, EACH, gap=7)
    assert sent > came > STEPS / 8
    assert found.items() <= undisturbed.items()
    assert len(found) >= STEPS - STEPS / 4


def test_steps_that_are_dropped_meanwhile_are_those_that_were_asked_for(trained, undisturbed):
    found, (sent, came, _) = trained(1, EACH, "--steps", "last(5)")
    assert sent == came > STEPS / 2
    assert list(found) == list(range(STEPS))[-5:]
    assert found.items() <= undisturbed.items()

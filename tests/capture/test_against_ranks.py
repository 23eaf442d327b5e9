"""`capture --against` where several processes train one model: one of them compares, and all hear of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from launches import finish, launch

from introspect_cli.store.run import RunState, open_run
from introspect_cli.store.verify import verify_run

pytestmark = [pytest.mark.launch, pytest.mark.usefixtures("quick_python")]

TRAIN = """
import sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

fault, steps = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)
net = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for step in range(steps):
    batch = torch.randn(8, 4) * (2 if step == fault else 1)
    loss = net(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.01 * min(1.15**step, 100) * dist.get_rank() * (steps > 100))  # ended meanwhile on a busy machine too
print("end")
dist.destroy_process_group()
"""
AGENT = "from torch.distributed.run import main\nif __name__ == '__main__':\n    main()\n"
OPTIONS = ["--no-packages", "--no-env", "--against", "ref", "--stop", "--keep-around", "2", "-o", "run"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A script and its run on two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "train.py").write_text(TRAIN)
    (folder / "agent.py").write_text(AGENT)
    said = finish(launch(folder, "ref", 2, "-1", "10", script="train.py", options=["--no-packages"]))
    assert verify_run(folder / "ref").sound, said
    return folder


def started(place, *command):
    """The exit status of a command, and what it prints."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD", "MASTER"))}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=place, env={**variables, "OMP_NUM_THREADS": "1"}, text=True, capture_output=True, check=False, timeout=900,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def assert_ended_together(run, said):
    assert "First divergence at step 4, on all 2 ranks" in said
    assert "(--stop)" in said
    assert "end\n" not in said
    with open_run(run) as opened:
        assert opened.state is RunState.COMPLETE
        lengths = [len(opened.rank(rank)) for rank in opened.ranks]
        assert lengths[0] == lengths[1] < 4000
        assert opened.manifests[1]["kept_around"][0]["steps"] == [3, 4]
    assert verify_run(run).sound


def test_all_ranks_end_after_the_same_step_with_the_status_of_diff(place):
    torchrun = ("torchrun", "--standalone", "--nproc-per-node", "2")
    words = ("-m", "introspect_cli", "capture", "--force", *OPTIONS, *torchrun, "train.py", "4", "4000")
    code, said = started(place, sys.executable, *words)
    assert code == 1, said
    assert_ended_together(place / "run", said)


@pytest.mark.sweep
def test_ranks_that_do_not_diverge_end_with_success(place):
    torchrun = ("torchrun", "--standalone", "--nproc-per-node", "2")
    words = ("-m", "introspect_cli", "capture", "--force", *OPTIONS, *torchrun, "train.py", "-1", "10")
    code, said = started(place, sys.executable, *words)
    assert code == 0, said
    assert not (place / "run" / "rank0" / "divergence.jsonl").exists()

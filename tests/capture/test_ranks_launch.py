"""Several processes of one launch write one run: who makes it, who may not, and what readers say of who is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from launches import TRAINED
from logs import rewrite, without
from opcapture import captured

from introspect_cli.errors import StoreError
from introspect_cli.store.frames import END
from introspect_cli.store.run import RunState, Sources, open_run
from introspect_cli.store.verify import verify_run

pytestmark = [pytest.mark.launch, pytest.mark.usefixtures("quick_python")]

SCRIPT = """
import sys, torch
net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
if len(sys.argv) > 2:
    import os
    os._exit(9)
"""
_VARIABLES = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")


def start(folder, rank, world, *words, steps=3, after=(), options=(), **variables):
    """A rank of a launch, told so as torchrun tells it."""
    (folder / "train.py").write_text(SCRIPT)
    said = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
    said |= {"RANK": str(rank), "WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": "launch-1", **variables}
    command = [sys.executable, "-m", "introspect_cli", "capture", *options, "train.py", str(steps), *after]
    return subprocess.Popen(
        [*command, *words], cwd=folder, env=said, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(*processes):
    """Exit code and standard error of each."""
    said = []
    for process in processes:
        _, error = process.communicate()
        said.append((process.returncode, error))
    return said


def test_ranks_that_were_to_record_nothing_are_not_missed(tmp_path):
    options = ("--no-packages", "--ranks", "0", "-o", "run")
    said = ended(*(start(tmp_path, rank, 2, options=options) for rank in (0, 1)))
    assert [code for code, _ in said] == [0, 0], said
    with open_run(tmp_path / "run") as run:
        assert [len(run.rank(rank)) for rank in (0, 1)] == [3, 0]
        assert (run.last_step, run.endings, run.left_out) == (2, [], frozenset({1}))


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """A launch of four ranks, of which the second ends early, the third is killed and the fourth never starts."""
    folder = tmp_path_factory.mktemp("launched")
    options = ("-o", "run")
    said = ended(
        start(folder, 0, 4, options=options),
        start(folder, 1, 4, options=options, steps=2),
        start(folder, 2, 4, options=options, steps=1, after=("cut",)),
    )
    return folder / "run", said


def test_ranks_started_together_write_one_run(launched):
    path, said = launched
    assert [code for code, _ in said] == [0, 0, 9], said
    assert sorted(entry.name for entry in path.iterdir()) == ["manifest.json", "rank0", "rank1", "rank2"]
    with open_run(path) as run:
        assert run.ranks == (0, 1, 2)
        assert [len(run.rank(rank)) for rank in run.ranks] == [3, 2, 1]
        assert (run.world_size, run.last_step) == (4, 0)
        assert run.settings_of(1)["command"]["arguments"] != run.settings["command"]["arguments"]
    assert verify_run(path).sound


def test_a_rank_without_steps_hides_no_lost_index_of_another(tmp_path):
    said = ended(*(start(tmp_path, rank, 2, options=("-o", "run"), steps=rank) for rank in range(2)))
    assert [code for code, _ in said] == [0, 0], said
    path = tmp_path / "run"
    with open_run(path) as run:
        assert run.state is RunState.COMPLETE
    rewrite(path / "rank1", without(END))
    with open_run(path) as run:
        assert run.state is RunState.INTERRUPTED


def test_who_is_missing_is_said_and_never_silence(launched, introspect):
    path, _ = launched
    with open_run(path) as run:
        assert run.state is RunState.INTERRUPTED
        assert run.endings == [
            "Rank 3 of 4 left nothing",
            "Rank 2 of 4 was cut off after step 0",
            "Rank 1 of 4 ended with step 1, 1 step before the others",
        ]
    for verb in (("diff", path, path), ("check", path), ("show", path)):
        assert "ank 3 of 4 left nothing" in introspect(*verb).stdout, verb


def test_another_launch_does_not_write_into_a_run_that_is_there(tmp_path):
    assert ended(start(tmp_path, 0, 2, options=("-o", "run")))[0][0] == 0
    code, said = ended(start(tmp_path, 0, 2, options=("-o", "run"), TORCHELASTIC_RUN_ID="launch-2"))[0]
    assert code == 2
    assert "holds a run already" in said
    code, said = ended(start(tmp_path, 0, 2, options=("-o", "run")))[0]
    assert code == 2
    assert "rank0 holds a run already" in said
    both = [
        start(tmp_path, rank, 2, options=("--force", "-o", "run"), TORCHELASTIC_RUN_ID="launch-2") for rank in (0, 1)
    ]
    assert [code for code, _ in ended(*both)] == [0, 0]
    with open_run(tmp_path / "run") as run:
        assert run.ranks == (0, 1)
        assert run.state is RunState.COMPLETE
        assert run.endings == []


def test_a_restart_is_an_attempt_of_its_own_and_the_last_one_is_read(tmp_path):
    assert ended(start(tmp_path, 0, 2, options=("-o", "run"), steps=1, after=("cut",)))[0][0] == 9
    again = [
        start(tmp_path, rank, 2, options=("-o", "run"), steps=2, TORCHELASTIC_RESTART_COUNT="1") for rank in (0, 1)
    ]
    assert [code for code, _ in ended(*again)] == [0, 0]
    with open_run(tmp_path / "run") as run:
        assert run.ranks == (0, 1)
        assert run.last_step == 1
        assert run.endings == ["This is attempt 1 of the launch: what the one before recorded is beside it"]


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "3", "WORLD_SIZE": "2"}, None),
        ({"RANK": "x", "WORLD_SIZE": "2"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, (1, 2, 0)),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, (2, 4, None)),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, (1, 3, None)),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"}, (1, 2, 1)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, None),  # a batch script, before any srun
    ],
)
def test_a_rank_is_read_from_what_its_launcher_set(tmp_path, monkeypatch, variables, wanted):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    captured(tmp_path / "run", lambda: None)
    with open_run(tmp_path / "run") as run:
        (rank,) = run.ranks
        assert ("launch" in run.manifest) is (wanted is not None)
        found = (rank, run.world_size, run.manifests[rank]["local_rank"]) if wanted else None
    assert found == wanted


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """A launch of three ranks on two machines without a common disk; the third never started."""
    folders = [tmp_path_factory.mktemp(f"node{number}") for number in range(2)]
    said = ended(*(start(folder, rank, 3, options=("-o", "run")) for rank, folder in enumerate(folders)))
    assert [code for code, _ in said] == [0, 0], said
    return [folder / "run" for folder in folders]


def test_ranks_of_several_machines_are_copied_together(machines, tmp_path):
    for machine in machines:
        shutil.copytree(machine, tmp_path / "whole", dirs_exist_ok=True)
    with open_run(tmp_path / "whole") as run:
        assert run.ranks == (0, 1)
        assert [len(run.rank(rank)) for rank in run.ranks] == [3, 3]
        assert run.settings_of(1)["command"]
        assert set(Sources(run)) == {"train.py"}
    assert verify_run(tmp_path / "whole").sound
    other = start(tmp_path, 1, 3, options=("-o", "other"), steps=1, TORCHELASTIC_RUN_ID="launch-2")
    assert ended(other)[0][0] == 0
    shutil.copytree(tmp_path / "other", tmp_path / "whole", dirs_exist_ok=True)
    with pytest.raises(StoreError, match="it belongs to another run than the manifest"):
        open_run(tmp_path / "whole")


SPAWNS = (
    TRAINED
    + """
import sys
import torch.multiprocessing as mp

def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for _ in steps(rank, 2):
        pass
    sys.stdout.write(f"{[name for name in os.environ if name.startswith('INTROSPECT_SPAWN')]}\\n")
    dist.barrier()

if __name__ == "__main__":
    mp.spawn(main, args=(os.getcwd(),), nprocs=2)
"""
)


def test_what_the_script_spawns_together_is_one_run_of_ranks(tmp_path):
    (tmp_path / "train.py").write_text(SPAWNS)
    command = [sys.executable, "-m", "introspect_cli", "capture", "--no-packages", "--children", "all", "-o", "run"]
    done = subprocess.run([*command, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]"] * 2
    assert "recorded what the processes that the script started trained in" in done.stderr
    with open_run(tmp_path / "run") as run:
        assert (run.ranks, run.world_size, run.last_step, run.endings) == ((0, 1), 2, 1, [])
        assert run.state is RunState.COMPLETE
        means = [
            next(r.summary.stats["mean"] for r in run.rank(rank).records(0) if r.site.kind.value == "input")
            for rank in run.ranks
        ]
        assert means == [1.0, 2.0]
    assert verify_run(tmp_path / "run").sound


LATE = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""


def test_ranks_that_no_launcher_reported_are_said_to_be_missing(tmp_path, introspect):
    """A script that starts its other ranks itself, as Lightning does with `devices=2`."""
    (tmp_path / "train.py").write_text(LATE)
    done = introspect("capture", "-o", "run", "train.py")
    assert "this process is rank 1 of 4, and the other ranks are not in this run" in done.stderr
    with open_run(tmp_path / "run") as run:
        assert any(
            "use `introspect capture torchrun --nproc-per-node 4 ...`" in s for s in run.manifest["not_observed"]
        )
    said = introspect("check", "run").stdout
    assert said.startswith("nothing found (")
    assert "this process is rank 1 of 4, and the other ranks are not in this run" in said
    assert "the other ranks are not in this run" in said

"""Whole launches, by the launchers themselves: one run whichever of `introspect` and the launcher starts the other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache

import pytest
from interpreter import PYTHON
from launches import TRAINED, free_port
from opcapture import compared
from sweeps import sliced

from introspect_cli.store.run import RunState, open_run
from introspect_cli.store.verify import verify_run

pytestmark = [pytest.mark.launch, pytest.mark.usefixtures("quick_python")]

TRAIN = (
    TRAINED
    + """
import sys

def told(*names):
    return next(int(os.environ[name]) for name in names if name in os.environ)

rank = told("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
size = told("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
shared = "dies" in sys.argv or "MASTER_PORT" not in os.environ  # a port may be another's when it is asked for again
store = f"file://{os.getcwd()}/{sys.argv[1]}{attempt}" if shared else "env://"
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
for step in steps(rank, 3):
    if "dies" in sys.argv and step == rank == 1 and attempt == "0":
        os._exit(3)
dist.barrier()
dist.destroy_process_group()
"""
)
AGENT = """
from torch.distributed.run import main

if __name__ == "__main__":
    main()
"""
CAPTURE = ["-m", "introspect_cli", "capture", "--no-packages", "-o", "run", "train.py", "store"]
VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMPI_", "PMI_", "SLURM_", "TORCHELASTIC",
)  # fmt: skip


def folder_of(tmp_path_factory, name):
    folder = tmp_path_factory.mktemp(name)
    (folder / "train.py").write_text(TRAIN)
    (folder / "agent.py").write_text(AGENT)
    return folder


def start(folder, *command, **variables):
    """A process that no launcher of this test's own told anything."""
    said = {name: value for name, value in os.environ.items() if not name.startswith(VARIABLES) or name == "SLURM_CONF"}
    environment = {**said, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(*processes):
    """What each printed; all of them have to end well."""
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), said
    return said


def is_whole(path, ranks=2, steps=3):
    """Whether a run holds every step of every rank, and says that nothing is missing."""
    with open_run(path) as run:
        assert run.ranks == tuple(range(ranks))
        assert [len(run.rank(rank)) for rank in run.ranks] == [steps] * ranks
        assert (run.state, run.endings, run.world_size) == (RunState.COMPLETE, [], ranks)
    return verify_run(path).sound


def is_same(one, two):
    result = compared(one, two)
    assert (result.verdict.value, result.counts.steps_compared) == ("same", 6), result.sentence
    return True


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The folder of a launch by torchrun, by name, made when it is first asked for."""

    @cache
    def launch(name):
        folder = folder_of(tmp_path_factory, name)
        port = str(free_port())
        one = ["--standalone", "--nproc-per-node", "2"]
        nodes = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port]
        if name in {"one node", "restarted"}:
            python, more, dies = (
                (PYTHON, ["--max-restarts", "1"], ["dies"]) if name == "restarted" else (sys.executable, [], [])
            )  # the agent ends the process that is left, and a fork is not one of its own
            ended(start(folder, python, "agent.py", *one, *more, *CAPTURE, *dies))
        else:
            folders = [folder, folder] if name == "two nodes, one disk" else [folder, folder_of(tmp_path_factory, name)]
            each = (
                start(each, sys.executable, "agent.py", *nodes, "--node-rank", node, *CAPTURE)
                for node, each in enumerate(folders)
            )
            ended(*each)
            (folder / "other").symlink_to(folders[1])
        return folder

    return launch


def test_torchrun_starts_the_capture(launched):
    assert is_whole(launched("one node") / "run")


@pytest.mark.sweep
def test_the_agent_restarts_its_processes_after_one_died(launched, introspect):
    path = launched("restarted") / "run"
    with open_run(path) as run:
        assert run.ranks == (0, 1)
        assert [len(run.rank(rank)) for rank in run.ranks] == [3, 3]
        assert run.state is RunState.COMPLETE
        assert run.endings == ["This is attempt 1 of the launch: what the one before recorded is beside it"]
    assert verify_run(path).sound
    assert is_same(launched("one node") / "run", path)
    assert "attempt 1 of the launch" in introspect("check", path).stdout


@pytest.mark.sweep
def test_two_nodes_without_a_common_disk_are_copied_together(launched, tmp_path):
    folder = launched("two nodes")
    halves = [folder / "run", folder / "other" / "run"]
    for rank, half in enumerate(halves):
        with open_run(half) as run:
            assert (run.ranks, run.world_size) == ((rank,), 2)
            assert run.endings == [f"Rank {1 - rank} of 2 left nothing"]
    for half in halves:
        shutil.copytree(half, tmp_path / "whole", dirs_exist_ok=True)
    assert is_whole(tmp_path / "whole")
    assert is_same(launched("one node") / "run", tmp_path / "whole")


@pytest.mark.sweep
def test_two_nodes_with_a_common_disk_write_one_run(launched):
    path = launched("two nodes, one disk") / "run"
    assert is_whole(path)
    assert is_same(launched("one node") / "run", path)


TOLD = {
    "mpirun, Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", {"PMIX_NAMESPACE": "prterun-host-7@1"}),
    "mpirun, MPICH": ("PMI_RANK", "PMI_SIZE", {"PMI_JOBID": "kvs_7_0"}),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}),
}


@pytest.mark.parametrize("name", sliced(TOLD, ["srun"]))
def test_tasks_that_mpirun_and_srun_number_write_one_run(tmp_path_factory, launched, name):
    """By the variables alone, which are all that a capture takes from these launchers."""
    folder = folder_of(tmp_path_factory, "told")
    rank, size, job = TOLD[name]
    ended(*(start(folder, sys.executable, *CAPTURE, **job, **{rank: str(each), size: "2"}) for each in range(2)))
    assert is_whole(folder / "run")
    assert is_same(launched("one node") / "run", folder / "run")


def accelerate():
    pytest.importorskip("accelerate")
    options = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    options += ["--dynamo_backend", "no", "--main_process_port", str(free_port())]
    return [sys.executable, "-m", "accelerate.commands.launch", *options]


def srun():
    """Where a cluster of SLURM is up, be it of this machine alone."""
    words = ["srun", "-n", "2"]
    if shutil.which("srun") is None or subprocess.run([*words, "true"], check=False, timeout=60).returncode:
        pytest.skip("no SLURM")
    return [*words, sys.executable]


def mpiexec():
    if shutil.which("mpiexec") is None:
        pytest.skip("there is no mpiexec")
    return ["mpiexec", "-n", "2", sys.executable]


@pytest.mark.sweep
@pytest.mark.parametrize("starts_first", ["the launcher", "introspect"])
@pytest.mark.parametrize("launcher", [mpiexec, accelerate, srun])
def test_a_launcher_starts_the_capture_and_the_other_way_round(tmp_path_factory, launched, launcher, starts_first):
    folder, launch = folder_of(tmp_path_factory, launcher.__name__), launcher()
    is_python = launch[-1] == sys.executable
    script = CAPTURE[-2:]
    if starts_first == "the launcher":
        ended(start(folder, *launch, *CAPTURE))
    else:
        inner = launch if is_python else launch[1:]  # `-m` of a python that the capture itself has
        ended(start(folder, sys.executable, *CAPTURE[:-2], *inner, *script))
    assert is_whole(folder / "run")
    assert is_same(launched("one node") / "run", folder / "run")

"""Many captures side by side: each has a run of its own, whole; and one directory has one capture."""

import re
import subprocess
import sys

import pytest
from survival import ENVIRONMENT, HEAD

from introspect_cli.store.run import RunState, open_run
from introspect_cli.store.verify import verify_run

pytestmark = pytest.mark.usefixtures("quick_python")

CROWD = 4


def crowd(tmp_path, *options):
    """Start captures of one script at once, and wait for all: exit code, stdout, stderr of each."""
    (tmp_path / "train.py").write_text(HEAD + "print(sys.argv[1])\n")
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "introspect_cli", "capture", *options, "train.py", str(number)],
            cwd=tmp_path,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(CROWD)
    ]
    return [(process.returncode, *texts) for process in processes for texts in [process.communicate(timeout=600)]]


def test_captures_run_side_by_side(tmp_path):
    """In the default directory, where most of them begin in the same second."""
    ended = crowd(tmp_path)
    runs = set()
    for number, (code, out, err) in enumerate(ended):
        assert (code, out) == (0, f"three\n{number}\n"), err
        (name,) = re.findall(r" in (\S+)$", err.rstrip(), re.MULTILINE)
        runs.add(name)
        with open_run(tmp_path / name) as run:
            assert run.state is RunState.COMPLETE
            assert run.manifest["argv"][1:] == [str(number)]
            assert [entry.step for entry in run.rank(0).steps] == [0, 1, 2]
        assert verify_run(tmp_path / name).findings == ()
    assert len(runs) == CROWD


def test_captures_into_one_directory_do_not_mix(tmp_path):
    """One has it; all others are refused before their script starts, and leave its run as it is."""
    ended = sorted(crowd(tmp_path, "-o", "run"))
    assert [code for code, _, _ in ended] == [0] + [2] * (CROWD - 1)
    for _, out, err in ended[1:]:
        assert out == ""
        assert err.count("\n") == 1
        assert "choose another directory" in err
    with open_run(tmp_path / "run") as run:
        assert run.state is RunState.COMPLETE
        assert ended[0][1] == f"three\n{run.manifest['argv'][1]}\n"

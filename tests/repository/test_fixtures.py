"""Every fixture is a plain script: it runs under python alone, the same each time, and capturing changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweeps import sliced

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"

COMMANDS = [
    "train_gpt.py --steps 3 --dropout 0.1",
    "train_cnn.py --steps 4 --eval-every 2",
    "train_lstm.py --steps 3",
    "train_gan.py --steps 3 --penalty 1",
    "fit_lbfgs.py --steps 2",
    "train_accum.py --steps 2",
    "train_workers.py --steps 2",
    "train_rnn.py --steps 2",
    "train_outputs.py --steps 3 --container ordered",
    "train_distill.py --steps 3",
    "train_amp.py --steps 7",
    "train_checkpointed.py --steps 2 --mode reentrant",
    "train_resume.py --steps 5 --restart-at 3",
    "train_compiled.py --steps 2 --mode aot_eager",
    "train_library.py --steps 3",
    "train_byhand.py --steps 4",
    "train_rollback.py --steps 4 --back-at 2 --fault older",
    "train_unseeded.py --steps 2 --seed-all",
    "train_children.py --steps 3",
    "train_ways.py --way fast-weights",
    "perturbed.py lstm plain 2",
]

MORE = [
    "train_ways.py --way own-call",
    "train_ways.py --way methods",
    "train_ways.py --way adjoint",
    "train_ways.py --way by-name",
    "train_ways.py --way outermost",
    "train_cnn.py --steps 3 --channels-last",
    "train_cnn.py --steps 6 --fault nan-step",
    "fit_lbfgs.py --steps 2 --line-search none",
    "train_accum.py --steps 2 --optimizer nadam",
    "train_workers.py --steps 2 --start-method spawn",
    "train_workers.py --steps 2 --persistent",
    "train_workers.py --steps 2 --workers 0",
    "train_rnn.py --steps 2 --cell gru",
    "train_outputs.py --steps 2 --container dict",
    "train_outputs.py --steps 2 --container dataclass",
    "train_outputs.py --steps 2 --container namedtuple",
    "train_outputs.py --steps 2 --container none",
    "train_outputs.py --steps 2 --optimizer rprop",
    "train_distill.py --steps 2 --freeze-stem",
    "train_amp.py --steps 2 --scale 1024 --fault stale-gradients",
    "train_checkpointed.py --steps 2 --mode plain",
    "train_gan.py --steps 3 --fault spectral-norm",
    "train_compiled.py --steps 2 --mode whole",
    "train_compiled.py --steps 2 --mode script",
    "train_compiled.py --steps 2 --mode trace",
    "train_compiled.py --steps 2 --mode fx",
    "train_compiled.py --steps 2 --mode inductor",
]


KEPT = ("gpt", "gan", "lbfgs", "workers", "amp", "checkpointed", "compiled", "library", "byhand", "children", "ways")
EVERY_TIME = [command for command in COMMANDS if command.partition(".")[0].partition("_")[2] in KEPT]


@pytest.mark.parametrize("command", sliced([*COMMANDS, *MORE], EVERY_TIME))
def test_deterministic_and_unchanged_under_capture(command, tmp_path, forks):
    script, *args = command.split()
    bare = forks.python(FIXTURES / script, *args, cwd=tmp_path)
    assert bare.returncode == 0, bare.stderr
    assert "loss" in bare.stdout or "discriminator" in bare.stdout

    # That it says the same under capture shows both: that capturing changes nothing, and that it repeats itself.
    watched = forks("capture", "-q", "-o", "run", str(FIXTURES / script), *args, cwd=tmp_path)
    assert watched.returncode == 0
    assert watched.stdout == bare.stdout
    assert watched.stderr == bare.stderr
    assert (tmp_path / "run" / "manifest.json").exists()


def test_no_line_of_a_fixture_knows_the_tool():
    assert [path.name for path in FIXTURES.glob("*.py") if "introspect" in path.read_text(encoding="utf-8")] == []


def test_every_fixture_is_run():
    named = {command.split()[0] for command in COMMANDS}
    on_a_gpu = {"train_gpu.py"}  # of `cases_gpu.yaml`
    assert named | on_a_gpu == {path.name for path in FIXTURES.glob("*.py")}

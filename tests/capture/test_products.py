"""What a script saves is on record tensor by tensor, and two runs whose checkpoints differ are not the same."""

from __future__ import annotations

import hashlib

import pytest

SCRIPT = """
import copy, io, sys
import torch
from safetensors.torch import save_file
from torch import nn

told = sys.argv[1:]
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
average = copy.deepcopy(net)
decay = 0.8 if "decay" in told else 0.9
optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    net(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        for mean, parameter in zip(average.parameters(), net.parameters()):
            mean.lerp_(parameter, 1 - decay)
    if step % 2 and "silent" not in told:
        held = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "average": average.state_dict()}
        if "lacks" in told:
            del held["average"]["0.bias"]
        torch.save({**held, "rng_state": torch.get_rng_state(), "step": step}, f"checkpoint-{step}.pt")
if "silent" not in told:
    torch.save(average, "whole.pt")
    save_file({"weight": average[0].weight.detach() * (2 if "doubled" in told else 1)}, "average.safetensors")
    buffer = io.BytesIO()
    torch.save(net.state_dict(), buffer)
    try:
        torch.save(lambda: 0, "never.pt")
    except Exception as error:
        print(type(error).__name__, torch.save.__name__, len(buffer.getvalue()))
"""


@pytest.fixture(scope="module")
def captured(tmp_path_factory, forks):
    """Directories by what the script was told, each with its run."""
    made = {}

    def capture(*answered, options=()):
        if (answered, options) not in made:
            folder = made[answered, options] = tmp_path_factory.mktemp("products")
            (folder / "train.py").write_text(SCRIPT)
            run = forks("capture", "-q", *options, "-o", "run", "train.py", *answered, cwd=folder)
            assert run.returncode == 0, run.stderr
        return made[answered, options]

    return capture


def answer(introspect, a, b, *options):
    return introspect("diff", a / "run", b / "run", *options)


def test_an_average_is_compared_where_parameters_were_not_recorded(captured, introspect):
    lean = {"options": ("--record", "loss,product")}
    found = answer(introspect, captured(**lean), captured("decay", **lean))
    assert found.returncode == 1
    assert "checkpoint-#.pt, relative L2" in found.stdout.splitlines()[0]
    assert "every tensor that requires gradients" in found.stdout.partition("  unseen")[2].splitlines()[0]


def test_what_is_saved_after_the_last_step_is_compared(captured, introspect):
    found = answer(introspect, captured(), captured("doubled"))
    assert found.returncode == 1
    assert "the saved tensor ['weight'] of average.safetensors, relative L2" in found.stdout


def test_what_is_saved_in_steps_that_are_not_recorded_is_not_called_equal(captured, introspect):
    """Checkpoints are saved after steps 1 and 3, so as a part of steps 2 and 4; the first differs."""
    lean = {"options": ("--steps", "0,1,4")}
    for other in (captured(**lean), captured("lacks", **lean)):
        found = answer(introspect, captured(**lean), other)
        said = " ".join(found.stdout.split())
        assert (
            "Neither run could see everything: what was saved as checkpoint-#.pt in steps that are not recorded" in said
        )
        assert "average.safetensors in steps" not in said
    found = answer(introspect, captured("silent", **lean), captured("lacks", **lean))
    assert "Run b could not see everything: what was saved as checkpoint-#.pt in steps" in " ".join(
        found.stdout.split()
    )
    found = answer(introspect, captured(), captured("silent"))
    assert "could not see everything: what was saved" not in found.stdout


KEPT = """
import copy
import torch
from torch import nn

class Shadow:
    def __init__(self, net):
        self.shadow = {name: one.detach().clone() for name, one in net.named_parameters()}

def main():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    initial, loaded = copy.deepcopy(net), {name: one.clone() for name, one in net.state_dict().items()}
    kept = Shadow(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        net(torch.randn(4, 4)).square().mean().backward()
        optimizer.step()
        for name, one in net.named_parameters():
            kept.shadow[name] = kept.shadow[name] * 0.9 + one.detach() * 0.1

main()
"""


def test_copies_that_never_change_are_not_recorded(introspect, tmp_path):
    (tmp_path / "train.py").write_text(KEPT)
    assert introspect("capture", "-q", "-o", "run", "train.py").returncode == 0
    shown = introspect("show", "step", "5", "run", "--kinds", "product").stdout
    assert "kept.shadow" in shown
    assert "initial" not in shown
    assert "loaded" not in shown


def test_files_and_what_is_printed_are_those_of_python_alone(captured, tmp_path, forks):
    (tmp_path / "train.py").write_text(SCRIPT)
    bare = forks.python("train.py", cwd=tmp_path)
    assert bare.stdout.startswith(("PicklingError save ", "AttributeError save "))
    names = sorted(path.name for path in tmp_path.iterdir() if path.suffix in {".pt", ".safetensors"})
    assert len(names) >= 4
    for name in names:
        one, two = (hashlib.sha256((folder / name).read_bytes()).hexdigest() for folder in (tmp_path, captured()))
        assert one == two, name


def test_random_states_in_a_checkpoint_are_no_product(captured, introspect):
    shown = introspect("show", "step", "2", captured() / "run", "--kinds", "product").stdout
    assert "['average']['0.weight']" in shown
    assert "rng_state" not in shown

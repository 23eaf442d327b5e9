"""What a resumed run did not restore, part by part: a plain loop that leaves out each part, and some in pairs."""

from __future__ import annotations

import copy
import json
import random
from itertools import product

import numpy as np
import pytest
import torch
from opcapture import captured, compared
from sweeps import sliced
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from introspect_cli.compare.terms.findings import Restored
from introspect_cli.compare.terms.result import Verdict
from introspect_cli.records import Kind
from introspect_cli.schedule.rules import Schedule

EPOCH, STEPS = 4, 9
OPTIMIZER, RATES, PLACE = "optimizer state", "learning rates and schedulers", "place in the data"
RANDOM = {"random state of numpy", "random state of python", "random state of torch"}

LOST = {
    "nothing": set(),
    "params": {"parameters"},
    "buffers": {"buffers"},
    "optimizer": {OPTIMIZER, RATES},  # a rate stands in the optimizer's groups
    "schedule": {RATES},
    "rng": RANDOM,
    "place": {PLACE},
    "optimizer+rng": {OPTIMIZER, RATES, *RANDOM},
    "optimizer+place": {OPTIMIZER, RATES, PLACE},
    "schedule+rng": {RATES, *RANDOM},
    "buffers+optimizer": {"buffers", OPTIMIZER, RATES},
    "params+buffers": {"parameters", "buffers"},
}
"""What the script leaves out of its checkpoint, and the parts that the answer names."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(4, 6),
            nn.BatchNorm1d(6),
            nn.Dropout(0.2),
            nn.Linear(6, 1),
        )

    def forward(self, x):
        return self.last(self.drop(self.norm(torch.tanh(self.first(x)))))


def train(checkpoint=None, lose=(), at=None, shuffle=False, workers=0, momentum=False, save=None):
    """A loop as people write it: it skips the batches of an epoch that came before the checkpoint."""
    random.seed(1)
    np.random.seed(2)  # noqa: NPY002 - its global state is a part of a checkpoint
    torch.manual_seed(3)
    source = torch.Generator().manual_seed(4)
    data = TensorDataset(torch.randn(EPOCH * 3, 4, generator=source), torch.randn(EPOCH * 3, 1, generator=source))
    net = Net()
    if momentum:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 20)
    order = torch.Generator().manual_seed(5)
    loader = DataLoader(data, batch_size=3, shuffle=shuffle, num_workers=workers, generator=order)
    done = skip = 0
    kept = None
    if checkpoint is not None:
        kept = torch.load(checkpoint, weights_only=False)
        net.load_state_dict(_without(kept["model"], net.state_dict(), lose))
        if "optimizer" not in lose:
            optimizer.load_state_dict(kept["optimizer"])
        if "schedule" not in lose:
            schedule.load_state_dict(kept["schedule"])
        elif "optimizer" not in lose:
            for group in optimizer.param_groups:
                group["lr"] = 0.05
        if "place" not in lose:
            order.set_state(kept["order"])
            skip = kept["done"] % EPOCH
        done = kept["done"]
    end = at or STEPS
    while done < end:
        began = order.get_state()
        for number, (x, y) in enumerate(loader):
            if number < skip:
                continue
            if kept is not None and "rng" not in lose:
                torch.set_rng_state(kept["torch"])
                random.setstate(kept["python"])
                np.random.set_state(kept["numpy"])  # noqa: NPY002 - as above
            kept = None
            optimizer.zero_grad()
            (net(x) - y).square().mean().backward()
            optimizer.step()
            schedule.step()
            random.random()
            np.random.rand()  # noqa: NPY002 - as above
            done += 1
            if done == end and number + 1 < EPOCH:  # a sampler draws once more when an epoch ends
                break
        skip = 0
    if save is not None:
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        state |= {"done": done, "order": began if done % EPOCH else order.get_state(), "torch": torch.get_rng_state()}
        torch.save(state | {"python": random.getstate(), "numpy": np.random.get_state()}, save)  # noqa: NPY002 - as above


def _without(state, fresh, lose):
    """The model's state, of what is to be lost as it is in a new model."""
    buffers = {name for name in state if "running" in name or "num_batches" in name}
    left = (buffers if "buffers" in lose else set()) | (state.keys() - buffers if "params" in lose else set())
    return {name: fresh[name].clone() if name in left else value for name, value in state.items()}


def recorded(path, work, **options):
    """A capture as in a process of its own, where the generators begin in another state than training leaves them."""
    random.seed(99)
    np.random.seed(99)  # noqa: NPY002 - as above
    return captured(path, work, **options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The run that was not interrupted and the checkpoint, made once for each kind of loop."""
    made, folder = {}, tmp_path_factory.mktemp("resumed")

    def get(at, **loop):
        key = json.dumps([at, loop], sort_keys=True)
        if key not in made:
            name = str(len(made))
            train(at=at, save=folder / f"{name}.pt", **loop)
            made[key] = recorded(folder / name, lambda: train(**loop)), folder / f"{name}.pt"
        return made[key]

    return get


EVERY_2 = Schedule.parse("::2")


def resume(runs, path, lose="nothing", at=6, record=None, **loop):
    """The run that was not interrupted, and one that goes on from its checkpoint without some parts."""
    whole, checkpoint = runs(at, **loop)
    options = {} if record is None else {"record": frozenset(record)}
    resumed = recorded(path / "resumed", lambda: train(checkpoint, lose.split("+"), **loop), **options)
    return whole, resumed


def lost(result):
    return {part.part for part in result.resumed.lost}


LOOPS = [
    {"at": at, "shuffle": shuffle, "workers": workers, "momentum": momentum}
    for at, shuffle, workers, momentum in product((4, 6), (False, True), (0, 2), (False, True))
]
CASES = [(name, *loop.values()) for name in LOST for loop in LOOPS]
KEPT = [
    *((name, 6, True, 0, False) for name in LOST),
    ("nothing", 4, True, 0, True),
    ("nothing", 6, False, 0, True),
    ("optimizer", 4, False, 0, True),
    ("nothing", 6, True, 2, False),
]
"""The widest is the sweep's: between epochs and within one, shuffled or not, with workers or without."""


@pytest.mark.parametrize(("lose", "at", "shuffle", "workers", "momentum"), sliced(CASES, KEPT))
def test_the_answer_names_what_was_not_restored_and_nothing_else(runs, tmp_path, lose, at, shuffle, workers, momentum):
    loop = {"shuffle": shuffle, "workers": workers, "momentum": momentum}
    result = compared(*resume(runs, tmp_path, lose, at, **loop))
    expected = LOST[lose] - ({PLACE} if at == EPOCH and not shuffle else set())  # an epoch begins with the same batch
    if "place" in lose:  # the loader draws the order of the data from it
        expected |= lost(result) & {"random state of torch.Generator order"}
    assert (result.resumed.run, result.resumed.at, result.resumed.first) == ("b", at, 0)
    assert lost(result) == expected, result.sentence
    if not expected:
        assert result.verdict is Verdict.SAME, result.sentence
        assert result.sentence.startswith(
            f"Resumed correctly: run b restored all that is on record of step {at - 1} of a."
        )
        return
    assert result.verdict is Verdict.DIVERGED, result.sentence
    assert result.sentence.startswith(f"Run b, resumed after step {at - 1} of a, did not restore the ")
    assert (result.first.step, result.first.step_b) == (at, 0)
    assert {origin.part for origin in result.origins if origin.part} == expected
    assert result.origins[0].divergence is result.first


LEAN = {Kind.PARAM, Kind.GRAD, Kind.LOSS}


@pytest.mark.parametrize("lose", ["nothing", "optimizer"])
def test_what_was_not_recorded_is_not_called_restored(runs, tmp_path, lose):
    """A lean capture has neither optimizer states nor random states; that the run is resumed says what it read."""
    whole, resumed = resume(runs, tmp_path, lose, record=LEAN)
    result = compared(whole, resumed)
    states = {part.part: part.state for part in result.resumed.parts}
    for part in (OPTIMIZER, "random states", "buffers", PLACE):
        assert states[part] is Restored.UNSEEN, part
    assert states["parameters"] is Restored.YES
    assert result.verdict is (Verdict.DIVERGED if lose == "optimizer" else Verdict.SAME), result.sentence
    assert "buffers, optimizer state, learning rates and schedulers and 2 more were not recorded." in result.sentence


def test_a_step_that_makes_room_for_a_distributed_checkpoint_is_none_of_the_training(tmp_path):
    """`get_state_dict` steps a new optimizer with gradients and a learning rate of 0."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    def work(*, room):
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(net.parameters())
        if room:
            state = get_state_dict(net, optimizer)[1]
            assert {float(state["state"][name]["step"]) for name in ("weight", "bias")} == {1}
        for _ in range(2):
            net(torch.ones(3, 4)).sum().backward()
            optimizer.step()

    run = recorded(tmp_path / "b", lambda: work(room=True), record=frozenset(LEAN))
    assert compared(recorded(tmp_path / "a", lambda: work(room=False), record=frozenset(LEAN)), run).counts.steps_b == 2


def test_a_state_without_a_counter_that_is_not_there_is_named(runs, tmp_path):
    """The learning rate, which is lost with it, is not the only cause."""
    result = compared(*resume(runs, tmp_path, "optimizer", momentum=True))
    assert "the optimizer state of b started from scratch (it begins without momentum_buffer)" in result.sentence


@pytest.mark.parametrize(("lose", "both"), [("nothing", True), ("nothing", False), ("optimizer", True)])
def test_sampled_steps_are_enough(runs, tmp_path, lose, both):
    """The step before is not on record: what either step begins with is, since it was taken up again there."""
    whole, checkpoint = runs(6, shuffle=True)
    if both:
        whole = recorded(tmp_path / "whole", lambda: train(shuffle=True), steps=EVERY_2)
    resumed = recorded(tmp_path / "b", lambda: train(checkpoint, lose.split("+"), shuffle=True), steps=EVERY_2)
    result = compared(whole, resumed)
    assert (result.resumed.run, result.resumed.at) == ("b", 6)
    assert lost(result) == LOST[lose]
    assert result.verdict is (Verdict.SAME if lose == "nothing" else Verdict.DIVERGED), result.sentence


def scaled(kept=None, *, lose=(), end=8):
    """A loop with a gradient scaler, whose scale grows every second step; what it ends with."""
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    source = torch.Generator().manual_seed(1)
    batches = torch.randn(end, 5, 4, generator=source)
    first = 0
    if kept is not None:
        first = kept["done"]
        if "params" not in lose:
            net.load_state_dict(kept["model"])
        if "optimizer" not in lose:
            optimizer.load_state_dict(kept["optimizer"])
        if "scaler" not in lose:
            scaler.load_state_dict(kept["scaler"])
    for batch in batches[first:]:
        optimizer.zero_grad()
        scaler.scale(net(batch).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(), "done": end}
    return copy.deepcopy(state)


@pytest.mark.parametrize(
    ("lose", "named"),
    [
        ((), set()),
        (("scaler",), {"scaler"}),
        (("scaler", "optimizer"), {"scaler", OPTIMIZER}),
        (("scaler", "params"), {"scaler", "parameters"}),
    ],
)
def test_the_scale_of_a_gradient_scaler_is_a_part(tmp_path, lose, named):
    whole = recorded(tmp_path / "whole", scaled)
    kept = scaled(end=4)
    torch.save(kept, tmp_path / "kept.pt")
    resumed = recorded(tmp_path / "resumed", lambda: scaled(torch.load(tmp_path / "kept.pt"), lose=lose))
    result = compared(whole, resumed)
    part = next(part for part in result.resumed.parts if part.part == "scaler")
    assert part.state is (Restored.NO if lose else Restored.YES)
    assert part.text == ("scale 32 -> 8" if lose else "scale 32")
    assert lost(result) == named, result.sentence


def averaged(kept=None, *, lose=False, end=6):
    """A loop that evaluates an averaged copy of its model in each step; what it ends with."""
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    batches = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(1))[:end]
    first = 0
    if kept is not None:
        first = kept["done"]
        net.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        if not lose:
            average.load_state_dict(kept["average"])
    for batch in batches[first:]:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
        average.update_parameters(net)
        with torch.no_grad():
            average(batch)
    state = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "average": average.state_dict(),
        "done": end,
    }
    return copy.deepcopy(state | {"done": end})


@pytest.mark.parametrize("lose", [False, True])
def test_an_averaged_copy_is_a_part_where_it_is_on_record(tmp_path, lose):
    whole = recorded(tmp_path / "whole", averaged, eval=True)
    kept = averaged(end=3)
    result = compared(whole, recorded(tmp_path / "resumed", lambda: averaged(kept, lose=lose), eval=True))
    part = next(part for part in result.resumed.parts if part.part == "averaged copies")
    assert part.state is (Restored.NO if lose else Restored.YES), part
    assert ("averaged copies" in result.sentence) is lose


READS = """
import sys
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
first = int(sys.argv[2])
if first:
    loaded = load_file(sys.argv[1]) if sys.argv[1].endswith("safetensors") else np.load(sys.argv[1])
    kept = {name: torch.as_tensor(loaded[name]) for name in net.state_dict()}
    net.load_state_dict({name: value + 1 for name, value in kept.items()} if "lose" in sys.argv else kept)
for step in range(first, 6):
    if step == 3 and not first:
        save_file(net.state_dict(), "weights.safetensors")
        np.savez("weights.npz", **net.state_dict())
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def reads(tmp_path_factory, forks):
    """Captures of a loop whose checkpoint no `torch.load` reads."""
    folder = tmp_path_factory.mktemp("reads")
    (folder / "train.py").write_text(READS)

    def run(name, *words, options=()):
        command = ["capture", "-q", "--no-packages", "--no-env", *options, "-o", name, "train.py", *words]
        done = forks(*command, cwd=folder)
        assert done.returncode == 0, done.stderr
        return folder / name

    run("whole", "-", "0")
    return run, folder / "whole"


@pytest.mark.parametrize("file", ["weights.safetensors", "weights.npz"])
def test_a_run_that_reads_weights_without_torch_load_is_known_as_resumed(reads, file):
    run, whole = reads
    result = compared(whole, run(file.partition(".")[2], file, "3"))
    assert (result.resumed.at, result.verdict) == (3, Verdict.SAME), result.sentence
    assert result.sentence.startswith("Resumed correctly: run b restored all that is on record of step 2 of a.")


def test_a_run_that_alone_reads_weights_and_begins_with_none_of_the_others_says_how_to_set_it_beside(reads):
    run, whole = reads
    lost = run("lost", "weights.safetensors", "3", "lose")
    said = "Run {0} alone reads weights.safetensors. If it continues run {1}, say after which step: --offset {2}K "
    for a, b, words in ((whole, lost, "ba"), (lost, whole, "ab")):
        result = compared(a, b)
        assert result.resumed is None
        begins = said.format(*words, "-" * (words == "ab"))
        assert any(note.startswith(begins) for note in result.notes), result.notes
    assert compared(whole, lost, offset=3).resumed.lost[0].part == "parameters"
    assert compared(lost, whole, offset=-3).resumed.lost[0].part == "parameters"

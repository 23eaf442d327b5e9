"""Resumed runs of transformers' Trainer, Lightning and accelerate: restored right, and without each part and pair."""

from __future__ import annotations

import importlib.util
import shutil
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from artefacts import artefact
from opcapture import compared
from safetensors.torch import load_file, save_file
from sweeps import sliced

from introspect_cli.compare.result import Restored, Verdict

SCRIPT = Path(__file__).parents[2] / "fixtures" / "resumed" / "frameworks.py"
LIBRARIES = {"trainer": "transformers", "lightning": "lightning", "accelerate": "accelerate"}
EPOCH = 6
QUICK = ("--no-packages", "--no-env", "--quiet")
OPTIMIZER, RATES, PLACE = "optimizer state", "learning rates and schedulers", "place in the data"
TORCH = "random state of torch"
LOADERS = {f"random state of torch.Generator {name}" for name in ("self.generator", "order")}
PARTS = {"params": "parameters", "optimizer": OPTIMIZER, "schedule": RATES, "rng": TORCH, "place": PLACE}


def lose(framework, place, parts):
    """Take parts out of a checkpoint, or put in their place what a new run has."""
    if "params" in parts:
        torch.manual_seed(99)
    if framework == "lightning":
        kept = torch.load(place, weights_only=False)
        if "params" in parts:
            kept["state_dict"] = {name: torch.randn_like(value) for name, value in kept["state_dict"].items()}
        if "optimizer" in parts:
            kept["optimizer_states"][0]["state"] = {}
        if "schedule" in parts:
            kept["lr_schedulers"][0] |= {"last_epoch": 0, "_step_count": 1}
        if "place" in parts:
            del kept["loops"]["fit_loop"]["state_dict"]["combined_loader"]
        torch.save(kept, place)
        return
    optimizer, schedule, rng = (
        ("optimizer.pt", "scheduler.pt", "rng_state.pth")
        if framework == "trainer"
        else ("optimizer.bin", "scheduler.bin", "random_states_0.pkl")
    )
    if "params" in parts:
        weights = load_file(place / "model.safetensors")
        weights = {name: torch.randn_like(value) for name, value in weights.items()}
        save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    if "schedule" in parts:
        state = torch.load(place / schedule, weights_only=False)
        torch.save(state | {"last_epoch": 0, "_step_count": 1}, place / schedule)
    if "optimizer" in parts and framework == "trainer":
        (place / optimizer).unlink()
    elif "optimizer" in parts:
        torch.save(torch.load(place / optimizer, weights_only=False) | {"state": {}}, place / optimizer)
    if "rng" in parts:
        (place / rng).unlink()


@pytest.fixture(scope="module")
def forks():
    """As everywhere, with the frameworks imported."""
    from forks import Forks

    names = [name for name in LIBRARIES.values() if importlib.util.find_spec(name)]
    run = Forks(f"import {', '.join(names)}\n" if names else "")
    yield run
    run.close()


@pytest.fixture(scope="module")
def resume(forks):
    """Compare a run that was not interrupted with one that goes on from its checkpoint, without some parts."""

    def capture(framework, words, before=lambda place: ()):
        def made(place):
            command = ["capture", *QUICK, "-o", "run", SCRIPT, framework, place / "saved", *words, *before(place)]
            done = forks(*map(str, command), cwd=place)
            assert done.returncode == 0, done.stderr

        return artefact("resumed", made)

    def resumed(framework, parts=(), at=4, *, shuffle=True, workers=0):
        pytest.importorskip(LIBRARIES[framework])
        loop = [*["--shuffle"] * shuffle, "--workers", workers]
        whole = capture(framework, loop)
        saved = f"step={at}.ckpt" if framework == "lightning" else f"checkpoint-{at}"

        def with_less(place):
            begins = place / "from" / saved
            begins.parent.mkdir()
            copy = shutil.copytree if framework != "lightning" else shutil.copy2
            copy(whole / "saved" / saved, begins)
            lose(framework, begins, parts)
            return ["--resume", begins, *(word for part in parts for word in ("--lose", part))]

        return compared(whole / "run", capture(framework, loop, with_less) / "run")

    return resumed


def lost(result):
    return {part.part for part in result.resumed.lost}


def expected(framework, parts, at, *, shuffle):
    """The parts that the answer names."""
    named = {PARTS[part] for part in parts}
    if framework == "trainer" and "optimizer" in parts:
        named |= {RATES}  # it loads neither without the other
    if framework == "trainer" and "place" in parts and at % EPOCH:
        named |= {TORCH}  # it restores the random states when it has skipped the batches before
    begins = at % EPOCH == 0 and (framework == "trainer" or not shuffle)  # the Trainer seeds each epoch by its number
    return named - ({PLACE} if begins else set())


LOST = [(), *((part,) for part in PARTS), *combinations(PARTS, 2)]
CASES = list(product(LIBRARIES, LOST, (4, EPOCH), (True, False), (0, 2)))
KEPT = [
    *((framework, (), 4, True, 0) for framework in LIBRARIES),
    ("trainer", ("optimizer", "rng"), 4, True, 0),
    ("lightning", ("params", "place"), EPOCH, True, 0),
    ("accelerate", ("optimizer", "place"), 4, True, 0),
    ("accelerate", ("schedule", "rng"), 4, True, 0),
]
"""The widest is the sweep's: each part and pair, within an epoch and between two, shuffled or not, workers or none."""


@pytest.mark.parametrize(("framework", "parts", "at", "shuffle", "workers"), sliced(CASES, KEPT))
def test_the_answer_names_what_a_framework_did_not_restore(resume, framework, parts, at, shuffle, workers):
    result = resume(framework, parts, at, shuffle=shuffle, workers=workers)
    if framework == "accelerate" and {"params", "optimizer"} <= {*parts}:  # nothing says where it goes on
        assert result.resumed is None
        return
    assert (result.resumed.run, result.resumed.at, result.resumed.first) == ("b", at, 0)
    missing = expected(framework, parts, at, shuffle=shuffle)
    drawn = lost(result) & LOADERS if "place" in parts else set()  # the loader draws a seed from it in any case
    assert lost(result) == missing | drawn, result.sentence
    if drawn and not missing:
        assert result.verdict is Verdict.SAME, result.sentence
        return
    missing |= drawn
    if missing:
        assert result.verdict is Verdict.DIVERGED, result.sentence
        assert result.sentence.startswith(f"Run b, resumed after step {at - 1} of a, did not restore: ")
        assert {origin.part for origin in result.origins if origin.part} == missing
        assert result.origins[0].divergence is result.first
        return
    assert result.verdict is Verdict.SAME, result.sentence
    assert "restored all that is on record" in result.sentence, result.sentence
    found = {part.part: part.state for part in result.resumed.parts}
    assert all(found[part] is Restored.YES for part in PARTS.values()), found

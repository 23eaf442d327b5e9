"""Trains twice in one process, bare and under capture, and holds the two against each other bit by bit."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import keystr, tree_leaves_with_path

from introspect_cli.capture.options import CaptureOptions
from introspect_cli.capture.session import Session
from introspect_cli.records import Record, Status
from introspect_cli.script.ending import Ending
from introspect_cli.store.run import Run, open_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Train = Callable[["Log"], Any]


def bits(tensor: torch.Tensor) -> str:
    """A tensor's dtype, layout and data, hashed."""
    tensor = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.is_quantized:
        parts = [tensor.int_repr(), tensor.dequantize()]
    else:
        parts = [tensor]
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        flat = part.resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        strides = part.stride() if part.layout == torch.strided else ()
        digest.update(f"{part.dtype}{tuple(part.shape)}{strides}".encode() + data)
    return digest.hexdigest()


def generator_states() -> dict[str, str]:
    """The states of python's, numpy's and torch's generators."""
    return {
        "rng python": hashlib.blake2b(repr(random.getstate()).encode(), digest_size=8).hexdigest(),
        "rng numpy": hashlib.blake2b(np.random.get_state()[1].tobytes(), digest_size=8).hexdigest(),  # noqa: NPY002 - the global one is what scripts use
        "rng torch": bits(torch.get_rng_state()),
    }


class Log:
    """What a training is seen to compute: call it after every step with whatever it has."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, str]] = []
        self.losses: list[float] = []
        self._lock = threading.Lock()

    def __call__(self, *things: Any) -> None:
        with self._lock, torch.no_grad():
            for number, thing in enumerate(things):
                self._add(f"{len(self.entries)} {number}", thing)
            self.entries += generator_states().items()

    def loss(self, value: torch.Tensor) -> torch.Tensor:
        """Note a loss, and return it."""
        self.losses.append(float(value.detach()))
        return value

    def _add(self, where: str, thing: Any) -> None:
        if isinstance(thing, nn.Module):
            for name, parameter in thing.named_parameters():
                self._add(f"{where} {name}", parameter.data)
                if parameter.grad is not None:
                    self._add(f"{where} {name}.grad", parameter.grad)
            for name, buffer in thing.named_buffers():
                self._add(f"{where} {name}", buffer)
        elif isinstance(thing, torch.optim.Optimizer):
            for group in thing.param_groups:
                for parameter in group["params"]:
                    self._add(f"{where} state", dict(thing.state.get(parameter, {})))
            self.entries.append((f"{where} entries", str(len(thing.state))))
        elif isinstance(thing, torch.Tensor):
            self.entries.append((where, bits(thing)))
        else:
            for path, leaf in tree_leaves_with_path(thing):
                value = bits(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf)
                self.entries.append((where + keystr(path), value))


@dataclass(frozen=True)
class Trajectory:
    """One training, as seen from outside."""

    entries: list[tuple[str, str]]
    losses: list[float]
    warned: list[tuple[str, str, int]]
    returned: Any


def trajectory(train: Train) -> Trajectory:
    """Run a training from fixed seeds."""
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002 - as above
    torch.manual_seed(7)
    log = Log()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        returned = train(log)
    log()
    caught = [item for item in caught if "Python 3.13.0" not in str(item.message)]  # there torch warns of each guard
    warned = [(item.category.__name__, str(item.message), item.lineno) for item in caught]
    return Trajectory(log.entries, log.losses, warned, returned)


@contextlib.contextmanager
def watched(path: Path, **options: Any) -> Iterator[Session]:
    """Capture whatever runs inside, in this process."""
    settings: dict[str, Any] = {"env": False, "packages": False, "source": False, "quiet": True}
    session = Session(None, CaptureOptions(output=path, **{**settings, **options}))
    session.start()
    try:
        yield session
    finally:
        session.finish(Ending(0, "returned"))


def assert_neutral(train: Train, path: Path, **options: Any) -> Seen:
    """Assert that a training computes the same bits under capture, and that no probe failed; what was recorded."""
    bare = trajectory(train)
    with watched(path, **options) as session:
        seen = trajectory(train)
    assert session._guard.details == [], "\n".join(session._guard.details)
    assert session._guard.sentences == [], session._guard.sentences
    if bare.warned != seen.warned:  # some warnings come once in a process, so the first training has them all
        bare = trajectory(train)
    assert_same(bare, seen)
    return Seen(path, seen)


def assert_same(bare: Trajectory, seen: Trajectory) -> None:
    """Assert that two trainings are equal, naming the first thing in which they are not."""
    for number, (one, other) in enumerate(zip(bare.entries, seen.entries, strict=False)):
        assert one == other, f"entry {number} of {len(bare.entries)}: {one} is {other} under capture"
    assert len(bare.entries) == len(seen.entries)
    assert repr(bare.losses) == repr(seen.losses)
    assert bare.warned == seen.warned, f"{bare.warned} are {seen.warned} under capture"


class Seen:
    """What a capture recorded, in a form that tests ask questions of."""

    def __init__(self, path: Path, trained: Trajectory | None = None) -> None:
        self.trained = trained
        self.modules: list[str] = []
        self.steps: dict[int, list[Record]] = {}
        with open_run(path) as run:
            self.manifest = run.manifest
            self._read(run)

    def _read(self, run: Run) -> None:
        assert run.ranks == (0,)
        reader = run.rank(0)
        self.modules = [info.fqn for info in reader.modules]
        for entry in reader.steps:
            self.steps[entry.step] = list(reader.records(entry.step))

    @property
    def records(self) -> list[Record]:
        return [record for records in self.steps.values() for record in records]

    def of(
        self, kind: str, fqn: str | None = None, *, step: int | None = None, phase: str | None = None
    ) -> list[Record]:
        """Records of one kind, narrowed."""
        return [
            record
            for record in (self.records if step is None else self.steps[step])
            if record.site.kind == kind
            and (fqn is None or record.site.fqn == fqn)
            and (phase is None or record.site.phase == phase)
        ]

    def calls(self, kind: str, fqn: str, **narrow: Any) -> list[int]:
        """Call indices under which a module's values were recorded, first call first."""
        return [record.site.call for record in self.of(kind, fqn, **narrow)]

    def repeated(self) -> list[str]:
        """Sites recorded twice in one step (the second time under a name of its own)."""
        twice = [str(record.site) for record in self.records if "@" in record.site.path]
        for step, records in self.steps.items():
            twice += [f"{step} {site}" for site, count in Counter(r.site for r in records).items() if count > 1]
        return twice

    def unseen(self) -> dict[str, str]:
        """FQNs recorded as not observed, and why."""
        return {r.site.fqn: r.summary.text for r in self.records if r.summary.status is Status.NOT_OBSERVED}

    def assert_losses(self) -> None:
        """Every loss the training noted is on record with that value, in that order."""
        found = [record.summary.stats["mean"] for record in self.of("loss")]
        assert self.trained is not None
        assert found == self.trained.losses


def mlp(width: int = 8) -> nn.Sequential:
    """A small model."""
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


def subnormals_kept() -> bool:
    """Whether the processor, in this thread, still computes with subnormal numbers."""
    tiny = torch.tensor([2.0**-126], dtype=torch.float32)
    plain = sys.float_info.min
    return bool((tiny / 2).item() != 0) and plain / 2 != 0 and bool(np.float32(2.0**-126) / np.float32(2) != 0)

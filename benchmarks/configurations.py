"""The ways a run is captured and compared beside the default, and runs reduced to what such a capture records.

The tool's pages recommend lean records, sampled steps and tolerances, and its answers were only ever measured without
them. Capturing every planted fault under each of them anew would take hours, and most of these captures record less
of the same training: their runs are made from a full one, by dropping kinds and statistics from it
(`tests/compare/test_decisions.py` shows that the answer is that of a real capture). What changes the training or the
order of what is recorded is captured for real.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.records import SETTING_KINDS, Kind
from introspect_cli.schedule.rules import Schedule
from introspect_cli.store.batch import rows_of
from introspect_cli.store.run import open_run
from introspect_cli.store.run_writer import StoreWriter

if TYPE_CHECKING:
    from pathlib import Path

    from introspect_cli.store.batch import StepBatch


@dataclass(frozen=True)
class Reduction:
    """What of a full run is kept.

    Attributes:
        record: kinds, as for `capture --record`; all where empty.
        measured: whether statistics and sketches are kept beside the checksums.
    """

    record: tuple[str, ...] = ()
    measured: bool = True

    @property
    def options(self) -> tuple[str, ...]:
        """The options of a capture that records the same."""
        words: tuple[str, ...] = ()
        words += ("--record", ",".join(self.record)) if self.record else ()
        return words + (() if self.measured else ("--stats", "none", "--no-sketch"))


@dataclass(frozen=True)
class Configuration:
    """One column of the matrix.

    Attributes:
        name: what it is called.
        a: what is kept of run a.
        b: what is kept of run b.
        capture: options of both captures, which then are made for real.
        capture_a: options of a's capture alone.
        capture_b: options of b's capture alone.
        scripts: arguments that are added on both sides, by script; all scripts and none where empty.
        diff: options of the comparison, by name of the field of `DiffOptions`.
    """

    name: str
    a: Reduction = field(default_factory=Reduction)
    b: Reduction = field(default_factory=Reduction)
    capture: tuple[str, ...] = ()
    capture_a: tuple[str, ...] = ()
    capture_b: tuple[str, ...] = ()
    scripts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    diff: dict[str, Any] = field(default_factory=dict)

    def fits(self, script: str) -> bool:
        """Whether the script can be run so."""
        return not self.scripts or script in self.scripts


def _both(name: str, **kept: Any) -> Configuration:
    reduction = Reduction(**kept)
    return Configuration(name, a=reduction, b=reduction)


LEAN = ("param", "grad", "loss", "batch")

CONFIGURATIONS: tuple[Configuration, ...] = (
    Configuration("everything"),
    _both("params+grads", record=("param", "grad")),
    _both("lean", record=LEAN),
    _both("outputs", record=("output", "loss")),
    _both("state", record=("param", "buffer", "optimizer_state", "hyperparameter")),
    _both("checksums", measured=False),
    Configuration("lean-a", a=Reduction(record=LEAN)),
    Configuration("modules-a", capture_a=("--modules", "*.0")),
    Configuration("modules-b", capture_b=("--modules", "*.0")),
    Configuration("diff-kinds", diff={"kinds": frozenset({Kind.OUTPUT, Kind.LOSS})}),
    Configuration("diff-grads", diff={"kinds": frozenset({Kind.GRAD, Kind.PARAM})}),
    Configuration("diff-modules", diff={"modules": ("*.0",)}),
    Configuration("diff-steps", diff={"steps": Schedule.parse("1:")}),
    Configuration("rtol-1e-5", diff={"rtol": 1e-5}),
    Configuration("rtol-1e-2", diff={"rtol": 1e-2}),
    Configuration("every-3", capture=("--steps", "::3")),
    Configuration("steps-2:", capture=("--steps", "2:")),
    Configuration("lean-every-2", capture=("--steps", "::2", "--record", "param,grad,loss")),
    Configuration("operators", capture=("--level", "op")),
    Configuration(
        "evaluated", scripts={"train_gpt.py": ("--evaluate-every", "1"), "train_cnn.py": ("--eval-every", "1")}
    ),
    Configuration(
        "accumulated", scripts={"train_gpt.py": ("--accumulate", "2"), "train_cnn.py": ("--accumulate", "2")}
    ),
    Configuration("autocast", scripts={"train_gpt.py": ("--autocast",), "train_cnn.py": ("--autocast",)}),
    Configuration("compiled", capture=("--compile", "keep"), scripts={"train_gpt.py": ("--compile",)}),
    Configuration("resumed", scripts={"train_gpt.py": ("--resume", "{checkpoint}")}),
)


def reduce(source: Path, target: Path, reduction: Reduction) -> Path:
    """Write the run that a capture with the reduction's options would have left, sites numbered anew."""
    with open_run(source) as run, StoreWriter.create(target, force=True) as store:
        for number in run.ranks:
            reader = run.rank(number)
            kept = np.array([_kept(site, reduction) for site, _ in reader.sites], bool)
            rank = store.rank(
                number,
                stats=reduction.measured,
                sketch=reduction.measured,
            )
            for layout in reader.layouts:
                rank.layout(layout)
            named = list(reader.sites)
            number_of = np.zeros(len(kept), np.uint32)
            number_of[kept] = [rank.site(*named[old]) for old in np.flatnonzero(kept)]
            rank.modules(getattr(reader, "module_rows", reader.modules))
            for entry in reader.steps:
                batch = reader.read(entry.step)
                rows = _rows(batch, np.flatnonzero(kept[batch.site]), measured=reduction.measured)
                if len(rows):
                    rank.append(entry.step, dataclasses.replace(rows, site=number_of[rows.site]))
        told_by = {"nested": {"input", "output"}, "beginning": {"rng"}}  # documents of who records such kinds
        for name, value in run.settings.items():
            if not reduction.record or name not in told_by or not told_by[name].isdisjoint(reduction.record):
                store.write_settings(name, value)
        store.write_manifest(_manifest(run.manifest, reduction))
    return target


def _kept(site: Any, reduction: Reduction) -> bool:
    if reduction.record and site.kind.value not in reduction.record and site.kind not in SETTING_KINDS:
        return False
    return not (reduction.record and site.kind in SETTING_KINDS and "hyperparameter" not in reduction.record)


def _rows(batch: StepBatch, rows: Any, *, measured: bool) -> StepBatch:
    """The rows of a batch, numbered anew, without statistics and sketches unless `measured`."""
    chosen = dataclasses.replace(rows_of([batch], [rows]), sequence=np.arange(len(rows), dtype=np.uint32))
    return chosen if measured else dataclasses.replace(chosen, counts={}, floats={}, sketch=None)


def _manifest(manifest: dict[str, Any], reduction: Reduction) -> dict[str, Any]:
    options = dict(manifest["options"])
    observed = list(manifest["observed"])
    if reduction.record:
        options["record"] = [kind for kind in options["record"] if kind in reduction.record]
        observed = sorted(options["record"])
    if not reduction.measured:
        options |= {"stats": [], "sketch": False}
    narrowing = {name: options.get(name, value) for name, value in manifest.get("narrowing", {}).items()}
    return {**manifest, "options": options, "observed": observed, "narrowing": narrowing}

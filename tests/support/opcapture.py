"""Capture a function in this process and hand back its records."""

from __future__ import annotations

from dataclasses import replace

import torch  # noqa: F401 - as a script has by then

from introspect_cli.capture.options import CaptureOptions
from introspect_cli.capture.session import Session
from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions
from introspect_cli.records import Given, Kind
from introspect_cli.script.ending import Ending
from introspect_cli.store.run import open_run

QUICK = CaptureOptions(env=False, packages=False, source=False, quiet=True)


def captured(path, work, **options):
    """Run `work()` under capture into `path`; the run stays there."""
    chosen = replace(QUICK, output=path, force=True, **options)
    if chosen.level == "op":
        chosen = replace(chosen, record=chosen.record | {Kind.OP_OUTPUT})
    session = Session(None, chosen)
    try:
        session.start()
        work()
    finally:
        session.finish(Ending(0, "returned"))
    return path


def compared(a, b, **options):
    """What a comparison of two runs finds, given their directories."""
    with open_run(a) as one, open_run(b) as two:
        return compare_runs(one, two, DiffOptions(**options))


def records(path, step=0):
    """All records of a step, in order."""
    with open_run(path) as run:
        assert run.manifest["failures"] == []
        return list(run.rank(0).records(step))


def operators(path, step=0):
    """Records of operators' results at a step, in order."""
    return [record for record in records(path, step) if record.site.kind is Kind.OP_OUTPUT]


def named(path, step=0):
    """Number of a site to its record."""
    with open_run(path) as run:
        rank = run.rank(0)
        batch = rank.read(step)
        return {int(batch.site[row]): rank.record(batch, row, step) for row in range(len(batch.site))}


def inputs_of(record, by_number):
    """Records of the sites that an operator's inputs came from; `None` for what nothing recorded wrote."""
    given = record.given or Given()
    return [by_number.get(number) for number in given.inputs]


def forward_of(record, by_number):
    """Record of the forward operator that a backward one belongs to, or what is said in its place."""
    return by_number[record.given.forward] if record.given.forward >= 0 else record.given.node

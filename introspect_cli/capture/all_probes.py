"""All probes of a capture, in the order in which they are put in.

This module imports torch; the session imports it only once the script has imported torch itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.capture.probes.children import ChildrenProbe
from introspect_cli.capture.probes.data import DataProbe
from introspect_cli.capture.probes.gradients import GradientProbe
from introspect_cli.capture.probes.loss import LossProbe
from introspect_cli.capture.probes.modules import ModuleProbe
from introspect_cli.capture.probes.objects import AttributeProbe, BuiltProbe
from introspect_cli.capture.probes.optimizers import OptimizerProbe
from introspect_cli.capture.probes.perturb import PerturbProbe
from introspect_cli.capture.probes.products import CopiesProbe, ProductProbe, ScriptCallsProbe
from introspect_cli.capture.probes.randomness import RandomProbe
from introspect_cli.capture.probes.state import StateProbe
from introspect_cli.capture.regions.probe import TapProbe
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from introspect_cli.capture.context import Context
    from introspect_cli.capture.probes.base import GuardedProbe


_ALWAYS = (
    ChildrenProbe, RandomProbe, StateProbe, GradientProbe, BuiltProbe, DataProbe, LossProbe, ProductProbe,
    ScriptCallsProbe, OptimizerProbe,
    CopiesProbe,  # after the optimizers: what has been stepped is on record
    ModuleProbe, AttributeProbe, TapProbe,
)  # fmt: skip


def put_probes(context: Context) -> None:
    """Make all probes that a capture's options ask for, in the order in which they are installed.

    Nothing is installed before `Context.install`.
    """
    options = context.options
    # before anything is recorded of what it moves
    kinds: list[type[GuardedProbe]] = [PerturbProbe, *_ALWAYS] if options.perturb is not None else [*_ALWAYS]
    if options.compile != "boundary":
        from introspect_cli.capture.regions.compile import CompileProbe

        kinds.append(CompileProbe)
    if Kind.COLLECTIVE in options.record and context.has_ranks:
        from introspect_cli.capture.probes.collectives import CollectiveProbe

        kinds.append(CollectiveProbe)
    if options.vjp or options.jacobian_norm:
        from introspect_cli.capture.probes.vjp import VjpProbe

        kinds.append(VjpProbe)
    if options.level == "op":
        from introspect_cli.capture.ops import OpProbe

        kinds.append(OpProbe)
    for kind in kinds:
        context.probes.append(kind(context))

"""What a capture was asked to do, as data.

The command line, a configuration file and the manifest of a run all speak of the same options; they meet
here, checked once, so that nothing downstream meets an unknown name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from introspect_cli.errors import UsageError
from introspect_cli.records import DERIVED_STATS, STATISTICS, Kind
from introspect_cli.selection import Schedule, choose

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

KINDS: tuple[str, ...] = tuple(kind.value for kind in Kind if kind is not Kind.OP_OUTPUT)
"""Kinds that can be asked for, all of them recorded by default."""

COMPILE_MODES: tuple[str, ...] = ("boundary", "keep", "eager")
"""What can be done with compiled regions."""

LEVELS: tuple[str, ...] = ("module", "op")
"""How deep a capture looks."""

STATS: tuple[str, ...] = (
    "shape",
    "dtype",
    *(name for name in (*STATISTICS, *DERIVED_STATS) if name not in ("posinfs", "neginfs")),  # `infs` stands for both
)
"""Statistics that can be asked for."""

DEFAULT_STATS: tuple[str, ...] = tuple(
    name for name in STATS if name not in STATISTICS or not STATISTICS[name].on_request
)
"""Statistics kept unless told otherwise: all that need no sort."""

LAYOUT_STATS = frozenset({"shape", "dtype"})
"""Statistics that are kept whatever was asked for, since a layout is no measurement."""


@dataclass(frozen=True)
class CaptureOptions:
    """The options of one capture.

    Attributes:
        output: directory of the run; None for a fresh one under `introspect-runs/`.
        force: replace an existing run.
        record: kinds to record.
        stats: names of the statistics to keep.
        sketch: whether to keep a sketch of each tensor.
        modules: globs over FQNs; only modules that match one are recorded, all where empty.
        exclude: globs over FQNs of modules that are not recorded.
        max_depth: deepest level of modules to record, the root being 0; None for no limit.
        schedule: steps to record.
        eval: whether to record forward passes outside training; None for what suits the script.
        seed: seed for python, numpy and torch; None to leave them alone.
        deterministic: ask torch for deterministic algorithms.
        env: keep environment variables among the settings.
        packages: keep the installed packages among the settings.
        source: keep hashes of the imported source files among the settings.
        save_tensors: globs over FQNs; values of sites that match one are kept whole.
        redact: globs over names of environment variables, beside the usual ones, whose values are secret.
        level: `module` or `op`, which also records the results of every operator.
        ops: globs over operator names; only operators that match one are recorded, all where empty.
        views: whether results that share their input's memory are recorded too.
        vjp: pairs of values, `OUTPUT:INPUT`, whose vector-Jacobian product with ones is recorded.
        jacobian_norm: pairs of values whose Jacobian's Frobenius norm is estimated.
        probes: random vectors for such an estimate.
        compile: what is done with what `torch.compile` compiles: `boundary`, `keep` or `eager`.
        all_dtypes: whether operators' results that are no floating point numbers are recorded too.
        until_step: end the script when this step is complete; None to let it run.
        quiet: say nothing but errors.
    """

    output: Path | None = None
    force: bool = False
    record: frozenset[Kind] = frozenset(Kind(name) for name in KINDS)
    stats: tuple[str, ...] = DEFAULT_STATS
    sketch: bool = True
    modules: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    max_depth: int | None = None
    schedule: Schedule = field(default_factory=Schedule)
    eval: bool | None = None
    seed: int | None = None
    deterministic: bool = False
    env: bool = True
    packages: bool = True
    source: bool = True
    save_tensors: tuple[str, ...] = ()
    redact: tuple[str, ...] = ()
    level: str = "module"
    ops: tuple[str, ...] = ()
    views: bool = False
    all_dtypes: bool = False
    compile: str = "boundary"
    vjp: tuple[str, ...] = ()
    jacobian_norm: tuple[str, ...] = ()
    probes: int = 8
    until_step: int | None = None
    quiet: bool = False

    @property
    def measures(self) -> bool:
        """Whether any statistic beyond shape and dtype is kept."""
        return any(name not in LAYOUT_STATS for name in self.stats)

    @property
    def sorted_stats(self) -> tuple[str, ...]:
        """The statistics asked for that need a sort, in column order."""
        return tuple(name for name, own in STATISTICS.items() if own.on_request and name in self.stats)

    def to_dict(self) -> dict[str, Any]:
        """The options as plain values for the manifest, all but those that only steer this command.

        `output`, `force` and `quiet` say nothing about what is in the run; names of secrets stay out too.
        """
        return {
            "record": [kind.value for kind in Kind if kind in self.record],
            "stats": list(self.stats),
            "sketch": self.sketch,
            "modules": list(self.modules),
            "exclude": list(self.exclude),
            "max_depth": self.max_depth,
            "steps": str(self.schedule),
            "eval": self.eval,
            "seed": self.seed,
            "deterministic": self.deterministic,
            "env": self.env,
            "packages": self.packages,
            "source": self.source,
            "save_tensors": list(self.save_tensors),
            "until_step": self.until_step,
            "level": self.level,
            "ops": list(self.ops),
            "views": self.views,
            "all_dtypes": self.all_dtypes,
            "compile": self.compile,
            "vjp": list(self.vjp),
            "jacobian_norm": list(self.jacobian_norm),
            "probes": self.probes,
        }


def parse_kinds(names: Iterable[str]) -> frozenset[Kind]:
    """Kinds by name.

    Args:
        names: names of kinds, or `default`, `all` or `none`.

    Raises:
        UsageError: a name is unknown.
    """
    return frozenset(Kind(name) for name in choose(names, KINDS, "kind", default=KINDS))


def check_pairs(texts: Iterable[str]) -> None:
    """Make sure that each text names two values.

    Raises:
        UsageError: one does not.
    """
    for text in texts:
        later, colon, earlier = (part.strip() for part in text.partition(":"))
        if not (colon and later and earlier):
            raise UsageError(
                f"{text!r} does not name two values: write OUTPUT:INPUT, such as lm_head:blocks.0/input[0]"
            )


def parse_stats(names: Iterable[str]) -> tuple[str, ...]:
    """Names of statistics, in the order of `STATS`.

    Args:
        names: names of statistics, or `default`, `all` or `none`.

    Raises:
        UsageError: a name is unknown.
    """
    return choose(names, STATS, "statistic", default=DEFAULT_STATS)

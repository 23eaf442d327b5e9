"""What a capture was asked to do, as data.

The command line, a configuration file, the manifest of a run and a comparison of runs all speak of the same options.
Each is one field here: its flags, its help, its default, and whether it narrows what is observed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.options.option import (
    CHILDREN,
    COMPILE_MODES,
    DEFAULT_KINDS,
    DEFAULT_STATS,
    KINDS,
    LAYOUT_STATS,
    LEVELS,
    STATS,
    Option,
    of_comparing,
    of_records,
    of_settings,
    of_steps,
    of_the_run,
    of_the_script,
)
from introspect_cli.records import Kind
from introspect_cli.schedule.rules import NAMES, Rule, Schedule
from introspect_cli.statistics import STATISTICS

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class CaptureOptions:
    """Options of one capture, a field each with flag, help and default.

    The command line, the check of what two captures observed, and the manifest are made from these fields.
    """

    output: Path | None = of_the_run(
        None,
        "Directory of the run [default: a fresh one under introspect-runs/].",
        "-o",
        metavar="DIR",
    )
    force: bool = of_the_run(False, "Replace an existing run.")
    durable: bool = of_the_run(False, "Force each step to disk, so that even a power cut loses none.")
    publish: tuple[str, ...] = of_the_run(
        (),
        "Send the run while it runs: tensorboard, mlflow, wandb, directory, URL; repeatable.",
        metavar="PLACE",
        commas=False,
    )
    quiet: bool = of_the_run(False, "Print errors only.", "-q")
    against: str | None = of_comparing(
        None,
        "Compare with this run while running, and report the first divergence at once.",
        metavar="RUN",
    )
    diff: str | None = of_comparing(
        None,
        "Options of diff for that, as one argument: '--rtol 1e-5 --kinds param,grad'.",
        metavar="OPTIONS",
    )
    stop: bool = of_comparing(
        False,
        "End the script, on all ranks, when it diverges; exit as diff does.",
    )
    record: frozenset[Kind] = of_records(
        frozenset(Kind(name) for name in DEFAULT_KINDS),
        f"Kinds of values: {', '.join(KINDS)}; or default (all but collective), all, none.",
        "--kinds",
        metavar="KINDS",
    )
    stats: tuple[str, ...] = of_records(
        DEFAULT_STATS,
        f"Statistics of each tensor: {', '.join(STATS)}; or default "
        f"(all but {' and '.join(name for name in STATS if name not in DEFAULT_STATS)}), all, none.",
        metavar="NAMES",
    )
    sketch: bool = of_records(True, "Keep 16 numbers of each tensor that estimate distances [default: yes].")
    modules: tuple[str, ...] = of_records(
        (), "Only modules whose name matches, such as '*.attn'; repeatable.", metavar="GLOB"
    )
    level: str = of_records(
        "module",
        "Record modules, or each operator in them as well [default: module].",
        choices=LEVELS,
    )
    ops: tuple[str, ...] = of_records(
        (),
        "With --level op: only these operators, such as mm or 'aten.*norm*'; repeatable.",
        metavar="GLOB",
        commas=False,
    )
    views: bool = of_records(
        False,
        "With --level op: also results that are views of an input [default: no].",
        "--views/--no-views",
    )
    vjp: tuple[str, ...] = of_records(
        (),
        "Record a vector-Jacobian product with ones, such as lm_head:blocks.0/input[0]; repeatable.",
        metavar="OUTPUT:INPUT",
        commas=False,
    )
    jacobian_norm: tuple[str, ...] = of_records(
        (),
        "Estimate the Frobenius norm of such a Jacobian; repeatable.",
        metavar="OUTPUT:INPUT",
        commas=False,
    )
    probes: int = of_records(8, "Random vectors for that estimate [default: 8].", metavar="K", least=2)
    exclude: tuple[str, ...] = of_records((), "Not these modules; repeatable.", metavar="GLOB")
    max_depth: int | None = of_records(None, "No module more than N levels below its root.", metavar="N", least=0)
    save_tensors: tuple[str, ...] = of_records(
        (), "Keep the whole tensors of what matches; repeatable.", metavar="GLOB", narrows=False
    )
    keep_around: int | None = of_records(
        None,
        "Hold the whole tensors of the last N steps, and write them when the run diverges or has a NaN.",
        metavar="N",
        least=1,
        narrows=False,
    )
    steps: Schedule | Rule = of_steps(
        Schedule(),
        'Only these steps: 0,5,10:20,100::50, or by rules: \'first(10) | every(100) & steps(":900") | last(50) | '
        f'when("loss > 3 * median")\'; a condition is of {", ".join(NAMES)}.',
        metavar="STEPS",
    )
    ranks: str | None = of_steps(None, "Only these ranks: 0,8:16, or one-per-replica.", metavar="RANKS")
    until_nan: bool = of_steps(False, "End the script after the first step with a NaN.")
    until_step: int | None = of_steps(None, "End the script when step N is complete.", metavar="N", least=0)
    eval: bool | None = of_steps(
        None, "Record evaluation, too [default: if the script has no optimizer].", "--eval/--no-eval"
    )
    compile: str = of_the_script(
        "boundary",
        "What torch.compile compiles: recorded at its boundary; tapped inside, which limits fusion; run as python "
        "[default: boundary].",
        choices=COMPILE_MODES,
        narrows=True,
    )
    children: str = of_the_script(
        "script",
        "Record no child processes, those of a launcher that run a script, or all that train [default: script].",
        choices=CHILDREN,
        in_manifest=False,
    )
    seed: int | None = of_the_script(None, "Seed python, numpy and torch first.", metavar="N", least=0, most=2**32 - 1)
    deterministic: bool = of_the_script(False, "Ask torch and its libraries for deterministic algorithms.")
    perturb: int | None = of_the_script(
        None,
        "Move each initial parameter by one rounding, up or down by a seed such as 0, for `diff --noise`.",
        metavar="SEED",
        least=0,
        most=2**32 - 1,
    )
    env: bool = of_settings(True, "Environment variables, secrets redacted [default: yes].", narrows=True)
    packages: bool = of_settings(True, "Installed packages [default: yes].", narrows=True)
    source: bool = of_settings(True, "Hashes of your source files [default: yes].", narrows=True)
    sources: bool = of_settings(True, "And their text, so that diff shows the changed line [default: yes].")
    redact: tuple[str, ...] = of_settings(
        (),
        "Redact more variables, such as 'WANDB_*'; repeatable.",
        metavar="PATTERN",
        in_manifest=False,
    )

    @property
    def measures(self) -> bool:
        """Whether any statistic other than shape and dtype is kept."""
        return any(name not in LAYOUT_STATS for name in self.stats)

    @property
    def sorted_stats(self) -> tuple[str, ...]:
        """The statistics asked for that need a sort (`med`, `mode`), in column order."""
        return tuple(name for name, statistic in STATISTICS.items() if statistic.on_request and name in self.stats)

    def to_dict(self) -> dict[str, Any]:
        """Options by name as plain values for the manifest, without those whose `Option.in_manifest` is False."""
        return {name: plain(getattr(self, name)) for name, facts in described(type(self)) if facts.in_manifest}

    def narrowing(self) -> dict[str, Any]:
        """Options that decide how much of a training is observed (`Option.narrows`), by name as plain values."""
        return {name: plain(getattr(self, name)) for name, facts in described(type(self)) if facts.narrows}


def described(options: type[CaptureOptions] | None = None) -> list[tuple[str, Option]]:
    """Pairs of field name and `Option` for every option, in the order of the help.

    `options` None for `CaptureOptions`.
    """
    every = fields(options or CaptureOptions)
    return [(item.name, item.metadata["option"].named(item.name, item.default)) for item in every]


def plain(value: object) -> Any:
    """An option's value for a YAML file: kinds in the order of `Kind`, tuples as lists, a schedule as text.

    Any other value is returned as it is.
    """
    if isinstance(value, frozenset):
        return [kind.value for kind in Kind if kind in value]
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, (Schedule, Rule)) else value

"""What a capture was asked to do, as data.

The command line, a configuration file, the manifest of a run and a comparison of runs all speak of the same options.
Each is one field here: its flags, its help, its default, and whether it narrows what is observed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from introspect_cli.capture.option import (
    AGAINST,
    CHILDREN,
    COMPILE_MODES,
    DEFAULT_KINDS,
    DEFAULT_STATS,
    HOW,
    KINDS,
    LAYOUT_STATS,
    LEVELS,
    RUN,
    SETTINGS,
    STATS,
    WHAT,
    WHEN,
    Option,
    option,
)
from introspect_cli.records import Kind
from introspect_cli.schedule.rule import NAMES
from introspect_cli.schedule.rules import Schedule
from introspect_cli.statistics import STATISTICS

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class RunOptions:
    """The run: where it is written, and what is shown of it."""

    heading: ClassVar[str] = RUN
    in_manifest: ClassVar[bool] = False

    output: Path | None = option(
        None,
        "Directory of the run [default: a fresh one under introspect-runs/, named at the end].",
        "-o",
        metavar="DIR",
    )
    force: bool = option(False, "Replace an existing run.")
    durable: bool = option(
        False, "Force each step to disk (fsync), so that a power cut loses none [default: a kill loses none]."
    )
    progress: bool = option(False, "Show on the terminal how far the run is.")
    publish: tuple[str, ...] = option(
        (),
        "Show the run while it is running: tensorboard, mlflow, wandb, logger (what the framework logs to), a "
        "directory or a URL; may be repeated.",
        metavar="PLACE",
        commas=False,
    )
    quiet: bool = option(False, "Print errors only.", "-q")


@dataclass(frozen=True)
class ComparedOptions:
    """Another run that this one is compared with while it goes on."""

    heading: ClassVar[str] = AGAINST
    in_manifest: ClassVar[bool] = False

    against: str | None = option(
        None,
        "A run, pack, URL or golden run to compare with, step by step: the first divergence is reported at once.",
        metavar="RUN",
    )
    rtol: float = option(0.0, "Accept relative RMS differences up to X, as in diff.", metavar="X")
    noise: tuple[str, ...] = option(
        (),
        "A repeat of the run to compare with: differences no larger than between these two are accepted.",
        metavar="RUN",
        commas=False,
    )
    diff: str | None = option(
        None,
        "More options of diff for that, as one argument: '--kinds param,grad --modules blocks.* --atol 1e-6'.",
        metavar="OPTIONS",
    )
    stop: bool = option(
        False,
        "End the script, on all ranks, when it has diverged; the exit status is then diff's: 0, 1, or 2 (could not "
        "tell).",
    )
    on_divergence: str | None = option(
        None,
        "Shell command to run at the first divergence, with INTROSPECT_RUN and INTROSPECT_STEP in its environment.",
        metavar="COMMAND",
    )


@dataclass(frozen=True)
class RecordedOptions:
    """What is recorded."""

    heading: ClassVar[str] = WHAT
    narrows: ClassVar[bool] = True

    record: frozenset[Kind] = option(
        frozenset(Kind(name) for name in DEFAULT_KINDS),
        f"Kinds of values, separated by commas: {', '.join(KINDS)}; or default (all but collective), all, none.",
        "--kinds",
        metavar="KINDS",
    )
    stats: tuple[str, ...] = option(
        DEFAULT_STATS,
        f"Statistics of each tensor, separated by commas: {', '.join(STATS)}; or default "
        f"(all but {' and '.join(name for name in STATS if name not in DEFAULT_STATS)}), all, none.",
        metavar="NAMES",
    )
    sketch: bool = option(
        True, "Keep a sketch of each tensor: 16 numbers that estimate how far apart two tensors are [default: yes]."
    )
    modules: tuple[str, ...] = option(
        (), "Record only modules whose name matches, such as '*.attn'; may be repeated.", metavar="GLOB"
    )
    level: str = option(
        "module",
        "What is looked at: each module, or also the result of each operator in it, forward and backward "
        "[default: module].",
        choices=LEVELS,
    )
    ops: tuple[str, ...] = option(
        (),
        "With --level op, record only operators whose name matches, such as mm or 'aten.*norm*'; may be repeated.",
        metavar="GLOB",
        commas=False,
    )
    views: bool = option(
        False,
        "With --level op, also record results that are views of an input [default: no].",
        "--views/--no-views",
    )
    all_dtypes: bool = option(
        False,
        "With --level op, also record results that are not floating point [default: no].",
        "--all-dtypes/--float-dtypes",
    )
    vjp: tuple[str, ...] = option(
        (),
        "Record how one value depends on another: the vector-Jacobian product with ones, such as "
        "lm_head:blocks.0/input[0]; may be repeated.",
        metavar="OUTPUT:INPUT",
        commas=False,
    )
    jacobian_norm: tuple[str, ...] = option(
        (),
        "Estimate the Frobenius norm of such a Jacobian, with its standard error; may be repeated.",
        metavar="OUTPUT:INPUT",
        commas=False,
    )
    probes: int = option(8, "Random vectors for an estimated norm [default: 8].", metavar="K", least=2)
    exclude: tuple[str, ...] = option((), "Leave out modules whose name matches; may be repeated.", metavar="GLOB")
    max_depth: int | None = option(None, "Record no module more than N levels below its root.", metavar="N", least=0)
    save_tensors: tuple[str, ...] = option(
        (), "Keep whole tensors of what matches by name; may be repeated.", metavar="GLOB", narrows=False
    )
    keep_around: int | None = option(
        None,
        "Hold the whole tensors of the last N steps in memory, and write them when the run diverges (--against) or has "
        "a NaN.",
        metavar="N",
        least=1,
        narrows=False,
    )
    keep_size: int | None = option(
        None,
        "Memory of a rank for --keep-around, such as 2GB [default: the ranks share a quarter of what is free].",
        metavar="SIZE",
        in_manifest=False,
        narrows=False,
    )
    per_sample: bool = option(
        False,
        "Also summarise each sample of a batch, so that diff names the one that differs; best with --steps.",
        narrows=False,
    )


@dataclass(frozen=True)
class WhenOptions:
    """When it is recorded."""

    heading: ClassVar[str] = WHEN
    narrows: ClassVar[bool] = True

    steps: Schedule = option(Schedule(), "Steps and python slices, such as 0,5,10:20,100::50.", metavar="STEPS")
    every_seconds: int | None = option(None, "Only one step every N seconds.", metavar="N", least=1)
    epochs: str | None = option(
        None,
        "Only these epochs, such as 0,10:12, as Lightning, transformers and accelerate count them.",
        metavar="EPOCHS",
    )
    ranks: str | None = option(
        None, "Only these ranks: 0,8:16, or one-per-replica (the lowest of ranks that hold copies).", metavar="RANKS"
    )
    first: int | None = option(
        None, "Also the first N steps; only these where no other steps are asked for.", metavar="N", least=1
    )
    last: int | None = option(
        None,
        "Also the last N steps, or only these: older ones are dropped from the run as it goes on.",
        metavar="N",
        least=1,
    )
    when: str | None = option(
        None,
        f"Also each step that meets a condition, such as 'loss > 3 * median'; it may use {', '.join(NAMES)}.",
        metavar="CONDITION",
    )
    schedule: str | None = option(
        None,
        "The steps as one expression, such as 'first(10) | every(100) & epochs(\"0:3\") | last(50)'.",
        metavar="RULES",
    )
    max_size: int | None = option(
        None,
        "Keep the run below a size such as 2GB: older steps are thinned, the first and the latest stay.",
        metavar="SIZE",
    )
    until_nan: bool = option(
        False, "End the script after the first step with a NaN in a loss, an output or a parameter."
    )
    until_step: int | None = option(None, "End the script when step N is complete.", metavar="N", least=0)
    eval: bool | None = option(
        None, "Record forward passes outside training [default: if the script has no optimizer].", "--eval/--no-eval"
    )


@dataclass(frozen=True)
class ScriptOptions:
    """How the script runs."""

    heading: ClassVar[str] = HOW

    compile: str = option(
        "boundary",
        "What torch.compile compiles: recorded at its boundary; kept compiled and tapped inside, which limits "
        "fusion; or run as python [default: boundary].",
        choices=COMPILE_MODES,
        narrows=True,
    )
    children: str = option(
        "script",
        "Which processes are recorded below a launcher, a shell script or a test runner: none, those that run a "
        "script, or all python processes that train, below a script too [default: script].",
        choices=CHILDREN,
        in_manifest=False,
    )
    seed: int | None = option(
        None, "Seed python, numpy and torch before the script starts.", metavar="N", least=0, most=2**32 - 1
    )
    deterministic: bool = option(False, "Ask torch and its libraries for deterministic algorithms.")
    perturb: int | None = option(
        None,
        "Move each initial parameter by one rounding, up or down by a seed [default: 0]; `diff --noise` takes such a "
        "run.",
        metavar="[SEED]",
        least=0,
        most=2**32 - 1,
    )


@dataclass(frozen=True)
class SettingsOptions:
    """Settings that are kept beside the records."""

    heading: ClassVar[str] = SETTINGS

    env: bool = option(True, "Environment variables, secrets redacted [default: yes].", narrows=True)
    packages: bool = option(True, "Installed packages [default: yes].", narrows=True)
    source: bool = option(True, "Hashes of the script's own source files [default: yes].", narrows=True)
    sources: bool = option(
        True, "Also their text, secrets redacted, so that diff shows the changed line [default: yes]."
    )
    redact: tuple[str, ...] = option(
        (),
        "Redact more environment variables, by name, such as 'WANDB_*'; may be repeated.",
        metavar="PATTERN",
        in_manifest=False,
    )


@dataclass(frozen=True)
class CaptureOptions(SettingsOptions, ScriptOptions, WhenOptions, RecordedOptions, ComparedOptions, RunOptions):
    """The options of one capture: a field each, which holds all that is known of it.

    The command line, the check of what two captures observed, and the manifest are made from these fields, those of the
    last class first.
    """

    @property
    def measures(self) -> bool:
        """Whether any statistic beyond shape and dtype is kept."""
        return any(name not in LAYOUT_STATS for name in self.stats)

    @property
    def sorted_stats(self) -> tuple[str, ...]:
        """The statistics asked for that need a sort, in column order."""
        return tuple(name for name, statistic in STATISTICS.items() if statistic.on_request and name in self.stats)

    def to_dict(self) -> dict[str, Any]:
        """The options as plain values for the manifest, all but those that only steer this command.

        `output`, `force` and `quiet` say nothing about what is in the run; names of secrets stay out too.
        """
        return {name: _plain(getattr(self, name)) for name, facts in described(type(self)) if facts.in_manifest}

    def narrowing(self) -> dict[str, Any]:
        """What the manifest says apart: the options that decide how much of a training is observed, all of them."""
        return {name: _plain(getattr(self, name)) for name, facts in described(type(self)) if facts.narrows}


def described(options: type[CaptureOptions] = CaptureOptions) -> list[tuple[str, Option]]:
    """Every option with the name of its field, in the order of the help."""
    section_of = {
        name: vars(section)
        for section in options.__mro__
        if "heading" in vars(section)
        for name in vars(section)["__annotations__"]
    }
    return [
        (item.name, item.metadata["option"].completed(item.name, item.default, section_of.get(item.name, {})))
        for item in fields(options)
    ]


def _plain(value: object) -> Any:
    if isinstance(value, frozenset):
        return [kind.value for kind in Kind if kind in value]
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Schedule) else value

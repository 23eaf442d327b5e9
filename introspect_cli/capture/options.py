"""What a capture was asked to do, as data.

The command line, a configuration file, the manifest of a run and a comparison of runs all speak of the same options.
Each is one field here: its flags, its help, its default, and whether it narrows what is observed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

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
from introspect_cli.records import STATISTICS, Kind
from introspect_cli.schedule.rule import NAMES
from introspect_cli.schedule.rules import Schedule

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class CaptureOptions:
    """The options of one capture: a field each, which holds all that is known of it.

    The command line, the check of what two captures observed, and the manifest are made from these fields.
    """

    output: Path | None = option(
        None,
        RUN,
        "Directory of the run [default: a fresh one under introspect-runs/, named at the end].",
        "-o",
        "--output",
        metavar="DIR",
        in_manifest=False,
    )
    force: bool = option(False, RUN, "Replace an existing run.", "--force", in_manifest=False)
    durable: bool = option(
        False,
        RUN,
        "Force each step to disk (fsync), so that a power cut loses none [default: a kill loses none].",
        "--durable",
        in_manifest=False,
    )
    progress: bool = option(False, RUN, "Show on the terminal how far the run is.", "--progress", in_manifest=False)
    publish: tuple[str, ...] = option(
        (),
        RUN,
        "Show the run while it goes on: tensorboard, mlflow, wandb, logger (what the framework logs to), a "
        "directory or a URL; may be repeated.",
        "--publish",
        metavar="PLACE",
        repeated=True,
        commas=False,
        in_manifest=False,
    )
    quiet: bool = option(False, RUN, "Print errors only.", "-q", "--quiet", in_manifest=False)
    against: str | None = option(
        None,
        AGAINST,
        "A run, pack, URL or golden run to compare with, step by step: the first divergence is reported at once.",
        "--against",
        metavar="RUN",
        in_manifest=False,
    )
    rtol: float = option(
        0.0, AGAINST, "Let relative RMS differences up to X pass, as in diff.", "--rtol", metavar="X", in_manifest=False
    )
    noise: tuple[str, ...] = option(
        (),
        AGAINST,
        "A repeated run of the one to compare with; differences as small as its own pass.",
        "--noise",
        metavar="RUN",
        repeated=True,
        commas=False,
        in_manifest=False,
    )
    stop: bool = option(
        False,
        AGAINST,
        "End the script when it has diverged; the exit status is then diff's: 0, 1, or 2 (could not tell).",
        "--stop",
        in_manifest=False,
    )
    on_divergence: str | None = option(
        None,
        AGAINST,
        "Shell command to run at the first divergence, with INTROSPECT_RUN and INTROSPECT_STEP in its environment.",
        "--on-divergence",
        metavar="COMMAND",
        in_manifest=False,
    )
    record: frozenset[Kind] = option(
        frozenset(Kind(name) for name in DEFAULT_KINDS),
        WHAT,
        f"Kinds of values, with commas between: {', '.join(KINDS)}; or default (all but collective), all, none.",
        "--record",
        "--kinds",
        metavar="KINDS",
        repeated=True,
        narrows=True,
    )
    stats: tuple[str, ...] = option(
        DEFAULT_STATS,
        WHAT,
        f"Statistics of each tensor, with commas between: {', '.join(STATS)}; or default "
        f"(all but {' and '.join(name for name in STATS if name not in DEFAULT_STATS)}), all, none.",
        "--stats",
        metavar="NAMES",
        repeated=True,
        narrows=True,
    )
    sketch: bool = option(
        True,
        WHAT,
        "Keep 16 numbers a tensor that tell how far two tensors are apart [default: yes].",
        "--sketch/--no-sketch",
        narrows=True,
    )
    modules: tuple[str, ...] = option(
        (),
        WHAT,
        "Record only modules whose name matches, such as '*.attn'; may be repeated.",
        "--modules",
        metavar="GLOB",
        repeated=True,
        narrows=True,
    )
    level: str = option(
        "module",
        WHAT,
        "What is looked at: each module, or also the result of each operator in it, forward and backward "
        "[default: module].",
        "--level",
        choices=LEVELS,
        narrows=True,
    )
    ops: tuple[str, ...] = option(
        (),
        WHAT,
        "With --level op, record only operators whose name matches, such as mm or 'aten.*norm*'; may be repeated.",
        "--ops",
        metavar="GLOB",
        repeated=True,
        commas=False,
        narrows=True,
    )
    views: bool = option(
        False,
        WHAT,
        "With --level op, also record results that are views of what went in [default: no].",
        "--views/--no-views",
        narrows=True,
    )
    all_dtypes: bool = option(
        False,
        WHAT,
        "With --level op, also record results that are not floating point [default: no].",
        "--all-dtypes/--float-dtypes",
        narrows=True,
    )
    vjp: tuple[str, ...] = option(
        (),
        WHAT,
        "Record how one value depends on another: the vector-Jacobian product with ones, such as "
        "lm_head:blocks.0/input[0]; may be repeated.",
        "--vjp",
        metavar="OUTPUT:INPUT",
        repeated=True,
        commas=False,
        narrows=True,
    )
    jacobian_norm: tuple[str, ...] = option(
        (),
        WHAT,
        "Estimate the Frobenius norm of such a Jacobian, with its standard error; may be repeated.",
        "--jacobian-norm",
        metavar="OUTPUT:INPUT",
        repeated=True,
        commas=False,
        narrows=True,
    )
    probes: int = option(
        8, WHAT, "Random vectors for an estimated norm [default: 8].", "--probes", metavar="K", least=2, narrows=True
    )
    exclude: tuple[str, ...] = option(
        (),
        WHAT,
        "Leave out modules whose name matches; may be repeated.",
        "--exclude",
        metavar="GLOB",
        repeated=True,
        narrows=True,
    )
    max_depth: int | None = option(
        None,
        WHAT,
        "Record no module more than N levels below its root.",
        "--max-depth",
        metavar="N",
        least=0,
        narrows=True,
    )
    save_tensors: tuple[str, ...] = option(
        (),
        WHAT,
        "Keep whole tensors of what matches by name; may be repeated.",
        "--save-tensors",
        metavar="GLOB",
        repeated=True,
    )
    per_sample: bool = option(
        False,
        WHAT,
        "Also summarise each sample of a batch, so that diff names the one that differs; best with --steps.",
        "--per-sample",
    )
    steps: Schedule = option(
        Schedule(),
        WHEN,
        "Steps and python slices, such as 0,5,10:20,100::50.",
        "--steps",
        metavar="STEPS",
        narrows=True,
    )
    every_seconds: int | None = option(
        None, WHEN, "Only one step every N seconds.", "--every-seconds", metavar="N", least=1, narrows=True
    )
    epochs: str | None = option(
        None,
        WHEN,
        "Only these epochs, such as 0,10:12, as Lightning, transformers and accelerate count them.",
        "--epochs",
        metavar="EPOCHS",
        narrows=True,
    )
    ranks: str | None = option(
        None,
        WHEN,
        "Only these ranks: 0,8:16, or one-per-replica (the lowest of ranks that hold copies).",
        "--ranks",
        metavar="RANKS",
        narrows=True,
    )
    first: int | None = option(
        None,
        WHEN,
        "Also the first N steps; only these where no other steps are asked for.",
        "--first",
        metavar="N",
        least=1,
        narrows=True,
    )
    last: int | None = option(
        None,
        WHEN,
        "Also the last N steps, or only these: older ones are dropped from the run as it goes on.",
        "--last",
        metavar="N",
        least=1,
        narrows=True,
    )
    when: str | None = option(
        None,
        WHEN,
        f"Also each step that meets a condition, such as 'loss > 3 * median'; it may use {', '.join(NAMES)}.",
        "--when",
        metavar="CONDITION",
        narrows=True,
    )
    schedule: str | None = option(
        None,
        WHEN,
        "The steps as one expression, such as 'first(10) | every(100) & epochs(\"0:3\") | last(50)'.",
        "--schedule",
        metavar="RULES",
        narrows=True,
    )
    max_size: int | None = option(
        None,
        WHEN,
        "Keep the run below a size such as 2GB: older steps are thinned, the first and the latest stay.",
        "--max-size",
        metavar="SIZE",
        narrows=True,
    )
    until_nan: bool = option(
        False,
        WHEN,
        "End the script after the first step with a NaN in a loss, an output or a parameter.",
        "--until-nan",
        narrows=True,
    )
    until_step: int | None = option(
        None, WHEN, "End the script when step N is complete.", "--until-step", metavar="N", least=0, narrows=True
    )
    eval: bool | None = option(
        None,
        WHEN,
        "Record forward passes outside training [default: if the script has no optimizer].",
        "--eval/--no-eval",
        narrows=True,
    )
    compile: str = option(
        "boundary",
        HOW,
        "What torch.compile compiles: recorded at its boundary; kept compiled and tapped inside, which limits "
        "fusion; or run as python [default: boundary].",
        "--compile",
        choices=COMPILE_MODES,
        narrows=True,
    )
    children: str = option(
        "script",
        HOW,
        "Which processes are recorded below a launcher, a shell script or a test runner: none, those that run a "
        "script, or all python processes that train, below a script too [default: script].",
        "--children",
        choices=CHILDREN,
        in_manifest=False,
    )
    seed: int | None = option(
        None,
        HOW,
        "Seed python, numpy and torch before the script starts.",
        "--seed",
        metavar="N",
        least=0,
        most=2**32 - 1,
    )
    deterministic: bool = option(
        False, HOW, "Ask torch and its libraries for deterministic algorithms.", "--deterministic"
    )
    perturb: int | None = option(
        None,
        HOW,
        "Move each initial parameter by one rounding, up or down by a seed [default: 0]; `diff --noise` takes such a "
        "run.",
        "--perturb",
        metavar="[SEED]",
        least=0,
        most=2**32 - 1,
    )
    env: bool = option(
        True, SETTINGS, "Environment variables, secrets redacted [default: yes].", "--env/--no-env", narrows=True
    )
    packages: bool = option(
        True, SETTINGS, "Installed packages [default: yes].", "--packages/--no-packages", narrows=True
    )
    source: bool = option(
        True, SETTINGS, "Hashes of the script's own source files [default: yes].", "--source/--no-source", narrows=True
    )
    sources: bool = option(
        True,
        SETTINGS,
        "Also their text, secrets redacted, so that diff shows the changed line [default: yes].",
        "--sources/--no-sources",
    )
    redact: tuple[str, ...] = option(
        (),
        SETTINGS,
        "Redact more environment variables, by name, such as 'WANDB_*'; may be repeated.",
        "--redact",
        metavar="PATTERN",
        repeated=True,
        in_manifest=False,
    )

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
        return {name: _plain(getattr(self, name)) for name, facts in described(self) if facts.in_manifest}

    def narrowing(self) -> dict[str, Any]:
        """What the manifest says apart: the options that decide how much of a training is observed, all of them."""
        return {name: _plain(getattr(self, name)) for name, facts in described(self) if facts.narrows}


def described(options: CaptureOptions | type[CaptureOptions] = CaptureOptions) -> list[tuple[str, Option]]:
    """Every option with the name of its field, in the order of the help."""
    return [(item.name, item.metadata["option"]) for item in fields(options)]


def _plain(value: object) -> Any:
    if isinstance(value, frozenset):
        return [kind.value for kind in Kind if kind in value]
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Schedule) else value

"""What a capture is asked to do: its options as data, what each means, and how people write them."""

from __future__ import annotations

import functools
import os
import re
import shlex
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from introspect_cli.errors import UsageError, did_you_mean
from introspect_cli.records import Kind
from introspect_cli.schedule.rules import NAMES, Rule, Schedule, parse_rule
from introspect_cli.selection import ALL_RANKS, Option, choose, words
from introspect_cli.statistics import DERIVED_STATS, STATISTICS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


# ---
# What one option of a capture is: how it is written, what it means for a comparison, which values it may have.

KINDS: tuple[str, ...] = tuple(kind.value for kind in Kind if kind not in {Kind.OP_OUTPUT, Kind.VALUE})
"""Kinds that can be asked for; values that a script records itself always are."""

DEFAULT_KINDS: tuple[str, ...] = tuple(kind for kind in KINDS if kind != Kind.COLLECTIVE.value)
"""Kinds recorded by default: all but collectives."""

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


RUN, AGAINST, WHAT, WHEN, HOW, AGAIN, SETTINGS = HEADINGS = (
    "The run",
    "Comparing it with another run while it runs",
    "What is recorded",
    "When it is recorded",
    "How the script runs",
    "Running it more than once",
    "Settings recorded with it",
)
"""Headings of the help."""


def option(heading: str, default: object, text: str, *flags: str, **details: Any) -> Any:
    """A dataclass field with this default, and an `Option` in its metadata.

    Args:
        heading: of the help.
        default: the value where the option is not given.
        text: the help.
        flags: further names on the command line.
        details: other fields of `Option`, such as `metavar`.
    """
    return field(default=default, metadata={"option": Option(heading, flags, text, **details)})


of_the_run = functools.partial(option, RUN, in_manifest=False)
of_comparing = functools.partial(option, AGAINST, in_manifest=False)
of_records = functools.partial(option, WHAT, narrows=True)
of_steps = functools.partial(option, WHEN, narrows=True)
of_the_script = functools.partial(option, HOW)
of_settings = functools.partial(option, SETTINGS)


# ---
# What a capture was asked to do, as data.
#
# The command line, a configuration file, the manifest of a run and a comparison of runs all speak of the same
# options. Each is one field here: its flags, its help, its default, and whether it narrows what is observed.


@dataclass(frozen=True)
class CaptureOptions:
    """Options of one capture, a field each with flag, help and default.

    The command line, the check of what two captures observed, and the manifest are made from these fields.
    """

    output: Path | None = of_the_run(  # noqa: RUF009 - makes a field
        None, "Directory of the run [default: a fresh one under introspect-runs/].", "-o", metavar="DIR"
    )
    force: bool = of_the_run(False, "Replace an existing run.")
    durable: bool = of_the_run(False, "Force each step to disk, so that even a power cut loses none.")
    publish: tuple[str, ...] = of_the_run(
        (),
        "Send the run while it runs: tensorboard, mlflow, wandb, URL; repeatable.",
        metavar="PLACE",
        commas=False,
    )
    quiet: bool = of_the_run(False, "Print errors only.", "-q")
    against: str | None = of_comparing(
        None, "Compare with this run while running, and report the first divergence at once.", metavar="RUN"
    )
    diff: str | None = of_comparing(
        None, "Options of diff for that, as one argument: '--rtol 1e-5 --kinds param,grad'.", metavar="OPTIONS"
    )
    stop: bool = of_comparing(False, "End the script, on all ranks, when it diverges; exit as diff does.")
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
    full_every: int = of_records(
        20,
        "On a GPU, keep sketch, skewness and kurtosis of what passes through the model (inputs, outputs, their "
        "gradients) in the first 10 steps and in every Nth, 1 for all [default: 20].",
        metavar="N",
        least=1,
        narrows=False,
    )
    modules: tuple[str, ...] = of_records(
        (), "Only modules whose name matches, such as '*.attn'; repeatable.", metavar="GLOB"
    )
    level: str = of_records(
        "module", "Record modules, or each operator in them as well [default: module].", choices=("module", "op")
    )
    ops: tuple[str, ...] = of_records(
        (),
        "With --level op: only these operators, such as mm or 'aten.*norm*'; repeatable.",
        metavar="GLOB",
        commas=False,
    )
    views: bool = of_records(
        False, "With --level op: also results that are views of an input [default: no].", "--views/--no-views"
    )
    vjp: tuple[str, ...] = of_records(
        (),
        "Record a vector-Jacobian product with ones, such as lm_head:blocks.0/input[0]; repeatable.",
        metavar="OUTPUT:INPUT",
        commas=False,
    )
    jacobian_norm: tuple[str, ...] = of_records(
        (), "Estimate the Frobenius norm of such a Jacobian; repeatable.", metavar="OUTPUT:INPUT", commas=False
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
    steps: Schedule | Rule = of_steps(  # noqa: RUF009 - as above
        Schedule(),
        'Only these steps: 0,5,10:20,100::50, or by rules: \'first(10) | every(100) & steps(":900") | last(50) | '
        f'when("loss > 3 * median")\'; a condition is of {", ".join(NAMES)}.',
        metavar="STEPS",
    )
    ranks: str | None = of_steps(None, "Only these ranks: 0,8:16.", metavar="RANKS")
    until_nan: bool = of_steps(False, "End the script after the first step with a NaN.")
    until_step: int | None = of_steps(None, "End the script when step N is complete.", metavar="N", least=0)
    eval: bool | None = of_steps(
        None, "Record evaluation, too [default: if the script has no optimizer].", "--eval/--no-eval"
    )
    compile: str = of_the_script(
        "boundary",
        "What torch.compile compiles: recorded at its boundary; tapped inside, which limits fusion; run as python "
        "[default: boundary].",
        choices=("boundary", "keep", "eager"),
        narrows=True,
    )
    children: str = of_the_script(
        "script",
        "Record no child processes, those of a launcher that run a script, or all that train [default: script].",
        choices=("none", "script", "all"),
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
        (), "Redact more variables, such as 'WANDB_*'; repeatable.", metavar="PATTERN", in_manifest=False
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
        return {name: plain(getattr(self, name)) for name, facts in described() if facts.in_manifest}

    def narrowing(self) -> dict[str, Any]:
        """Options that decide how much of a training is observed (`Option.narrows`), by name as plain values."""
        return {name: plain(getattr(self, name)) for name, facts in described() if facts.narrows}


def described() -> list[tuple[str, Option]]:
    """Pairs of field name and `Option` for every option, in the order of the help."""
    return [(item.name, item.metadata["option"].named(item.name, item.default)) for item in fields(CaptureOptions)]


def plain(value: object) -> Any:
    """An option's value for a YAML file: kinds in the order of `Kind`, tuples as lists, a schedule as text.

    Any other value is returned as it is.
    """
    if isinstance(value, frozenset):
        return [kind.value for kind in Kind if kind in value]
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, (Schedule, Rule)) else value


# ---
# Options of a capture as people write them: by name, as text, with what they ask of one another checked.
#
# Names of kinds and statistics, and pairs of values are checked here: nothing downstream meets an unknown one.


def options_of(given: Mapping[str, Any]) -> CaptureOptions:
    """Checked capture options from their names, as given on the command line or in a call.

    The path in `against` becomes absolute; operators are added to `record` where an option asks for them.

    Args:
        given: values by name of the option. `steps` is a schedule's text; an option that may be repeated is one text
            with commas, or several texts; one that is missing or empty has its default.

    Raises:
        UsageError: an option, kind or statistic is unknown, a schedule cannot be read, options contradict each other,
            or the run of `against` does not exist.
    """
    known = dict(described())
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or ";"
            raise UsageError(f"capture has no option {name!r}{hint} choose from {', '.join(known)}")
    values = dict(given)
    for name in values.keys() & {name for name, option in known.items() if option.repeated}:
        texts = (values[name],) if isinstance(values[name], str) else tuple(values[name])
        if name in _CHOSEN:
            values[name] = _CHOSEN[name](texts) if values[name] else getattr(CaptureOptions, name)
        else:
            values[name] = words(texts) if known[name].commas else texts
    steps = values.get("steps")
    values["steps"] = CaptureOptions.steps if steps is None else parse_rule(str(steps))
    options = CaptureOptions(**values)
    if options.against is not None:
        options = replace(options, against=_absolute(options.against))
        if options.output is not None and os.path.realpath(options.output) == os.path.realpath(str(options.against)):
            raise UsageError(f"{given['against']} is the run to compare with: name another directory with -o")
    if options.against is None and (options.diff or options.stop):
        raise UsageError("--diff and --stop say how to compare: name a run with --against")
    try:
        shlex.split(options.diff or "")
    except ValueError as error:
        raise UsageError(f"--diff {options.diff}: {str(error).lower()}") from None
    if options.ranks not in (None, ALL_RANKS):
        Schedule(str(options.ranks))
    _check_rule(options)
    operators = options.level == "op" or options.vjp or options.jacobian_norm
    parse_pairs(options.vjp, options.jacobian_norm)
    if options.level != "op" and (options.ops or options.views):
        raise UsageError("--ops and --views say which operators are recorded: give --level op with them")
    if options.level == "op" and options.compile == "keep":
        raise UsageError("--level op looks at operators that run as python: give --compile eager with it, not keep")
    return replace(options, record=options.record | {Kind.OP_OUTPUT}) if operators else options


def _absolute(run: str) -> str:
    """The absolute path of a run, or its URL unchanged, so that it holds after the script changes its directory.

    Raises:
        UsageError: there is no such directory.
    """
    from introspect_cli.store.pack import from_anywhere
    from introspect_cli.store.remote import is_remote

    if not is_remote(run) and not Path(run).exists():
        raise UsageError(f"there is no run at {run} to compare with")
    return from_anywhere(run)


def _check_rule(options: CaptureOptions) -> None:
    """Check that what `--steps`, `--until-nan` and `--keep-around` look at is recorded.

    Raises:
        UsageError: a condition names a value whose kind is not recorded, or no statistics are recorded.
    """
    for name in sorted(options.steps.names & _NEEDED.keys()):
        if _NEEDED[name] not in options.record:
            raise UsageError(
                f"a condition asks for {name}, and no {_NEEDED[name].value} is recorded: add it to --record"
            )
    if (options.steps.names - {"step"} or options.until_nan or options.keep_around) and not options.measures:
        raise UsageError(
            "conditions in --steps, --until-nan and --keep-around look at statistics: leave out --stats none"
        )


_NEEDED = {**dict.fromkeys(("loss", "median", "mean", "previous"), Kind.LOSS), "grad_norm": Kind.GRAD}
"""Kind that must be recorded for each name in a condition."""


_CHOSEN: dict[str, Callable[[Iterable[str]], Any]] = {
    "record": lambda texts: frozenset(map(Kind, choose(texts, KINDS, "kind", default=DEFAULT_KINDS))),
    "stats": lambda texts: choose(texts, STATS, "statistic", default=DEFAULT_STATS),
}
"""Options that take names out of a list, or `default`, `all` or `none`."""


_VALUE = re.compile(r"([^\[/]+)(?:/(input|output))?(\[.*)?", re.DOTALL)


class ValueName(NamedTuple):
    """A value by name: `blocks.0` and `blocks.0['hidden']` are outputs, `blocks.0/input[0]` is an input.

    Attributes:
        fqn: the module's name, with or without its root.
        kind: input or output.
        path: where in the nested value; "" for the value.
    """

    fqn: str
    kind: Kind
    path: str

    @classmethod
    def parse(cls, text: str) -> ValueName:
        """The value that a text names; without a path, an output's path is "" and an input's `[0]`.

        Raises:
            UsageError: the module's name is missing, or what follows `/` is neither `input` nor `output`.
        """
        if (named := _VALUE.fullmatch(text.strip())) is None:
            raise UsageError(f"{text!r} names no value: write blocks.0, blocks.0['hidden'] or blocks.0/input[0]")
        fqn, side, path = named.groups("")
        is_input = side == "input"
        return cls(fqn, Kind.INPUT if is_input else Kind.OUTPUT, path or "[0]" * is_input)

    def fits(self, fqn: str, kind: Kind, path: str) -> bool:
        """Whether a value is the one named: equal kind and path, and an equal FQN, with its root or without."""
        return kind is self.kind and path == self.path and self.fqn in (fqn, fqn.partition(".")[2])


class Pair(NamedTuple):
    """Two values, of which the first depends on the second.

    Attributes:
        text: as it was written.
        later: the value whose Jacobian it is.
        earlier: the value it is with respect to.
        norm: whether the Jacobian's norm is wanted, else the product with ones.
    """

    text: str
    later: ValueName
    earlier: ValueName
    norm: bool


def parse_pairs(products: Iterable[str], norms: Iterable[str]) -> tuple[Pair, ...]:
    """The pairs of all `--vjp` texts, then of all `--jacobian-norm` texts; a text is `OUTPUT:INPUT`.

    Raises:
        UsageError: a text does not name two values.
    """
    pairs = []
    for text, norm in [*((text, False) for text in products), *((text, True) for text in norms)]:
        later, _, earlier = text.partition(":")
        if not (later.strip() and earlier.strip()):
            raise UsageError(
                f"{text!r} does not name two values: write OUTPUT:INPUT, such as lm_head:blocks.0/input[0]"
            )
        pairs.append(Pair(text, ValueName.parse(later), ValueName.parse(earlier), norm))
    return tuple(pairs)

"""Options of a capture as people write them: by name, as text, with what they ask of one another checked.

Names of kinds and statistics, and pairs of values are checked here: nothing downstream meets an unknown one.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from introspect_cli.capture.options.capture_options import CaptureOptions, described
from introspect_cli.capture.options.option import DEFAULT_KINDS, DEFAULT_STATS, KINDS, SHORT, STATS
from introspect_cli.errors import UsageError, did_you_mean
from introspect_cli.records import Kind
from introspect_cli.schedule.rules import Rule, Schedule, parse_rule
from introspect_cli.selection import choose, words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


def options_of(given: Mapping[str, Any]) -> CaptureOptions:
    """Checked capture options from their names, as given on the command line or in a call.

    The path in `against` becomes absolute; operators are added to `record` where an option asks for them.

    Args:
        given: values by name of the option. `steps` is a schedule's text, `first` and `last` are numbers; an option
            that may be repeated is one text with commas, or several texts; one that is missing or empty has its
            default.

    Raises:
        UsageError: an option, kind or statistic is unknown, a schedule cannot be read, options contradict each other,
            or the run of `against` does not exist.
    """
    known = dict(described())
    names = [*known, *SHORT]
    for name in given:
        if name not in names:
            hint = did_you_mean(name, names) or ";"
            raise UsageError(f"capture has no option {name!r}{hint} choose from {', '.join(names)}")
    values = dict(given)
    for name in values.keys() & {name for name, option in known.items() if option.repeated}:
        texts = (values[name],) if isinstance(values[name], str) else tuple(values[name])
        if name in _CHOSEN:
            values[name] = _CHOSEN[name](texts) if values[name] else getattr(CaptureOptions, name)
        else:
            values[name] = words(texts) if known[name].commas else texts
    values["steps"] = _pop_schedule(values)
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


def _pop_schedule(values: dict[str, Any]) -> Schedule | Rule:
    """The schedule that `steps`, `first` and `last` make together: a step is wanted if any of the three wants it.

    Takes the three out of `values`; all steps where none is given. UsageError where one cannot be read.
    """
    steps, *ends = (values.pop(name, None) for name in ("steps", *SHORT))
    base = None if steps is None else parse_rule(str(steps))
    rules = [f"{name}({number})" for name, number in zip(SHORT, ends, strict=True) if number is not None]
    if not rules:
        return base or Schedule()
    if base is not None:
        rules.insert(0, f"steps({base.text!r})" if isinstance(base, Schedule) else base.text)
    return parse_rule(" | ".join(rules))


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
        name, bracket, rest = text.strip().partition("[")
        fqn, _, side = name.partition("/")
        if not fqn or side not in ("", "input", "output"):
            raise UsageError(f"{text!r} names no value: write blocks.0, blocks.0['hidden'] or blocks.0/input[0]")
        kind = Kind.INPUT if side == "input" else Kind.OUTPUT
        path = bracket + rest
        return cls(fqn, kind, path or ("[0]" if kind is Kind.INPUT else ""))

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
        later, _, earlier = (part.strip() for part in text.partition(":"))
        if not (later and earlier):
            raise UsageError(
                f"{text!r} does not name two values: write OUTPUT:INPUT, such as lm_head:blocks.0/input[0]"
            )
        pairs.append(Pair(text, ValueName.parse(later), ValueName.parse(earlier), norm))
    return tuple(pairs)

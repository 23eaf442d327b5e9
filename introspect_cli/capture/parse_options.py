"""Options of a capture as people write them: by name, as text, with what they ask of one another checked."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.option import check_pairs, parse_kinds, parse_size, parse_stats
from introspect_cli.capture.options import CaptureOptions, described, key
from introspect_cli.errors import UsageError
from introspect_cli.records import Kind
from introspect_cli.schedule import Schedule
from introspect_cli.schedules import (
    Epochs,
    EverySeconds,
    First,
    Last,
    OnePerReplica,
    Ranks,
    Rule,
    Steps,
    When,
    parse_rule,
)
from introspect_cli.selection import ALL_RANKS, ONE_PER_REPLICA, did_you_mean, words

if TYPE_CHECKING:
    from collections.abc import Mapping


def options_of(given: Mapping[str, Any]) -> CaptureOptions:
    """Options by name, checked: those of the command line, of a configuration file, of a call.

    Args:
        given: `steps` is the schedule's text and `every` its stride; what may be given several times is a text with
            commas or several texts; what is missing or empty has its default.

    Raises:
        UsageError: an option, a kind or a statistic is unknown, a bad schedule.
    """
    known = [*(key(name) for name, _ in described()), "every"]
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or ":"
            raise UsageError(f"no option of a capture is called {name!r}{hint} known are {', '.join(known)}")
    values = dict(given)
    record, stats = values.pop("record", ()), values.pop("stats", ())
    for name, option in described():
        if name in values and option.repeated:
            texts = [values[name]] if isinstance(values[name], str) else values[name]
            values[name] = words(texts) if option.commas else tuple(texts)
    rule = values.pop("schedule", None)
    values["schedule"] = Schedule.parse(values.pop("steps", None), values.pop("every", None))
    if rule is not None:
        values["rule"] = str(parse_rule(str(rule)))
    if values.get("max_size") is not None:
        values["max_size"] = parse_size(values["max_size"])
    if record:
        values["record"] = parse_kinds([record] if isinstance(record, str) else record)
    if stats:
        values["stats"] = parse_stats([stats] if isinstance(stats, str) else stats)
    options = CaptureOptions(**values)
    _check_rule(options)
    operators = options.level == "op" or options.vjp or options.jacobian_norm
    check_pairs((*options.vjp, *options.jacobian_norm))
    if options.level != "op" and (options.ops or options.views or options.all_dtypes):
        raise UsageError("--ops, --views and --all-dtypes say which operators are recorded: give --level op with them")
    return replace(options, record=options.record | {Kind.OP_OUTPUT}) if operators else options


def rule_of(options: CaptureOptions) -> Rule:
    """Which steps a capture keeps: those of its schedule, and what `first`, `last` and `when` add to them.

    Raises:
        UsageError: a rule cannot be read.
    """
    if options.rule is not None:
        return parse_rule(options.rule)
    base: list[Rule] = [Steps(str(options.schedule))] if options.schedule != Schedule() else []
    base += [EverySeconds(options.every_seconds)] if options.every_seconds is not None else []
    base += [Epochs(options.epochs)] if options.epochs is not None else []
    more: list[Rule] = [First(options.first)] if options.first is not None else []
    more += [Last(options.last)] if options.last is not None else []
    more += [When(options.when)] if options.when is not None else []
    if base:
        more.insert(0, functools.reduce(Rule.__and__, base))
    rule = functools.reduce(Rule.__or__, more) if more else None
    if options.ranks is None or options.ranks == ALL_RANKS:
        return rule or Steps()
    ranks = OnePerReplica() if options.ranks == ONE_PER_REPLICA else Ranks(options.ranks)
    return ranks if rule is None else ranks & rule


def _check_rule(options: CaptureOptions) -> None:
    """Make sure that what decides on steps can be known.

    Raises:
        UsageError: it cannot, or two options contradict each other.
    """
    own = [
        name
        for name in ("every_seconds", "epochs", "ranks", "first", "last", "when")
        if getattr(options, name) is not None
    ]
    own += ["steps"] if options.schedule != Schedule() else []
    if options.rule is not None and own:
        raise UsageError(
            f"--schedule says all of it: put --{own[0].replace('_', '-')} into it, or leave one of them out"
        )
    asked = {name for part in rule_of(options).parts if isinstance(part, When) for name in part.names}
    needed = {"loss": Kind.LOSS, "median": Kind.LOSS, "mean": Kind.LOSS, "previous": Kind.LOSS, "grad_norm": Kind.GRAD}
    for name in sorted(asked):
        if name in needed and needed[name] not in options.record:
            raise UsageError(
                f"a condition asks for {name}, and no {needed[name].value} is recorded: add it to --record"
            )
    if (asked - {"step"} or options.until_nan) and not options.measures:
        raise UsageError("--when and --until-nan look at statistics: leave out --stats none")

"""Which steps are meant: as people write them, and as rules that compose, `First(10) | Every(100) | Last(50)`."""

from introspect_cli.schedule.condition import NAMES, When
from introspect_cli.schedule.rule import ALWAYS, NEVER, Both, Either, Moment, Rule
from introspect_cli.schedule.rules import (
    Epochs,
    Every,
    EverySeconds,
    First,
    Last,
    OnePerReplica,
    Ranks,
    Schedule,
    parse_rule,
)
from introspect_cli.schedule.spans import STEPS_HELP, Span, span_of, whole_number

__all__ = [
    "ALWAYS", "NAMES", "NEVER", "STEPS_HELP", "Both", "Either", "Epochs", "Every", "EverySeconds", "First", "Last",
    "Moment", "OnePerReplica", "Ranks", "Rule", "Schedule", "Span", "When", "parse_rule", "span_of", "whole_number",
]  # fmt: skip

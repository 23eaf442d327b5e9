"""Calls that set a random state, in or just before a step, in one run alone or with another seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from introspect_cli.compare.say import event_words, found
from introspect_cli.compare.terms.names import generator_of
from introspect_cli.records import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.compare.terms.findings import Finding
    from introspect_cli.compare.terms.result import Divergence
    from introspect_cli.store.read.run import Run

DOCUMENT = "seedings"
"""The settings document that a capture notes it in; it is compared here alone."""

GENERATORS = {
    "torch.manual_seed": "torch",
    "torch.set_rng_state": "torch",
    "random.seed": "python",
    "random.setstate": "python",
    "numpy.random.seed": "numpy",
    "numpy.random.set_state": "numpy",
}
"""Which generator a function sets; `torch.manual_seed` sets those of accelerators too."""


@dataclass(frozen=True)
class SeedingCall:
    """A call that sets a random state, at one line, over a range of steps.

    Attributes:
        stage: `in` a step, or `before` what is first recorded of it.
        first: the first such step.
        last: the last one.
        number: how often it is called.
        by: the function.
        seed: what it is given at first: a seed, or `#` and a digest of a state.
        line: of the user's code; `-` for none.
    """

    stage: str
    first: int
    last: int
    number: int
    by: str
    seed: str
    line: str

    def __str__(self) -> str:
        """The function with its seed and its line: `torch.manual_seed(17) (train.py:12)`."""
        return event_words(self.by, self.seed, "", "" if self.line == "-" else self.line)


def seedings_change(by: str, one: str, two: str, line: str) -> Finding:
    """Finding where function `by` got two seeds, or two states (which begin with `#`)."""
    if two.startswith("#"):
        return found("set-state", by=by, line=line)
    return found("seeded", by=by, a=one, b=two, line=line)


def differing_calls(runs: tuple[Run, Run], first: Divergence) -> tuple[list[SeedingCall], list[SeedingCall]]:
    """Calls in a, and in b, that set the divergence's generator with a function and seed that the other run's lack.

    Those in the divergence's step; for a state at its start, those since the last recorded step before it began.
    """
    sides = []
    for run, step in zip(runs, (first.step, first.step_b), strict=True):
        recorded = run.rank(first.rank).entries["step"]
        before = recorded[recorded < step]
        since = int(before[-1]) if len(before) else step - 1
        begins = {"before": (since + 1, step), "in": (since, step - 1)}
        spans = begins if first.site.phase is Phase.START else {"in": (step, step)}
        sides.append(
            [
                each
                for each in _recorded_calls(run, first.rank)
                if each.stage in spans
                and _sets_generator(each.by, generator_of(first.site))
                and each.first <= spans[each.stage][1]
                and each.last >= spans[each.stage][0]
            ]
        )
    of_a, of_b = ({(each.by, each.seed) for each in side} for side in sides)
    one, two = ([each for each in side if (each.by, each.seed) not in of_a & of_b] for side in sides)
    return one, two


def find_differing_call(one: list[SeedingCall], two: list[SeedingCall]) -> Iterator[Finding]:
    """Finding where the runs set a state by other functions, with another seed, or in one run alone."""
    if one and two and one[0].by == two[0].by:
        yield seedings_change(one[0].by, one[0].seed, two[0].seed, two[0].line)
    else:
        yield from (found("set-in-one", by=str(each[0]), side=side) for each, side in ((one, "a"), (two, "b")) if each)


def _sets_generator(by: str, generator: str) -> bool:
    """Whether function `by` sets `generator`; `cuda:0` is set by `torch.cuda.*` and `torch.manual_seed*`."""
    return GENERATORS.get(by) == generator or (":" in generator and by.startswith(("torch.cuda.", "torch.manual_seed")))


def _recorded_calls(run: Run, rank: int) -> Iterator[SeedingCall]:
    """All recorded calls that set a state; malformed lines are skipped."""
    lines = run.settings_of(rank).document(DOCUMENT).get("set")
    for words in (str(line).split(" ") for line in lines) if isinstance(lines, list) else ():
        if len(words) >= 7 and all(word.isdecimal() and len(word) < 19 for word in words[1:4]):
            first, last, number = map(int, words[1:4])
            yield SeedingCall(words[0], first, last, number, words[4], words[5], " ".join(words[6:]))

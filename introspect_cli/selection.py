"""What of a run counts, as people write it: one grammar for every verb.

`capture` narrows what is recorded; `diff`, `show`, `export`, `check` and `report` narrow what is looked at. The same
words must mean the same in all of them, and a word that matches nothing must not pass for an answer: a filter with a
typo would find two runs equal for ever. So every verb reads its steps, kinds, module names and ranks here, and asks
here whether each part of a selection has something in the runs to select.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeVar

from introspect_cli.errors import UsageError, did_you_mean
from introspect_cli.records import Kind
from introspect_cli.schedule.rules import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from introspect_cli.store.run import Run


@dataclass(frozen=True)
class Option:
    """One option of a verb: its flags, and of a capture's whether a difference in it can explain a divergence.

    Attributes:
        heading: of the help.
        flags: names on the command line beside that of the field, or `--a/--no-a` in its place.
        help: one sentence, with the default.
        narrows: whether it makes a capture observe less, or something else, of the same training. Two runs that differ
            in it do not diverge because of that.
        in_manifest: whether it says anything about what is in the run.
        metavar: what stands for the value in the help.
        repeated: whether it may be given several times, as where its default is a collection.
        commas: whether commas part several values in one.
        choices: all values there are, None for any.
        least: smallest number allowed.
        most: largest number allowed.
    """

    heading: str
    flags: tuple[str, ...]
    help: str
    narrows: bool = False
    in_manifest: bool = True
    metavar: str | None = None
    repeated: bool = False
    commas: bool = True
    choices: tuple[str, ...] | None = None
    least: int | None = None
    most: int | None = None

    def named(self, name: str, default: object) -> Option:
        """A copy with the flag made from the field's name, and `repeated` set from its default.

        A default of True makes `--x/--no-x`; a flag with a slash among `flags` is used in place of the made one.

        Args:
            name: the field's name.
            default: the field's default; a tuple or frozenset means that the option may be repeated.
        """
        flags = self.flags
        if not any("/" in flag for flag in flags):
            flag = f"--{name.replace('_', '-')}"
            flag += f"/--no-{flag[2:]}" if default is True else ""
            short = [word for word in flags if not word.startswith("--")]
            flags = (*short, flag, *(word for word in flags if word not in short))
        return replace(self, flags=flags, repeated=isinstance(default, (tuple, frozenset)))


def words(texts: Iterable[str]) -> tuple[str, ...]:
    """Words of texts split at commas, stripped, without empty ones."""
    return tuple(word for text in texts for part in text.split(",") if (word := part.strip()))


def choose(
    texts: Iterable[str], names: Sequence[str], what: str, *, default: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Names chosen from a list, in the order of the list, each once; () where no text is given, and for `none`.

    Args:
        texts: names, also with commas between; `all` is every one of them.
        names: the names that there are.
        what: what they are called in an error, such as `kind`.
        default: what the name `default` stands for; None where the words `default` and `none` are not allowed.

    Raises:
        UsageError: a name is unknown, or `none` stands beside another; or texts are given that hold no word.
    """
    groups = {"all": tuple(names)} | ({} if default is None else {"default": tuple(default), "none": ()})
    texts = tuple(texts)
    asked = words(texts)
    if texts and not asked:
        raise UsageError(f"no {what} is given; choose from {', '.join((*names, *groups))}")
    if "none" in asked and "none" in groups and len(set(asked)) > 1:
        raise UsageError(f"'none' cannot be combined with another {what}: give it alone or leave it out")
    for name in asked:
        if name not in names and name not in groups:
            hint = did_you_mean(name, (*names, *groups))
            raise UsageError(f"unknown {what} {name!r}{hint or ';'} choose from {', '.join((*names, *groups))}")
    chosen = {one for name in asked for one in groups.get(name, (name,))}
    return tuple(name for name in names if name in chosen)


def parse_kinds(texts: Iterable[str]) -> frozenset[Kind]:
    """Kinds by name, also with commas between, `all` for every kind; empty where no text is given.

    Raises:
        UsageError: a kind is unknown, or no text holds a word.
    """
    return frozenset(Kind(name) for name in choose(texts, [kind.value for kind in Kind], "kind"))


ALL_RANKS = "all"
"""Word for every rank, beside their numbers."""


# Modules.


def matches(fqn: str, glob: str) -> bool:
    """Whether a glob matches all of a name, or all of it after its root (`blocks.*` matches `GPT.blocks.0`).

    Case counts; `*` matches dots, too. A glob equal to the name matches, whatever characters it has.
    """
    short = fqn.partition(".")[2]
    return fqn == glob or fnmatchcase(fqn, glob) or (bool(short) and fnmatchcase(short, glob))


def selects(fqn: str, globs: Sequence[str]) -> bool:
    """Whether any glob matches a name or a parent of it; False without globs.

    `blocks.0`, `GPT.blocks.0` and `*.0` all select `GPT.blocks.0`, its parameters, and every module in it; `=blocks.0`
    selects that name alone.
    """
    if any(glob.startswith("=") and matches(fqn, glob[1:]) for glob in globs):
        return True
    head = fqn if globs else ""
    while head:
        if any(matches(head, glob) for glob in globs):
            return True
        head = head.rpartition(".")[0]
    return False


def near_module(glob: str, names: Iterable[str]) -> str:
    """`; did you mean x?` for a glob near a name or its part after the root (`*.x`: its last part); else "".

    A glob that is near nothing is tried again without its first part.
    """
    last = glob.startswith("*.")
    shorts = {f"*.{name.rpartition('.')[2]}" if last else name.partition(".")[2] for name in names}
    candidates = sorted(shorts | {*names})
    return did_you_mean(glob, candidates) or did_you_mean(glob.partition(".")[2] or glob, candidates)


# All of it together.


@dataclass(frozen=True)
class Selection:
    """A part of a run.

    Attributes:
        steps: steps that count, as run a numbers them; None for all.
        kinds: kinds that count; empty for all.
        modules: globs of FQNs that count, each with all that is inside; empty for all.
        ranks: ranks that count; None for all.
    """

    steps: Schedule | None = None
    kinds: frozenset[Kind] = field(default_factory=frozenset)
    modules: tuple[str, ...] = ()
    ranks: Schedule | None = None

    @property
    def narrowed(self) -> bool:
        """Whether anything is left out: steps, kinds, modules or ranks."""
        return bool(self.steps or self.kinds or self.modules or self.ranks)

    def wants_step(self, step: int) -> bool:
        """Whether a step is selected."""
        return self.steps is None or self.steps.wants(step)

    def wants_rank(self, rank: int) -> bool:
        """Whether a rank is selected."""
        return self.ranks is None or self.ranks.wants(rank)

    def wants(self, kind: Kind, fqn: str) -> bool:
        """Whether both a kind and an FQN are selected."""
        return (not self.kinds or kind in self.kinds) and (not self.modules or selects(fqn, self.modules))


def read_selection(
    steps: str | Iterable[int] | None = None,
    kinds: str | Iterable[str] = (),
    modules: str | Iterable[str] = (),
    ranks: str | Iterable[int] | None = None,
) -> Selection:
    """A selection as the options of a verb say it (texts, with commas), or from numbers and names one by one.

    Ranks of None, "" or `all` are all of them.

    Raises:
        UsageError: a text is no schedule, kind or rank.
    """
    steps, ranks = (text if isinstance(text, str | None) else ",".join(map(str, text)) for text in (steps, ranks))
    return Selection(
        steps=None if steps is None else Schedule.parse(steps),
        kinds=parse_kinds([kinds] if isinstance(kinds, str) else kinds),
        modules=words([modules] if isinstance(modules, str) else modules),
        ranks=None if ranks in (None, "", ALL_RANKS) else Schedule.parse(str(ranks)),
    )


Chosen = TypeVar("Chosen", bound=Selection)


def check_selection(selection: Chosen, runs: Sequence[Run], rename: Callable[[str], str] | None = None) -> Chosen:
    """Check that each part of a selection (each rank, span of steps, kind, glob) matches something in some run.

    Kinds and globs are looked for in the selected ranks, in all of their steps. In runs without a step, only ranks are
    checked.

    Args:
        selection: what was asked for.
        runs: the opened runs that it is asked of.
        rename: gives the name in the second run of a module of the first, where the two are compared; None for the
            same.

    Returns:
        the selection as it is.

    Raises:
        UsageError: a glob matches no module or tensor, a kind was not recorded, a step or rank is in none of the runs.
    """
    if not selection.narrowed:
        return selection
    where, has = (f"{runs[0].path}", "it has") if len(runs) == 1 else ("either run", "they have")
    ranks = sorted({rank for run in runs for rank in run.ranks})
    for span in () if selection.ranks is None else selection.ranks.spans:
        if not any(map(span.wants, ranks)):
            raise UsageError(f"no rank {span} is in {where}: {_counted(ranks, 'rank')}")
    readers = [(run, run.rank(rank)) for run in runs for rank in run.ranks if selection.wants_rank(rank)]
    steps = sorted({int(step) for _, reader in readers for step in reader.entries["step"]})
    if not steps:
        return selection  # an empty run has nothing to select whatever is asked; the verb says that better
    for span in () if selection.steps is None else selection.steps.spans:
        if not any(span.wants(step) for step in steps):
            raise UsageError(f"no step of {span} is in {where}: {has} {_counted(steps, 'step')}")
    if selection.kinds:
        recorded = {kind for _, reader in readers for kind in reader.sites.kind}
        for kind in Kind:
            if kind in selection.kinds and kind.value not in recorded:
                raise UsageError(f"no {kind.value} was recorded in {where}{_how_to_record(kind, sorted(recorded))}")
    if selection.modules:
        names = set()
        for run, reader in readers:
            in_run = {*reader.sites.fqn, *(module.fqn for module in reader.modules)}
            names |= {rename(name) for name in in_run} if rename is not None and run is runs[0] else in_run
        for glob in selection.modules:
            if not any(selects(name, (glob,)) for name in names):
                hint = near_module(glob, names) or ": `introspect show tree` lists the modules of a run"
                raise UsageError(f"no module matches {glob}{hint}")
    return selection


def _counted(numbers: Sequence[int], what: str) -> str:
    """Steps or ranks (`what`), given rising, in words: `step 5` for a single one, else `12 steps from 0 to 11`."""
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    return f"{len(numbers)} {what}s from {numbers[0]} to {numbers[-1]}"


def _how_to_record(kind: Kind, recorded: Sequence[str]) -> str:
    """How to get a kind that was not recorded, to end an error: the capture option, and the kinds that are there."""
    if kind is Kind.OP_OUTPUT:
        return ": capture with --level op"
    return f": capture with --record {kind.value}, or ask for {', '.join(recorded)}"

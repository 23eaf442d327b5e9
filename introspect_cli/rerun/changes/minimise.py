"""What differs between two runs and can be changed by itself; the smallest set of settings that makes them diverge.

Two runs differ in their arguments, their environment, their seed. Running run a's command again with some of run b's
settings tells whether those suffice. Delta debugging (the `ddmin` algorithm: Zeller and Hildebrandt, "Simplifying and
isolating failure-inducing input", 2002) shrinks the set until taking any one setting out makes the runs agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from introspect_cli.compare.changes.statements import Change
from introspect_cli.compare.settings.documents import ARGUMENT, OPTION, arguments
from introspect_cli.compare.terms.result import DiffResult, Verdict
from introspect_cli.errors import UsageError
from introspect_cli.rerun.places.surroundings import OtherFile
from introspect_cli.rerun.variant import Reference, Rerun, Variant, capture
from introspect_cli.store.files.folders import REDACTED, RUNS
from introspect_cli.store.read.run import open_run
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence


@dataclass(frozen=True)
class Difference:
    """One setting that differs between the two runs.

    Attributes:
        axis: `argument`, `environment` or `capture` (an option of `introspect capture` that changes the run).
        name: option or variable.
        a: its value in run a; None where absent. A list for options of several values, True for a flag.
        b: its value in run b.
    """

    axis: str
    name: str
    a: Any
    b: Any


@dataclass(frozen=True)
class OtherPython:
    """Another interpreter, with other packages.

    Attributes:
        a: a's; "" for the one that runs this.
        b: b's.
        packages: how many packages differ in their version.
    """

    a: str
    b: str
    packages: int


Element: TypeAlias = "Change | OtherFile | Difference | OtherPython"


def place_of(element: Element) -> str:
    """Where an element is: `model.py:41`, `config.yaml`, `--lr`."""
    if isinstance(element, Change):
        return element.place
    return f"the interpreter {element.b}" if isinstance(element, OtherPython) else element.name


def counted(elements: Collection[Element]) -> str:
    """How many there are of what kind: `37 changes in 6 files and 2 differing settings`."""
    files = {element.file for element in elements if isinstance(element, Change)}
    files |= {element.name for element in elements if isinstance(element, OtherFile)}
    inside = sum(isinstance(element, Change | OtherFile) for element in elements)
    settings = count(len(elements) - inside, "differing setting")
    if not inside:
        return settings
    if inside == len(elements):
        return f"{count(inside, 'change')} in {count(len(files), 'file')}"
    return f"{count(inside, 'change')} in {count(len(files), 'file')} and {settings}"


def kind_of(element: Element) -> str:
    """What an element is, in one word."""
    if isinstance(element, Change):
        return element.unit
    return (
        "setting" if isinstance(element, Difference) else "python" if isinstance(element, OtherPython) else "other file"
    )


Item = TypeVar("Item")


def ddmin(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool]) -> Sequence[Item]:
    """A smallest set, in that no single item can be left out, on which `fails` is still true.

    Args:
        items: a set on which `fails` is true; the likeliest first, since these are asked about first.
        fails: the question; asked of subsets, in order, and never of the empty one.
    """
    parts = 2
    while len(items) > 1:
        size = max(len(items) // parts, 1)
        chunks = [items[start : start + size] for start in range(0, len(items), size)]
        rests = [[item for item in items if item not in chunk] for chunk in chunks]
        smaller = next((chunk for chunk in chunks if len(chunk) < len(items) and fails(chunk)), None)
        if smaller is not None:
            items, parts = smaller, 2
            continue
        smaller = next((rest for rest in rests if 0 < len(rest) < len(items) and len(chunks) > 2 and fails(rest)), None)
        if smaller is not None:
            items, parts = smaller, max(parts - 1, 2)
        elif size == 1:
            break
        else:
            parts = min(parts * 2, len(items))
    return items


_IRRELEVANT = frozenset(
    {"_", "COLUMNS", "HOME", "LINES", "LOGNAME", "OLDPWD", "PWD", "SHLVL", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY"}
    | {"TERM", "TMPDIR", "TMUX", "TMUX_PANE", "USER", "WINDOWID", "XDG_SESSION_ID", "INVOCATION_ID"}
)
"""Variables that name where and by whom a shell was opened."""


@dataclass(frozen=True)
class Smallest:
    """The answer.

    Attributes:
        settings: the smallest set found that makes the runs diverge; empty where that was not reproduced: run a's
            command unchanged diverges from it, or with all of b's settings does not.
        result: what the smallest set makes diverge.
        runs: captures it took.
        sentence: the answer in words.
        unknown: differences that cannot be reproduced (redacted values).
    """

    settings: tuple[Difference, ...]
    result: DiffResult | None
    runs: int
    sentence: str
    unknown: tuple[str, ...] = ()


def minimise(
    a: Path,
    b: Path,
    options: tuple[str, ...],
    words: tuple[str, ...],
    output: Path | None,
    until_step: int | None,
    tell: Callable[[str], None],
) -> Smallest:
    """Find which of the settings in which two runs differ make them diverge.

    Raises:
        UsageError: the runs do not part, or no setting that could be changed differs.
        StoreError: a run cannot be read.
    """
    with open_run(a) as one, open_run(b) as two:
        first, second = dict(one.settings), dict(two.settings)
        command = dict(first.get("command") or {})
    recorded = Reference(a).judge(Rerun(b, 0, 1))[1]
    if recorded is None or recorded.verdict is not Verdict.DIVERGED or recorded.first is None:
        raise UsageError(
            f"nothing to bisect: {recorded.sentence if recorded is not None else 'the runs cannot be compared'}"
        )
    differing, unknown = differences(first, second)
    if not differing:
        raise UsageError("the two runs differ in no argument, environment variable or seed that could be changed")
    script = words or ((command["script"],) if command.get("script") else ("-m", str(command.get("module"))))
    script = tuple(script[:2] if script[0] == "-m" else script[:1])
    place = (output or Path(RUNS) / f"settings-{a.name}-{b.name}").resolve()
    reference = Reference(a, recorded.first.step if until_step is None else until_step)
    given, ends = _arguments(first), reference.ends
    answers: dict[frozenset[str], tuple[bool, DiffResult | None]] = {}

    def diverges(chosen: Sequence[Difference]) -> bool:
        """Whether run a's command with these of run b's settings diverges from run a."""
        key = frozenset(f"{item.axis} {item.name}" for item in chosen)
        if key not in answers:
            as_in_b = applied(chosen, given)
            line = (*options, *ends, *as_in_b.options, *script, *command_line(as_in_b.arguments))
            made = capture(Variant(place / str(len(answers) + 1), line, Path.cwd(), as_in_b.environment))
            verdict, result = reference.judge(made)
            answers[key] = (verdict is Verdict.DIVERGED, result)
            what = f"a with b's {', '.join(item.name for item in chosen)}" if chosen else "a again, unchanged"
            said = {Verdict.SAME: "the same as a", Verdict.UNDECIDED: "cannot be told"}.get(verdict, "diverges from a")
            tell(f"{what}: {said}")
        return answers[key][0]

    smallest: tuple[Difference, ...] = ()
    result = None
    if diverges(()):
        result = answers[frozenset()][1]
        sentence = "running a again, unchanged, already diverges from a: the script is not deterministic by itself"
    elif not diverges(differing):
        sentence = "running a with all of b's settings does not diverge from a: something else differs between the runs"
    else:
        smallest = tuple(ddmin(differing, diverges))
        result = answers[frozenset(f"{item.axis} {item.name}" for item in smallest)][1]
        make = "together make" if len(smallest) > 1 else "makes"
        sentence = f"{len(smallest)} of {count(len(differing), 'differing setting')} {make} the runs diverge"
    return Smallest(smallest, result, len(answers), sentence, unknown)


def differences(a: dict[str, Any], b: dict[str, Any]) -> tuple[tuple[Difference, ...], tuple[str, ...]]:
    """The settings that differ and can be changed, and the names of those that cannot since their value is secret."""
    changeable, secret = [], []
    axes = {
        "argument": (_arguments(a), _arguments(b)),
        "environment": (_part(a, "environment"), _part(b, "environment")),
        "capture": (_part(a, "seeds"), _part(b, "seeds")),
    }
    for axis, (one, two) in axes.items():
        for name in sorted({*one, *two}):
            left, right = one.get(name), two.get(name)
            if left == right or (axis == "environment" and name in _IRRELEVANT):
                continue
            if REDACTED in (left, right):
                secret.append(name)
            else:
                changeable.append(Difference(axis, name, left, right))
    return tuple(changeable), tuple(secret)


def _part(settings: dict[str, Any], name: str) -> dict[str, Any]:
    value = settings.get(name)
    return value if isinstance(value, dict) else {}


def _arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """The script's own arguments, by name."""
    words = _part(settings, "command").get("arguments")
    return arguments(map(str, words)) if isinstance(words, list) else {}


@dataclass(frozen=True)
class Applied:
    """Settings of run a, some of them as in run b: capture options, the script's arguments by name, variables."""

    options: tuple[str, ...]
    arguments: dict[str, Any]
    environment: dict[str, str | None]


def applied(chosen: Iterable[Difference], given: Mapping[str, Any]) -> Applied:
    """What running a with these of b's settings takes."""
    words = dict(given)
    environment: dict[str, str | None] = {}
    options: list[str] = []
    for item in chosen:
        if item.axis == "argument":
            words[item.name] = item.b
        elif item.axis == "environment":
            environment[item.name] = item.b
        elif item.name == "seed" and item.b is not None:
            options += ["--seed", str(item.b)]
        elif item.name == "deterministic" and item.b:
            options.append("--deterministic")
    return Applied(tuple(options), words, environment)


def command_line(chosen: dict[str, Any]) -> list[str]:
    """Words that `arguments` reads as these: what stands by itself first, where no option takes it for its value."""
    line = [str(value) for name, value in chosen.items() if name.startswith(ARGUMENT) and value is not None]
    for name, value in chosen.items():
        if name.startswith(ARGUMENT) or value is None:
            continue
        if value is True:
            line.append(name)
        elif isinstance(value, list):
            line += [name, *map(str, value)]
        elif name.startswith("-") and value and not OPTION.match(value):
            line += [name, value]
        else:
            line.append(f"{name}={value}")
    return line

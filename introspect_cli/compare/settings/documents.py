"""Differences between all settings documents of two runs.

Files are compared in `files.py`, optimizers in `hyperparameters.py`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from introspect_cli.compare.say import told
from introspect_cli.compare.settings import beginning
from introspect_cli.compare.settings.differences import MOST_RANKS, Difference, describe, on_one_line, unequal_values
from introspect_cli.compare.settings.files import FILES, file_differences
from introspect_cli.compare.settings.hyperparameters import OPTIMIZERS, optimizer_differences
from introspect_cli.compare.terms.result import SettingChange
from introspect_cli.store.format.documents import gpu_names
from introspect_cli.texts import rank_list

if TYPE_CHECKING:
    from introspect_cli.store.read.run import Run

RUN_NOISE = re.compile(
    r"(^|[.\[' ])(time|started|ended|pid|uptime|load|hostname|output|cwd|tmp|temperature|free_?memory|boot)\b",
    re.IGNORECASE,
)
_NO_SETTINGS = frozenset({beginning.DOCUMENT, beginning.SEEDINGS_DOCUMENT, FILES, "operators"})
"""Documents that are compared elsewhere."""
_GIT = frozenset({"commit", "dirty"})
_OF_A_GPU = frozenset({"cudnn", "nccl"})
"""Versions that a process knows once it uses a GPU: that one run alone has them says no more than that it did."""


def differences(a: Run, b: Run) -> Iterator[Difference]:
    """All settings of two runs that differ, noise included; a document that one run alone kept is no difference.

    First the command line, then other documents in the order of a, files that were read if both recorded them, and the
    options of `capture` that change a training. The script's folder does not count if both kept their sources.
    Seedings, draws and operators' arguments are compared elsewhere.
    """
    settings_a, settings_b = ({n: run.settings[n] for n in run.settings if n not in _NO_SETTINGS} for run in (a, b))
    words_a, words_b = argv_of(settings_a, a.manifest), argv_of(settings_b, b.manifest)
    same_name = words_a and words_b and PurePath(words_a[0]).name == PurePath(words_b[0]).name
    if same_name and "sources" in settings_a and "sources" in settings_b:
        words_b[0] = words_a[0]  # what the script holds has a hash; its folder explains nothing
    yield from _document_differences("command", command_options(words_a), command_options(words_b))
    for source in settings_a:
        if source != "command" and source in settings_b:  # what one capture was asked not to keep is no change
            yield from _document_differences(source, settings_a[source], settings_b[source])
    if all(FILES in run.settings for run in (a, b)):
        yield from file_differences(a, b)
    options_a, options_b = (run.manifest.get("options", {}) for run in (a, b))
    for name in ("seed", "deterministic", "compile", "perturb"):
        if options_a.get(name) != options_b.get(name):
            yield Difference("options", f"--{name}", options_a.get(name), options_b.get(name))


def _document_differences(source: str, a: Mapping[str, object], b: Mapping[str, object]) -> Iterator[Difference]:
    """Differences within the settings document `source`, by the rules of that document.

    A source file of one run alone has the value `imported`. Of `git` only commit (10 characters) and `dirty` count;
    versions of cuDNN and NCCL only if both runs have them.
    """
    if source in {"built", OPTIMIZERS}:
        yield from (built_differences if source == "built" else optimizer_differences)(a, b)
        return
    for name, one, two in unequal_values(a, b):
        if source == "sources":
            both = one is not None and two is not None
            yield Difference(source, name, *((one, two) if both else (one and "imported", two and "imported")))
        elif source == "hardware" and name == "gpus":
            yield Difference(source, "GPU", *(gpu_names(value) if value else "none used" for value in (one, two)))
        elif source == "git" and name in _GIT:
            yield Difference(source, name, *(value[:10] if isinstance(value, str) else value for value in (one, two)))
        elif source != "git" and not (source == "runtime" and name in _OF_A_GPU and None in (one, two)):
            yield Difference(source, name, one, two)


def notes_on_some_ranks(a: Run, b: Run) -> list[str]:
    """Notes on optimizers and flags that differ on some ranks, but not on the lowest, whose settings stand for the run.

    The first `MOST_RANKS` common ranks are compared. With zero or NaN gradients nothing else would show such a change.
    """
    ranks = [rank for rank in a.recorded if rank in b.recorded][:MOST_RANKS]
    notes: dict[SettingChange, list[int]] = {}
    for rank in ranks if len(ranks) > 1 else ():
        one, two = (run.settings_of(rank) for run in (a, b))
        for source in (OPTIMIZERS, "runtime"):
            for change in (
                _document_differences(source, one[source], two[source]) if source in one and source in two else ()
            ):
                if not RUN_NOISE.search(change.name):
                    shown = SettingChange(source, change.name, *on_one_line(change.a, change.b))
                    notes.setdefault(shown, []).append(rank)
    return [
        told("on-some-ranks", ranks=rank_list(these), change=describe(change), source=change.source)
        for change, these in notes.items()
        if ranks[0] not in these
    ]


# --- a script's command line

OPTION = re.compile(r"-(?!\.?\d).", re.DOTALL)
"""Begins the name of an option; `-3` is a number."""

ARGUMENT = "argument "
"""Begins the names of arguments that stand by themselves; no option has a space in it."""

_ASSIGNED = re.compile(r"[\w.+]+=")
_AGAIN = re.compile(r"(.+) \(\d+\)")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)


def arguments(argv: Iterable[str]) -> dict[str, Any]:
    """A command line by name, in its order.

    Args:
        argv: words; `--lr 1e-3`, `--lr=1e-3` and `lr=1e-3` are alike.

    Returns:
        An option's value, True for a flag, and a list where several words follow it; `argument 0` and so on for what
        stands by itself. Of `-p lr=1 -p depth=2`, `-p lr` and `-p depth`; of what else is given again, `-v (2)`.
    """
    values: dict[str, Any] = {}
    option, position = "", 0
    for word in argv:
        if OPTION.match(word):
            given, equals, value = word.partition("=")
            again = (f"{given} ({number})" for number in itertools.count(2))
            option = next(name for name in itertools.chain([given], again) if name not in values)
            values[option] = True
            if equals:
                _set_option(values, option, value)
                option = ""
        elif option and values[option] is True:
            option = _set_option(values, option, word)
        elif _ASSIGNED.match(word):
            name, _, value = word.partition("=")
            values[name] = value
            option = ""
        elif option:
            so_far = values[option]
            values[option] = [*so_far, word] if isinstance(so_far, list) else [so_far, word]
        else:
            values[f"{ARGUMENT}{position}"] = word
            position += 1
    return values


def _set_option(values: dict[str, Any], option: str, value: str) -> str:
    """Set an option's value in `values` and return its name there.

    Of a value like `lr=1`, the entry `-p` becomes `-p lr`.
    """
    if _ASSIGNED.match(value):
        del values[option]
        name, _, value = value.partition("=")
        option = f"{option.partition(' ')[0]} {name}"
    values[option] = value
    return option


def command_options(argv: Iterable[str]) -> dict[str, str]:
    """A command line to compare: each option with its first value, `given` for a flag, then arguments by position.

    Further words after an option count as arguments. Of a number that is given again the last counts, as for nearly all
    parsers.
    """
    options = arguments(argv)
    alone = [value for name, value in options.items() if name.startswith(ARGUMENT)]
    named: dict[str, str] = {}
    for given, value in options.items():
        again = _AGAIN.fullmatch(given)
        name = again[1] if again and _NUMBER.fullmatch(str(value)) else given
        if isinstance(value, list):
            named[name] = value[0]
            alone += value[1:]
        elif not name.startswith(ARGUMENT):
            named[name] = "given" if value is True else value
    return named | {f"{ARGUMENT}{position}": value for position, value in enumerate(alone)}


def argv_of(settings: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    """Words of the script's command line, the script first: of the settings, else of the manifest.

    [] where they are not on record.
    """
    command = settings.get("command")
    argv = command.get("argv") if isinstance(command, Mapping) else None
    if not isinstance(argv, (list, tuple)):
        argv = manifest.get("argv", [])
    return [str(word) for word in argv]


# --- things that a run built


def built_differences(a: Any, b: Any) -> Iterator[Difference]:
    """Differences of objects that both runs built (loaders, schedulers, scalers), named `object (line): attribute`.

    Lines do not count, nor how often a scheduler has the same functions: it has one for each of the optimizer's groups.
    Attributes below one that differs itself are left out.

    Args:
        a: the document of a: by kind, by object, attributes by name.
        b: that of b.
    """
    for kind in _shared_keys(a, b):
        one_side, other_side = a[kind], b[kind]
        for thing in _shared_keys(one_side, other_side):
            one, two = one_side[thing], other_side[thing]
            if not (isinstance(one, Mapping) and isinstance(two, Mapping)):
                continue
            lines = list(dict.fromkeys(str(built["line"]) for built in (one, two) if "line" in built))
            where = f"{thing} ({' and '.join(lines)})" if lines else str(thing)
            changes = [change for change in unequal_values(one, two) if change[0] != "line"]
            # a sampler of another class has other attributes
            others = tuple(f"{name}{sign}" for name, _, _ in changes for sign in ".[")
            alone = [change for change in changes if not change[0].startswith(others)]
            for name, x, y in alone:
                if name != "lr_lambdas" or _names_in(x) != _names_in(y):
                    yield Difference(kind, f"{where}: {name}", x, y)


def _names_in(value: Any) -> set[str]:
    """The quoted names in a list's text, each once: {"a", "b"} of "['a', 'b', 'a']"."""
    return {*re.findall(r"'([^']*)'", str(value))}


def _shared_keys(a: Any, b: Any) -> list[Any]:
    """Keys of both mappings, in the order of `a`; [] where either is no mapping."""
    return [key for key in a if key in b] if isinstance(a, Mapping) and isinstance(b, Mapping) else []

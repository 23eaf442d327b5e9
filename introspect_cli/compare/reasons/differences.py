"""A recorded value that differs between two runs: nested values compared, command lines, things built, and words.

Flat mappings are compared directly; nested ones by deepdiff, imported only then.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from introspect_cli.texts import count

if TYPE_CHECKING:
    from introspect_cli.compare.result import SettingChange


class Difference(NamedTuple):
    """A recorded value that differs.

    Attributes:
        source: the document that it is in: `command`, `packages`, `optimizers`, `files`, ...
        name: what it is called within its source, as it is shown.
        a: its value in a; None where only b has it.
        b: its value in b; None where only a has it.
        about: what it is about, where `name` says more: `lr` of `lr (group 1)`, the value in a configuration file.
        of: the optimizers that have it, in words, where not all do.
    """

    source: str
    name: str
    a: Any
    b: Any
    about: str = ""
    of: str = ""


READ = "read"
"""The value of a file that one run alone read."""

_SWITCHES = {
    "matmul_allow_tf32": "TF32 in matrix products",
    "cudnn_allow_tf32": "TF32 in cuDNN",
    "fp16_reduced_precision_reduction": "reduced precision in sums of float16 products",
    "bf16_reduced_precision_reduction": "reduced precision in sums of bfloat16 products",
    "fp16_accumulation": "accumulation in float16",
    "flash_sdp": "flash attention",
    "mem_efficient_sdp": "memory-efficient attention",
    "math_sdp": "attention by plain operators",
    "cudnn_sdp": "attention by cuDNN",
    "cudnn_enabled": "cuDNN",
    "cudnn_benchmark": "the benchmark that chooses cuDNN's kernels",
    "cudnn_deterministic": "determinism of cuDNN",
    "deterministic_algorithms": "torch.use_deterministic_algorithms",
}
"""Flags that are on or off, as a sentence calls them."""

_LONGEST = 80
_AROUND = 20


def on_one_line(one: Any, two: Any) -> tuple[str | None, str | None]:
    """A setting's two values on one line each, None for none; of long ones what is around the first difference."""
    a, b = (None if value is None else f"{value:g}" if isinstance(value, float) else str(value) for value in (one, two))
    if a is None or b is None:
        start = 0
    else:
        shared = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        start = max(shared - _AROUND, 0) if max(len(a), len(b)) > _LONGEST else 0
    return _cut(a, start), _cut(b, start)


def _cut(text: str | None, start: int) -> str | None:
    """A text from a place on, and no longer than a line has room for."""
    if text is None:
        return None
    rest = f"...{text[start:]}" if start else text
    return rest if len(rest) <= _LONGEST else rest[: _LONGEST - 3] + "..."


def unequal(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(name, value in a, value in b) of what is not equal in two mappings; None for what one lacks."""
    return ((name, a.get(name), b.get(name)) for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name))


def _flat(value: Any) -> bool:
    return isinstance(value, Mapping) and not any(isinstance(item, (Mapping, list, tuple)) for item in value.values())


def unequal_values(a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, value in a, value in b) for each difference; None on the side that lacks it."""
    if a == b:
        return
    if (_flat(a) or not a) and (_flat(b) or not b):
        a, b = a or {}, b or {}
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from ((str(name), one, two) for name, one, two in unequal(a, b))
            return
    yield from _nested(a, b)


def _nested(a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """Differences of nested values, as deepdiff finds them."""
    from deepdiff import DeepDiff

    delta = DeepDiff(a, b, view="tree", verbose_level=2, ignore_order=False)
    for kind in delta:
        for level in delta[kind]:
            name = re.sub(r"^root", "", level.path() or "")
            name = re.sub(r"\['([^'\]]*)'\]", r".\1", name).lstrip(".")
            values = None if "added" in kind else level.t1, None if "removed" in kind else level.t2
            yield name or "value", *values


# --- a script's command line

OPTION = re.compile(r"-(?!\.?\d).", re.DOTALL)
"""Begins the name of an option; `-3` is a number."""

ARGUMENT = "argument "
"""Begins the names of arguments that stand by themselves; no option has a space in it."""

_ASSIGNED = re.compile(r"[\w.+]+=")


def arguments(argv: Iterable[str]) -> dict[str, Any]:
    """A command line by name, in its order.

    Args:
        argv: words; `--lr 1e-3`, `--lr=1e-3` and `lr=1e-3` are alike.

    Returns:
        An option's value, True for a flag, and a list where several words follow it; `argument 0` and so on for what
        stands by itself.
    """
    values: dict[str, Any] = {}
    option, position = "", 0
    for word in argv:
        if OPTION.match(word):
            option, equals, value = word.partition("=")
            values[option] = value if equals else True
            if equals:
                option = ""
        elif option and values[option] is True:
            values[option] = word
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


def command_options(argv: Iterable[str]) -> dict[str, str]:
    """A command line to compare: each option with one value, `given` for a flag, and the rest by position.

    What else follows an option is as often a separate argument as a further value, and is never hidden by an
    option that explains nothing.
    """
    options = arguments(argv)
    alone = [value for name, value in options.items() if name.startswith(ARGUMENT)]
    named: dict[str, str] = {}
    for name, value in options.items():
        if isinstance(value, list):
            named[name] = value[0]
            alone += value[1:]
        elif not name.startswith(ARGUMENT):
            named[name] = "given" if value is True else value
    return named | {f"{ARGUMENT}{position}": value for position, value in enumerate(alone)}


def argv_of(settings: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    """The words of the script's command line, the script first; none where they are not on record."""
    command = settings.get("command")
    argv = command.get("argv") if isinstance(command, Mapping) else None
    if not isinstance(argv, (list, tuple)):
        argv = manifest.get("argv")
    return [str(word) for word in argv] if isinstance(argv, (list, tuple)) else []


# --- things that a run built


def built_differences(a: Any, b: Any) -> Iterator[Difference]:
    """What differs between things that both runs built, such as loaders, with where that was; by kind."""
    for kind in _shared(a, b):
        one_side, other_side = a[kind], b[kind]
        for thing in _shared(one_side, other_side):
            one, two = one_side[thing], other_side[thing]
            if not (isinstance(one, Mapping) and isinstance(two, Mapping)):
                continue
            lines = list(dict.fromkeys(str(built["line"]) for built in (one, two) if "line" in built))
            where = f"{thing} ({' and '.join(lines)})" if lines else str(thing)
            changes = [change for change in unequal_values(one, two) if change[0] != "line"]
            # a sampler of another class has other attributes
            others = tuple(f"{name}{sign}" for name, _, _ in changes for sign in ".[")
            alone = [change for change in changes if not change[0].startswith(others)]
            for name, x, y in _mappings(alone, {*one, *two}):
                yield Difference(kind, f"{where}: {name}", x, _reordered(x, y))


def _mappings(changes: Iterable[tuple[str, Any, Any]], names: Collection[str]) -> Iterator[tuple[str, Any, Any]]:
    """Changes, those of one mapping (`stoi.a`, `stoi.b` where `stoi` itself is no value) put together."""
    groups: dict[str, list[tuple[str, Any, Any]]] = {}
    for change in changes:
        holder, _, _ = change[0].rpartition(".")
        groups.setdefault(change[0] if not holder or holder in names else holder, []).append(change)
    for holder, members in groups.items():
        if len(members) == 1:
            yield members[0]
            continue
        sides = ({name[len(holder) + 1 :]: values[side] for name, *values in members} for side in (0, 1))
        one, two = ({name: value for name, value in side.items() if value is not None} or None for side in sides)
        yield holder, one, two


def _reordered(one: Any, two: Any) -> Any:
    """The second value, or that it has the items of the first in another order."""
    try:
        a, b = ast.literal_eval(one), ast.literal_eval(two)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return two
    same = isinstance(a, (list, tuple)) and type(a) is type(b) and Counter(map(repr, a)) == Counter(map(repr, b))
    return f"the same {count(len(a), 'item')} in another order" if same else two


def _shared(a: Any, b: Any) -> list[Any]:
    """The keys of two mappings that both have, in the first one's order."""
    return [key for key in a if key in b] if isinstance(a, Mapping) and isinstance(b, Mapping) else []


# --- in words


def describe(change: SettingChange) -> str:
    """A change like a diff: `lr 0.0003 -> 0.001`, `model.py changed`, `--amp, set only in b`."""
    if change.source in {"sources", "files"} and change.a == "":
        return f"{change.name} {change.b}"
    switched = {"True": "a", "False": "b"}.get(str(change.a)) if {change.a, change.b} == {"True", "False"} else None
    if switched and change.source == "runtime" and change.name in _SWITCHES:
        return f"{_SWITCHES[change.name]} is on in {switched} only"
    only = ", set only in" if change.source in {"command", "environment", "options"} else " only in"
    name = "uncommitted changes" if (change.source, change.name) == ("git", "dirty") else change.name
    if change.a is None:
        tail = "" if change.b in {"given", "imported", READ, None} else f"{_sign(name)}{change.b}"
        return f"{name}{tail}{only} b"
    if change.b is None:
        tail = "" if change.a in {"given", "imported", READ} else f"{_sign(name)}{change.a}"
        return f"{name}{tail}{only} a"
    return f"{name} {change.a} -> {change.b}"


def _sign(name: str) -> str:
    return " " if name.startswith("-") else " = "

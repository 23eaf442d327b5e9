"""Arrays that another framework dumped, read into records: each is named by its site.

A name is `[step=K/][rankN/]KIND/NAME[/callN]`, as a path below the directory, a key in an archive, or both joined:
`step=0/output/h.0.mlp.npy`, or `output/h.0.mlp` in `step=0.npz`. Components of the name are joined by dots, and what
begins with a bracket is the value's path in nested inputs or outputs. A phase may stand before the kind where it is not
the usual one: `optimizer/param/...` is a parameter after the step.

Which was computed first is not in a directory listing. An archive of numpy's keeps the order in which it was written;
numbers before kinds (`0007-output/...`) tell it; otherwise kinds and names are sorted, and it is said.

The files are read as those of checkpoints are (`tensor_files`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.errors import StoreError, UsageError
from introspect_cli.exchange.incoming import Incoming, Row, Stored
from introspect_cli.exchange.tensor_files import ARRAYS, read_any
from introspect_cli.records import USUAL_PHASES, Kind, Phase, Site, SiteInfo
from introspect_cli.selection import selects
from introspect_cli.store.tensorfile import NUMPY, widened
from introspect_cli.tensors.arrays import summary_of
from introspect_cli.texts import shallow

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ORDER_UNKNOWN = "the order in which values were computed is not known: sites were sorted by kind and name"

_PHASES, _KINDS = "|".join(phase.value for phase in Phase), "|".join(kind.value for kind in USUAL_PHASES)
_NAME = re.compile(
    r"(?:step[=_-]?(?P<step>\d{1,18})(?:/|\Z))?"
    r"(?:rank[=_-]?(?P<rank>\d{1,6})(?:/|\Z))?"
    r"(?:(?P<order>\d{1,18})[-_.](?=[a-z]))?"
    rf"(?:(?P<phase>{_PHASES})/(?=(?:{_KINDS})(?:/|\Z)))?"
    rf"(?:(?P<kind>{_KINDS})(?:/|\Z))?"
    r"(?P<name>.*?)"
    r"(?:/call[=_-]?(?P<call>\d{1,9}))?",
    re.DOTALL,
)
"""The name of an array; each part may be missing."""


def read_arrays(
    paths: Sequence[tuple[str, Path]], kind: Kind | None, root: str, whole: Sequence[str]
) -> tuple[list[Incoming], list[Stored], bool]:
    """Every step of every rank as records, by rising step and then rank; arrays to keep; whether an order was made up.

    Records are in order of the numbers before their kinds where all of a step have one, else in the order of a single
    `.npz` archive, else sorted by kind and name.

    Args:
        paths: the files, each with its name below the directory, without its ending.
        kind: the kind of arrays whose name says none.
        root: what is put before names.
        whole: globs of the modules and tensors whose values are kept.

    Raises:
        StoreError: a file or an element type cannot be read, or two arrays are of one site.
        UsageError: a name does not say what it is of.
    """
    steps: dict[tuple[int, int], list[tuple[int | None, int, Row]]] = defaultdict(list)
    seen: dict[tuple[int, int, Site], str] = {}
    stored: list[Stored] = []
    for below, path in paths:
        for name, tensor in read_any(path).items():
            words = "/".join(word for word in (below, name) if word)
            if tensor.unread:
                lost = "; bfloat16 loses its name in numpy's files: save it as float32 or as .safetensors"
                raise StoreError(f"{words} in {path}: {tensor.unread}{lost * (tensor.dtype == 'void16')}")
            step, rank, order, site = parse_name(words, kind, root)
            key = step, rank, site
            if key in seen:
                raise StoreError(f"{seen[key]} and {words} are of the same site: give one of them another name")
            seen[key] = words
            summary = summary_of(tensor, widened)
            if selects(site.fqn, whole):
                bits = np.concatenate([*tensor.read(), np.empty(0, NUMPY[tensor.dtype])])
                stored.append((summary.checksum, bits.data.cast("B"), tensor.dtype, tensor.shape))
            rows = steps[step, rank]
            rows.append((order, len(rows), (site, SiteInfo(), summary)))
    in_order = len(paths) == 1 and paths[0][1].suffix == ".npz"
    made_up = False
    for rows in steps.values():
        if all(order is not None for order, _, _ in rows):
            rows.sort(key=lambda item: (item[0] or 0, item[1]))
        elif not in_order:
            made_up = True
            rows.sort(key=lambda item: _natural_key(item[2][0]))
    incoming = [Incoming(*place, tuple(row for _, _, row in rows)) for place, rows in sorted(steps.items())]
    return incoming, stored, made_up


def find_arrays(source: Path) -> list[tuple[str, Path]]:
    """The files of arrays of a directory, or the one file that is named, each with what it adds to its arrays' names.

    Sorted by path; empty for a file that does not end in one of ARRAYS. A `.npy` file adds its path without the ending;
    an archive of a directory its folder, and its own name only where that is a step, a rank or a kind; an archive that
    is named itself adds nothing. Links are passed over.
    """
    if source.is_file():
        return [(source.stem if source.suffix == ".npy" else "", source)] if source.suffix in ARRAYS else []
    paths = [path for end in ARRAYS for path in source.rglob(f"*{end}") if path.is_file() and not path.is_symlink()]
    named = []
    for path in sorted(paths):
        words = path.relative_to(source).with_suffix("").as_posix()
        # What an archive is called says something only if it is a step or a rank: model-00001-of-00002 is no name.
        if path.suffix != ".npy" and (match := _NAME.fullmatch(path.stem)) and match["name"]:
            words = words.rpartition("/")[0]
        named.append((words, path))
    return named


def parse_name(words: str, kind: Kind | None = None, root: str = "") -> tuple[int, int, int | None, Site]:
    """Parse an array's name, such as `step3/rank0/output/model.h.0`: step, rank, order and site.

    The order is the number before the kind. It is None, and step, rank and call are 0, where the name has none. An
    input without a path gets `[0]`; a batch or a loss without a name is called `DataLoader` or `loss`.

    Args:
        words: the name.
        kind: the kind where the name has none.
        root: what is put before the names of modules and tensors, not of batches and losses; "" for nothing.

    Raises:
        UsageError: it has no kind, and none is given; or nothing after it.
    """
    match = _NAME.fullmatch("/".join(part for part in words.split("/") if part not in ("", ".")))
    assert match is not None  # any text is a name
    named = Kind(match["kind"]) if match["kind"] else kind
    if named is None:
        raise UsageError(f"the name {words!r} does not say what it is of: put a kind before it, as in output/{words}")
    phase = Phase(match["phase"]) if match["phase"] else USUAL_PHASES[named]
    name, bracket, path = match["name"].replace("/", ".").partition("[")
    if named is Kind.INPUT and not bracket:
        bracket, path = "[", "0]"  # the first argument, as a capture names it
    default = {Kind.BATCH: "DataLoader", Kind.LOSS: "loss"}.get(named, "")
    name = ".".join(part for part in (root if named not in (Kind.BATCH, Kind.LOSS) else "", name) if part) or default
    if not name:
        raise UsageError(f"the name {words!r} ends with its kind: put the module or tensor after it")
    step, rank, call = (int(match[number] or 0) for number in ("step", "rank", "call"))
    order = None if match["order"] is None else int(match["order"])
    return step, rank, order, Site(phase, named, name, call, shallow(bracket + path))


def _natural_key(site: Site) -> tuple[object, ...]:
    """A key that sorts by phase, kind and name, numbers in names by their size; in backward passes kinds in reverse."""
    numbers = [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", site.fqn) if part]
    kind = list(USUAL_PHASES).index(site.kind)
    if site.phase is Phase.BACKWARD:
        kind = -kind  # the gradient of an output comes before that of an input
    return list(Phase).index(site.phase), kind, numbers, site.call, site.path

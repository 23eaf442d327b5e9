"""Files that a run read, and how those of two runs differ.

Configuration files are compared value by value, other kept texts up to their first line that differs, the rest by
digest. A comment or another order of keys is no change, nor is a file with equal content at another place. Texts are
untrusted: parsing is limited.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from introspect_cli.compare.settings.differences import READ, Difference, unequal_values
from introspect_cli.errors import StoreError
from introspect_cli.texts import begin_alike, clean

if TYPE_CHECKING:
    from introspect_cli.store.run import Run

FILES = "files"
"""The document that says what a run read, and the source of what differs in it."""

_CHECKPOINTS = frozenset(
    {".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".npz", ".npy", ".h5", ".pkl", ".msgpack", ".distcp"}
)
_MOST = 20
_LONGEST = 60
_MOST_NODES = 20_000


class ReadFile(NamedTuple):
    """A file that a run read.

    Attributes:
        name: as the run names it.
        digest: of its content; None where that is not on record.
    """

    run: Run
    name: str
    digest: Any
    size: Any

    @property
    def content_key(self) -> tuple[Any, Any]:
        """Key by which files have equal content: digest and size."""
        return self.digest, self.size

    @property
    def ending(self) -> str:
        """Lower-case suffix of the name: `.yaml`."""
        return PurePath(self.name).suffix.lower()

    def text(self) -> str | None:
        """The text, decoded, not cached; None where the run did not keep it or it is damaged."""
        if not isinstance(self.digest, str) or self.digest not in self.run.kept_sources:
            return None
        try:
            data = self.run.source(self.digest)
        except StoreError:
            return None
        return None if data is None else data.decode("utf-8", "replace")


def files_of(run: Run) -> dict[str, ReadFile]:
    """Files that a run read, by name; entries that stand for many files are left out. {} where none is on record."""
    return {
        str(name): ReadFile(run, str(name), document.get("digest"), document.get("size"))
        for name, document in run.settings.document(FILES).items()
        if isinstance(document, Mapping) and not document.get("many")
    }


def tensor_files(run: Run) -> dict[str, str]:
    """Names of the files of tensors that a run read, by digest, or by name where there is no digest."""
    return {str(file.digest or name): name for name, file in files_of(run).items() if holds_tensors(name)}


def holds_tensors(name: str) -> bool:
    """Whether a file's name ends as those of tensors do: `.pt`, `.safetensors`, `.npz`."""
    return PurePath(name).suffix.lower() in _CHECKPOINTS


# --- two runs


def file_differences(a: Run, b: Run) -> Iterator[Difference]:
    """Differences of files that were read: values of configuration, else the first line, else digests.

    A file that one run alone read has the value `READ`. Files that both runs imported as sources are left out.
    """
    one, two = files_of(a), files_of(b)
    imported = [run.settings.document("sources") for run in (a, b)]
    pairs, only_a, only_b = _paired_files(one, two)
    for first, second in pairs:
        if not (first in imported[0] and second in imported[1]):  # those are among the sources
            yield from _differences_of_pair(one[first], two[second])
    yield from (Difference(FILES, name, READ, None) for name in only_a)
    yield from (Difference(FILES, name, None, READ) for name in only_b)


def _paired_files(
    a: Mapping[str, ReadFile], b: Mapping[str, ReadFile]
) -> tuple[list[tuple[str, str]], list[str], list[str]]:
    """(pairs of names in a and b, names in a alone, names in b alone).

    Paired are equal names, then files of equal content, then of equal basename, then of equal ending. The last three
    count only where just one file left in each run has it.
    """
    pairs = [(name, name) for name in a if name in b]
    only_a, only_b = ([name for name in names_in if name not in other] for names_in, other in ((a, b), (b, a)))
    for key in (
        lambda of, name: of[name].content_key,
        lambda _, name: PurePath(name).name,
        lambda of, name: of[name].ending,
    ):
        keys_a, keys_b = ([key(of, name) for name in names] for of, names in ((a, only_a), (b, only_b)))
        for at, name in list(enumerate(only_a)):
            if keys_a.count(keys_a[at]) == keys_b.count(keys_a[at]) == 1:
                other = only_b[keys_b.index(keys_a[at])]
                pairs.append((name, other))
        only_a = [name for name in only_a if all(name != first for first, _ in pairs)]
        only_b = [name for name in only_b if all(name != second for _, second in pairs)]
    return pairs, only_a, only_b


def _differences_of_pair(a: ReadFile, b: ReadFile) -> Iterator[Difference]:
    """Differences of two paired files; none where their content is equal or a digest is missing.

    Of configuration the first `_MOST` values, of other texts the first line that differs; where a text is not there,
    one difference, of the digests.
    """
    if a.content_key == b.content_key or not (a.digest and b.digest):
        return
    text_a, text_b = a.text(), b.text()
    if text_a is not None and text_b is not None:
        shown = a.name if a.name == b.name else f"{a.name} and {b.name}"
        values = parsed(text_a, a.ending), parsed(text_b, b.ending)
        if None not in values:
            for value, x, y in islice(unequal_values(*values), _MOST):
                yield Difference(FILES, f"{shown}: {value}", x, y, value)
            return
        for line, x, y in first_unequal_line(text_a, text_b):
            yield Difference(FILES, f"{shown}:{line}", x, y, f"{x} {y}")
    else:
        yield Difference(FILES, a.name if a.name == b.name else f"{a.name} and {b.name}", a.digest, b.digest)


# --- a text


def parsed(text: str, ending: str) -> Any:
    """JSON, YAML, TOML or INI as nested data, by the file's `ending`.

    None for another ending, malformed text, more than `_MOST_NODES` values, and what is no list or mapping; for TOML
    also before Python 3.11.
    """
    try:
        if ending == ".json":
            content = json.loads(text)
        elif ending in {".yaml", ".yml"}:
            content = _parsed_yaml(text)
        elif ending == ".toml" and sys.version_info >= (3, 11):
            import tomllib

            content = tomllib.loads(text)
        elif ending in {".ini", ".cfg", ".conf"}:
            content = _ini_sections(text)
        else:
            return None
    except (ValueError, yaml.YAMLError, RecursionError):
        return None
    return content if isinstance(content, (dict, list)) and _is_small(content) else None


def _ini_sections(text: str) -> dict[str, dict[str, str]] | None:
    """Sections of an INI text, each as a dictionary; None where it is malformed."""
    import configparser

    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(text)
        return {section: dict(parser.items(section)) for section in parser.sections()}
    except configparser.Error:
        return None


def _is_small(root: Any) -> bool:
    """Whether nested data or YAML nodes are at most `_MOST_NODES`, with aliases followed."""
    waiting, count = [root], 0
    while waiting:
        value = waiting.pop()
        count += not isinstance(value, tuple)  # a key with its value
        if count > _MOST_NODES:
            return False
        inside = value.value if isinstance(value, yaml.CollectionNode) else value
        if isinstance(inside, dict):
            waiting.extend(inside.values())
        elif isinstance(inside, (list, tuple)):
            waiting.extend(inside)
    return True


def _parsed_yaml(text: str) -> Any:
    """The data of a YAML text; None where it is empty or too large. yaml.YAMLError where it is malformed."""
    if text.count("*") > _MOST_NODES or text.count("\n") > _MOST_NODES:
        return None
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None or not _is_small(node):
            return None
        return loader.construct_document(node)
    finally:
        loader.dispose()


def first_unequal_line(a: str, b: str) -> Iterator[tuple[int, str | None, str | None]]:
    """(line number, line of a, line of b) of the first lines that differ; None for a missing one.

    The number is that in b, in a where b has no such line. Lines are cut to `_LONGEST` characters. Blank lines and
    indentation count for nothing; nothing where all else is equal.
    """
    one, two = ([(n, text.strip()) for n, text in enumerate(whole.splitlines(), 1) if text.strip()] for whole in (a, b))
    at = begin_alike([text for _, text in one], [text for _, text in two])
    x, y = (lines[at] if at < len(lines) else None for lines in (one, two))
    if x or y:
        yield (y or x or (0, ""))[0], x and clean(x[1], _LONGEST), y and clean(y[1], _LONGEST)


def read_by_one(a: Run, b: Run) -> set[str]:
    """Basenames of the files that either run alone read; files of one basename are one."""
    one, two = (set(map(file_name, run.settings.document(FILES))) for run in (a, b))
    return one ^ two


def file_name(path: object) -> str:
    """The last part of a path."""
    return PurePath(str(path)).name

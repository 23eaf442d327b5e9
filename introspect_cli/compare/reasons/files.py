"""Files that two runs read and that differ: configuration value by value, others as another file.

A text is parsed as its ending says, with the limits of a store: it came from somebody's disk. What cannot be parsed is
compared line by line. A comment or another order of keys is no change, and a file that lies elsewhere and holds the
same is none either.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from introspect_cli.errors import StoreError
from introspect_cli.texts import clean

if TYPE_CHECKING:
    from introspect_cli.store.reader import Run

READ = "read"
"""The value of a file that one run alone read."""
_MOST = 20
_LONGEST = 60
_MOST_NODES = 20_000
_CHECKPOINTS = frozenset({".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".npz", ".npy", ".h5", ".pkl", ".msgpack"})


class FileChange(NamedTuple):
    """What differs of a file.

    Attributes:
        name: the file, and a value in it.
        a: the value in a; "" of a file that is another one.
        b: the value in b; of a file that is another one, how it differs.
        value: the name of the value in it; "" where the file is none of configuration.
        checkpoint: whether its ending is one of files that hold tensors.
    """

    name: str
    a: Any
    b: Any
    value: str = ""
    checkpoint: bool = False


def file_changes(a: Run, b: Run, nested: Callable[[Any, Any], Iterable[tuple[str, Any, Any]]]) -> Iterator[FileChange]:
    """What differs between the files that two runs read."""
    one, two = (_documents(run) for run in (a, b))
    imported = [
        sources if isinstance(sources, Mapping) else {}
        for sources in (a.settings.get("sources"), b.settings.get("sources"))
    ]
    pairs, only_a, only_b = _paired(one, two)
    for first, second in pairs:
        if first in imported[0] and second in imported[1]:
            continue  # told among the sources
        yield from _changes(a, b, (first, one[first]), (second, two[second]), nested)
    for name in only_a:
        yield FileChange(name, READ, None, checkpoint=_ending(name) in _CHECKPOINTS)
    for name in only_b:
        yield FileChange(name, None, READ, checkpoint=_ending(name) in _CHECKPOINTS)


def tensor_files(run: Run) -> dict[str, str]:
    """The names of the files of tensors that a run read, by digest, since a copy of one is no other; else by name."""
    return {
        str(document.get("digest") or name): name
        for name, document in _documents(run).items()
        if _ending(name) in _CHECKPOINTS
    }


def _documents(run: Run) -> dict[str, Mapping[str, Any]]:
    """What a run says of single files, by name."""
    documents = run.settings.get("files")
    if not isinstance(documents, Mapping):
        return {}
    return {
        str(name): document
        for name, document in documents.items()
        if isinstance(document, Mapping) and not document.get("many")
    }


def _ending(name: str) -> str:
    return PurePath(name).suffix.lower()


def _content(document: Mapping[str, Any]) -> tuple[Any, Any]:
    return document.get("digest"), document.get("size")


def _paired(
    a: Mapping[str, Mapping[str, Any]], b: Mapping[str, Mapping[str, Any]]
) -> tuple[list[tuple[str, str]], list[str], list[str]]:
    """Files of a beside files of b: by name, else the same bytes, the same last part, the only one of its ending."""
    pairs = [(name, name) for name in a if name in b]
    only_a, only_b = ([name for name in names_in if name not in other] for names_in, other in ((a, b), (b, a)))
    for key in (
        lambda of, name: _content(of[name]),
        lambda _, name: PurePath(name).name,
        lambda _, name: _ending(name),
    ):
        keys_a, keys_b = ([key(of, name) for name in names] for of, names in ((a, only_a), (b, only_b)))
        for at, name in list(enumerate(only_a)):
            if keys_a.count(keys_a[at]) == keys_b.count(keys_a[at]) == 1:
                other = only_b[keys_b.index(keys_a[at])]
                pairs.append((name, other))
        only_a = [name for name in only_a if all(name != first for first, _ in pairs)]
        only_b = [name for name in only_b if all(name != second for _, second in pairs)]
    return pairs, only_a, only_b


def _changes(
    a: Run,
    b: Run,
    one: tuple[str, Mapping[str, Any]],
    two: tuple[str, Mapping[str, Any]],
    nested: Callable[[Any, Any], Iterable[tuple[str, Any, Any]]],
) -> Iterator[FileChange]:
    (name, first), (other, second) = one, two
    if _content(first) == _content(second) or not (first.get("digest") and second.get("digest")):
        return
    text_a, text_b = _text(a, first), _text(b, second)
    checkpoint = _ending(name) in _CHECKPOINTS
    if text_a is not None and text_b is not None:
        shown = name if name == other else f"{name} and {other}"
        values = parsed(text_a, _ending(name)), parsed(text_b, _ending(other))
        if None not in values:
            for count, (value, x, y) in enumerate(nested(*values)):
                if count < _MOST:
                    yield FileChange(f"{shown}: {value}", x, y, value)
            return
        for line, x, y in _lines(text_a, text_b):
            yield FileChange(f"{shown}:{line}", x, y, f"{x} {y}")
    elif name != other:
        yield FileChange(name, "", f"was read in a, {other} in b", checkpoint=checkpoint)
    else:
        sizes = [document.get("size") for document in (first, second)]
        how = "of the same size" if sizes[0] == sizes[1] else f"{sizes[0]:,} bytes in a, {sizes[1]:,} in b"
        yield FileChange(name, "", f"is another file ({how})", checkpoint=checkpoint)


def _text(run: Run, document: Mapping[str, Any]) -> str | None:
    digest = document.get("digest")
    if not isinstance(digest, str) or digest not in run.kept_sources:
        return None
    try:
        data = run.source(digest)
    except StoreError:
        return None
    return None if data is None else data.decode("utf-8", "replace")


def parsed(text: str, ending: str) -> Any:
    """A configuration file as nested plain data; None where it is of no format that is known, or none of it."""
    try:
        if ending == ".json":
            content = json.loads(text)
        elif ending in {".yaml", ".yml"}:
            content = _yaml(text)
        elif ending == ".toml" and sys.version_info >= (3, 11):
            import tomllib

            content = tomllib.loads(text)
        elif ending in {".ini", ".cfg", ".conf"}:
            content = _sections(text)
        else:
            return None
    except (ValueError, yaml.YAMLError, RecursionError):
        return None
    return content if isinstance(content, (dict, list)) and _few(content) else None


def _sections(text: str) -> dict[str, dict[str, str]] | None:
    import configparser

    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(text)
        return {section: dict(parser.items(section)) for section in parser.sections()}
    except configparser.Error:
        return None


def _few(root: Any) -> bool:
    """Whether nested data, or YAML's nodes with their aliases followed, is few enough to be compared one by one."""
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


class _Loader(yaml.SafeLoader):
    """Takes tags of the script's for plain values, and gives up where aliases make much of little."""


def _untagged(loader: Any, suffix: str, node: Any) -> Any:
    value: Any
    if isinstance(node, yaml.MappingNode):
        value = loader.construct_mapping(node, deep=True)
    elif isinstance(node, yaml.SequenceNode):
        value = loader.construct_sequence(node, deep=True)
    else:
        value = loader.construct_scalar(node)
    return {f"!{suffix}": value}


_Loader.add_multi_constructor("!", _untagged)
_Loader.add_multi_constructor("tag:yaml.org,2002:python/", _untagged)


def _yaml(text: str) -> Any:
    if text.count("*") > _MOST_NODES or text.count("\n") > _MOST_NODES:
        return None
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None or not _few(node):
            return None
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _lines(a: str, b: str) -> Iterator[tuple[int, str | None, str | None]]:
    """Number in b and both texts of the lines that differ."""
    one, two = a.splitlines(), b.splitlines()
    if len(one) + len(two) > _MOST_NODES:
        at = next((n for n, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), min(len(one), len(two)))
        yield at + 1, _line(one, at), _line(two, at)
        return
    count = 0
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, one, two, autojunk=True).get_opcodes():
        for at in range(max(i2 - i1, j2 - j1) if tag != "equal" else 0):
            x, y = _line(one[:i2], i1 + at), _line(two[:j2], j1 + at)
            count += 1
            if count <= _MOST and (x or y):
                yield j1 + at + 1, x, y


def _line(lines: list[str], at: int) -> str | None:
    return clean(lines[at].strip(), _LONGEST) or None if at < len(lines) else None

"""What differs between the documents of two runs: settings, optimizers, what was built, and the files that they read.

A file of configuration is compared value by value, others as another file. A text is parsed as its ending says, with
the limits of a store: it came from somebody's disk. What cannot be parsed is compared line by line. A comment or
another order of keys is no change, and a file that lies elsewhere and holds the same is none either.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import yaml

from introspect_cli.compare.reasons import beginning, seedings
from introspect_cli.compare.reasons.differences import (
    READ,
    Difference,
    argv_of,
    built_differences,
    command_options,
    describe,
    on_one_line,
    unequal_values,
)
from introspect_cli.compare.reasons.hyperparameters import OPTIMIZERS, optimizer_differences
from introspect_cli.compare.result import SettingChange
from introspect_cli.errors import StoreError
from introspect_cli.store.format.documents import gpu_names
from introspect_cli.texts import clean, rank_list

if TYPE_CHECKING:
    from introspect_cli.store.read.run import Run

FILES = "files"
"""The document that says what a run read, and the source of what differs in it."""

_MOST = 20
_LONGEST = 60
_MOST_NODES = 20_000
_CHECKPOINTS = frozenset({".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".npz", ".npy", ".h5", ".pkl", ".msgpack"})

RUN_NOISE = re.compile(
    r"(^|[.\[' ])(time|started|ended|pid|uptime|load|hostname|output|cwd|tmp|temperature|free_?memory|boot)\b"
)
_NO_SETTINGS = frozenset({beginning.DOCUMENT, seedings.DOCUMENT, FILES, "operators"})
"""Documents that are compared elsewhere."""
_GIT = frozenset({"commit", "dirty"})
_OF_A_GPU = frozenset({"cudnn", "nccl"})
"""Versions that a process knows once it uses a GPU: that one run alone has them says no more than that it did."""


def differences(a: Run, b: Run) -> Iterator[Difference]:
    """All settings that differ, from two runs' settings and manifests."""
    settings_a, settings_b = ({n: run.settings[n] for n in run.settings if n not in _NO_SETTINGS} for run in (a, b))
    words_a, words_b = argv_of(settings_a, a.manifest), argv_of(settings_b, b.manifest)
    same_name = words_a and words_b and PurePath(words_a[0]).name == PurePath(words_b[0]).name
    if same_name and "sources" in settings_a and "sources" in settings_b:
        words_b[0] = words_a[0]  # what the script holds has a hash; its folder explains nothing
    for change in unequal_values(command_options(words_a), command_options(words_b)):
        yield Difference("command", *change)
    for source in settings_a:
        if source != "command" and source in settings_b:  # what one capture was asked not to keep is no change
            yield from _of_document(source, settings_a[source], settings_b[source])
    if all(FILES in run.settings for run in (a, b)):
        yield from file_differences(a, b)
    given = [run.manifest.get("options") for run in (a, b)]
    options_a, options_b = (options if isinstance(options, Mapping) else {} for options in given)
    for name in ("seed", "deterministic", "compile", "perturb"):
        if options_a.get(name) != options_b.get(name):
            yield Difference("options", f"--{name}", options_a.get(name), options_b.get(name))


def _of_document(source: str, a: Mapping[str, object], b: Mapping[str, object]) -> Iterator[Difference]:
    if source in {"built", OPTIMIZERS}:
        yield from (built_differences if source == "built" else optimizer_differences)(a, b)
        return
    for name, one, two in unequal_values(a, b):
        if source == "sources":
            both = one is not None and two is not None
            yield Difference(source, name, *(("", "changed") if both else (one and "imported", two and "imported")))
        elif source == "hardware" and name == "gpus":
            yield Difference(source, "GPU", *(gpu_names(value) if value else "none used" for value in (one, two)))
        elif source == "git" and name in _GIT:
            yield Difference(source, name, *(value[:10] if isinstance(value, str) else value for value in (one, two)))
        elif source != "git" and not (source == "runtime" and name in _OF_A_GPU and None in (one, two)):
            yield Difference(source, name, one, two)


_MOST_RANKS = 16
"""Ranks that are looked at: each has documents of settings. `check` compares all ranks of a run."""


def on_some_ranks(a: Run, b: Run) -> list[str]:
    """Sentences on optimizers and flags that differ on some ranks and not on the lowest, whose settings are the run's.

    Another rank's learning rate may have changed without a trace in any number, where gradients are zero or NaN: then
    nothing diverges, and nothing else would tell of it.
    """
    ranks = [rank for rank in a.recorded if rank in b.recorded][:_MOST_RANKS]
    notes: dict[SettingChange, list[int]] = {}
    for rank in ranks if len(ranks) > 1 else ():
        one, two = (run.settings_of(rank) for run in (a, b))
        for source in (OPTIMIZERS, "runtime"):
            for change in _of_document(source, one[source], two[source]) if source in one and source in two else ():
                if not RUN_NOISE.search(change.name.lower()):
                    shown = SettingChange(source, change.name, *on_one_line(change.a, change.b))
                    notes.setdefault(shown, []).append(rank)
    return [
        f"On {rank_list(these)} alone a setting differs: {describe(change)} ({change.source})."
        for change, these in notes.items()
        if ranks[0] not in these
    ]


# --- files


def file_differences(a: Run, b: Run) -> Iterator[Difference]:
    """What differs between the files that two runs read: values of configuration; else b is how the file differs."""
    one, two = (_documents(run) for run in (a, b))
    imported = [
        sources if isinstance(sources, Mapping) else {}
        for sources in (a.settings.get("sources"), b.settings.get("sources"))
    ]
    pairs, only_a, only_b = _paired(one, two)
    for first, second in pairs:
        if not (first in imported[0] and second in imported[1]):  # those are among the sources
            yield from _differences(a, b, (first, one[first]), (second, two[second]))
    yield from (Difference(FILES, name, READ, None) for name in only_a)
    yield from (Difference(FILES, name, None, READ) for name in only_b)


def holds_tensors(name: str) -> bool:
    """Whether a file is one of tensors, by its ending."""
    return _ending(name) in _CHECKPOINTS


def tensor_files(run: Run) -> dict[str, str]:
    """The names of the files of tensors that a run read, by digest, since a copy of one is no other; else by name."""
    return {
        str(document.get("digest") or name): name for name, document in _documents(run).items() if holds_tensors(name)
    }


def _documents(run: Run) -> dict[str, Mapping[str, Any]]:
    """What a run says of single files, by name."""
    documents = run.settings.get(FILES)
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


def _differences(
    a: Run, b: Run, one: tuple[str, Mapping[str, Any]], two: tuple[str, Mapping[str, Any]]
) -> Iterator[Difference]:
    (name, first), (other, second) = one, two
    if _content(first) == _content(second) or not (first.get("digest") and second.get("digest")):
        return
    text_a, text_b = _text(a, first), _text(b, second)
    if text_a is not None and text_b is not None:
        shown = name if name == other else f"{name} and {other}"
        values = parsed(text_a, _ending(name)), parsed(text_b, _ending(other))
        if None not in values:
            for value, x, y in islice(unequal_values(*values), _MOST):
                yield Difference(FILES, f"{shown}: {value}", x, y, value)
            return
        for line, x, y in _lines(text_a, text_b):
            yield Difference(FILES, f"{shown}:{line}", x, y, f"{x} {y}")
    elif name != other:
        yield Difference(FILES, name, "", f"was read in a, {other} in b")
    else:
        sizes = [document.get("size") for document in (first, second)]
        how = "of the same size" if sizes[0] == sizes[1] else f"{sizes[0]:,} bytes in a, {sizes[1]:,} in b"
        yield Difference(FILES, name, "", f"is another file ({how})")


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
    """A configuration file as nested plain data; None where it is of no format that is read, or is malformed."""
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

"""JSON Schemas of what verbs print with `--format json`, made from the types of their results.

Which keys the document has is found by making it, of results in which everything is there and of results in which as
little as possible is. What a key means and which type it has is what its dataclass says of the field of that name. So a
field that is added to the result reaches the schema as soon as it reaches the document.
"""

from __future__ import annotations

import ast
import datetime as dt
import json
import re
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from inspect import getsource
from pathlib import Path
from typing import Any

from introspect_cli.compare.groups import Groups
from introspect_cli.compare.result import DiffResult
from introspect_cli.health.findings import CheckResult, Rule
from introspect_cli.inspect.data_flow import Graph
from introspect_cli.inspect.module_tree import ModuleRow  # noqa: TC001 - read when the schema is made
from introspect_cli.inspect.overview import History, Overview, Stored
from introspect_cli.inspect.runs import RunList
from introspect_cli.records import Record  # noqa: TC001 - read when the schema is made
from introspect_cli.render import json as documents
from introspect_cli.render.json import FORMAT
from introspect_cli.rerun.bisect import Culprit
from introspect_cli.rerun.changes.search import Proof


@dataclass(frozen=True)
class Tree:
    """The modules of a run.

    Attributes:
        modules: in order, each before those inside it.
    """

    modules: tuple[ModuleRow, ...]


@dataclass(frozen=True)
class Records:
    """The records of a step.

    Attributes:
        step: the step.
        labels: what the training framework calls it; None for no framework.
        records: in the order of recording.
    """

    step: int
    labels: Mapping[str, Any] | None
    records: tuple[Record, ...]


@dataclass(frozen=True)
class Histories:
    """A statistic of sites over all steps.

    Attributes:
        stat: the statistic.
        histories: one a site.
    """

    stat: str
    histories: tuple[History, ...]


@dataclass(frozen=True)
class Values:
    """Whole tensors.

    Attributes:
        values: one a record.
    """

    values: tuple[Stored, ...]


@dataclass(frozen=True)
class Settings:
    """The settings of a run.

    Attributes:
        settings: by document, as the YAML files below `settings/` of the run have them.
    """

    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Rules:
    """The health rules.

    Attributes:
        rules: in the order in which they are listed.
    """

    rules: tuple[Rule, ...]


def generic(one: Any) -> dict[str, Any]:
    """The document of a result, field by field."""
    return documents.document(**vars(one))


DOCUMENTS: dict[str, tuple[str, str, type, Any]] = {
    "diff": (
        "introspect diff A B --format json",
        "A comparison of two runs, of two checkpoints, or of a run with a checkpoint.",
        DiffResult,
        documents.diff_document,
    ),
    "groups": (
        "introspect diff A B C... --format json",
        "More than two runs, by what they agree with.",
        Groups,
        generic,
    ),
    "check": (
        "introspect check RUN --format json",
        "What the health rules find in a run.",
        CheckResult,
        documents.check_document,
    ),
    "show": ("introspect show RUN --format json", "What a run is.", Overview, generic),
    "show-tree": ("introspect show tree RUN --format json", "The modules of a run.", Tree, generic),
    "show-step": ("introspect show step N RUN --format json", "The records of a step.", Records, generic),
    "show-history": (
        "introspect show history SITE RUN --format json",
        "A statistic of sites over all steps.",
        Histories,
        generic,
    ),
    "show-values": (
        "introspect show values NAME RUN --format json",
        "Whole tensors that a run has stored.",
        Values,
        generic,
    ),
    "show-graph": (
        "introspect show graph RUN --format json",
        "The operators of a step, and what flows between them.",
        Graph,
        generic,
    ),
    "show-settings": ("introspect show settings RUN --format json", "The settings of a run.", Settings, generic),
    "rules": ("introspect check --list --format json", "The health rules.", Rules, generic),
    "runs": ("introspect runs --format json", "Runs below some directories.", RunList, generic),
    "bisect": (
        "introspect bisect --good REV SCRIPT --format json",
        "The first commit that diverges.",
        Culprit,
        generic,
    ),
    "bisect-changes": (
        "introspect bisect --changes A B --format json",
        "The smallest set of changes that makes two runs diverge.",
        Proof,
        generic,
    ),
}
"""Of each schema: the command, what it prints, the dataclass of its result, and what makes the document of one."""

NAMED_OTHERWISE = {
    ("DiffResult", "findings"): "explains",
    ("Divergence", "noise"): "floor",
    ("CodeChanges", "changes"): "ranked",
    ("CheckResult", "not_observed"): "unseen",
    ("ModuleRow", "class"): "module_class",
    ("ModuleRow", "output_shape"): "shape",
    ("ModuleRow", "output_dtype"): "dtype",
    ("ModuleRow", "output_std"): "scale",
    ("Rule", "rule"): "id",
}
"""Keys of documents whose field has another name."""

NUMBER = {"$ref": "#/$defs/number"}
ANY_KEY = "*"
"""Stands for the keys of a mapping in a sample."""

RARE = {
    "Divergence": {
        "rel_l2_below": {
            "description": "stands where sketches cannot tell the values apart: the distance is below this number",
            **NUMBER,
        }
    },
    "ModuleRow": {
        "variable": {
            "description": "of a root, what the script called it; null where that is not known",
            "type": ["string", "null"],
        }
    },
}
"""Keys that no sample has as they may be."""

Definitions = dict[str, Any]


def schema(name: str) -> Definitions:
    """The whole schema of one of `DOCUMENTS`."""
    title, about, cls, _ = DOCUMENTS[name]
    definitions: Definitions = {
        "number": {
            "description": 'a number; infinities are "inf" and "-inf", and NaN is null',
            "anyOf": [{"type": ["number", "null"]}, {"enum": ["inf", "-inf"]}],
        }
    }
    top = _object(cls, (name,), definitions)
    del top["description"]
    version = "version of this document; keys are added under the same version, none is removed"
    top["properties"]["format"] = {"description": version, "const": FORMAT}
    if NUMBER["$ref"] not in json.dumps([top, definitions]):
        del definitions["number"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "description": about,
        **top,
        "$defs": dict(sorted(definitions.items())),
    }


def _object(cls: type, place: tuple[Any, ...], definitions: Definitions) -> Definitions:
    """The schema of what the document has for a dataclass at a place."""
    document = _at(place)
    try:
        least = _at(place, bare=cls)
    except (KeyError, IndexError):  # it stands only where it has all of it
        least = document
    types_of, said = hints(cls), attributes(cls)
    for name, hint in list(types_of.items()):
        inside = next((one for one in (hint, *typing.get_args(hint)) if _is_record(one)), None)
        if inside is not None and name not in document:  # its fields may stand among those of the outer one
            optional = type(None) in typing.get_args(hint)
            inner = {one: typing.Optional[of] if optional else of for one, of in hints(inside).items()}  # noqa: UP045 - of a type that is given
            types_of, said = inner | types_of, attributes(inside) | said
    whole: Definitions = {"description": _about(cls), "type": "object"}
    properties: Definitions = {}
    for key, value in document.items():
        if key == ANY_KEY:
            whole["additionalProperties"] = {"anyOf": [NUMBER, {"type": "string"}]}
            continue
        name = NAMED_OTHERWISE.get((cls.__name__, key), key)
        kind = _type(types_of[name], value, (*place, key), definitions) if name in types_of else _guess(value)
        if isinstance(least, dict) and key in least and least[key] is None and value is not None:
            kind = kind if kind == NUMBER or "null" in json.dumps(kind) else {"anyOf": [kind, {"type": "null"}]}
        properties[key] = {"description": said[name], **kind} if name in said else kind
    properties |= RARE.get(cls.__name__, {})
    whole["required"] = [key for key in document if key in least and key != ANY_KEY]
    return {**whole, "properties": properties}


def _type(hint: Any, value: Any, place: tuple[Any, ...], definitions: Definitions) -> Definitions:
    """The schema of a field by its type, and by a value that the document has for it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        options = [_type(one, value, place, definitions) for one in arguments if one is not type(None)]
        if options == [NUMBER]:
            return NUMBER
        return {"anyOf": [*options, *([{"type": "null"}] if type(None) in arguments else [])]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (tuple, list) and isinstance(value, (list, tuple)):
        if origin is list or arguments[1:] == (Ellipsis,):
            kinds = typing.get_args(arguments[0]) if len(value) > 1 else arguments[:1]  # a sample has one of each
            each = [_type(one, value[at], (*place, at), definitions) for at, one in enumerate(kinds)]
            return {"type": "array", "items": each[0] if len(each) == 1 else {"anyOf": each}}
        each = [_type(one, value[at], (*place, at), definitions) for at, one in enumerate(arguments)]
        return {"type": "array", "prefixItems": each, "minItems": len(each), "maxItems": len(each)}
    if _is_record(hint) and isinstance(value, dict):
        if hint.__name__ not in definitions:
            definitions[hint.__name__] = {}  # it may hold others of its kind
            definitions[hint.__name__] = _object(hint, place, definitions)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if isinstance(hint, type) and issubclass(hint, Enum):
        values = [member.value for member in hint]
        return {"enum": values if value in values else [member.name.lower() for member in hint]}
    return _guess(value)


def _guess(value: Any) -> Definitions:
    """The schema of a value that nothing else says more of."""
    if isinstance(value, float):
        return NUMBER
    names = {bool: "boolean", int: "integer", str: "string", dict: "object", list: "array"}
    return {"type": names[type(value)]} if type(value) in names else {}


def _at(place: tuple[Any, ...], bare: type | None = None) -> Any:
    """What stands at a place, which begins with the name of a document."""
    name, *keys = place
    value = _document(name, bare)
    for key in keys:
        value = value[key]
    return value


@cache
def _document(name: str, bare: type | None = None) -> Any:
    _, _, cls, make = DOCUMENTS[name]
    return make(_sample(cls, bare))


def _sample(cls: type, bare: type | None) -> Any:
    """A value of a dataclass with everything in it; of the class `bare`, with as little as its types allow."""
    types_of = hints(cls)
    names = [field.name for field in fields(cls) if field.init] if is_dataclass(cls) else cls._fields
    return cls(**{name: _value(types_of[name], bare, least=cls is bare) for name in names})


def _is_record(hint: Any) -> bool:
    """Whether a type is a dataclass or a named tuple."""
    return isinstance(hint, type) and (is_dataclass(hint) or hasattr(hint, "_fields"))


def _value(hint: Any, bare: type | None, *, least: bool) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if least and type(None) in arguments:
            return None
        return _value(next(one for one in arguments if one is not type(None)), bare, least=least)
    if origin is typing.Literal:
        return arguments[0]
    if origin in (tuple, list):
        if origin is tuple and arguments[1:] != (Ellipsis,):
            return tuple(_value(one, bare, least=least) for one in arguments)
        union = typing.get_origin(arguments[0]) in (typing.Union, types.UnionType)
        kinds = typing.get_args(arguments[0]) if union else arguments[:1]
        return origin([] if least else [_value(one, bare, least=False) for one in kinds])
    if origin in (dict, Mapping):
        return {} if least else {ANY_KEY: 0.5}
    if _is_record(hint):
        return _sample(hint, bare)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return next(iter(hint))
    plain = {Path: Path("x"), dt.datetime: dt.datetime.fromtimestamp(0, dt.timezone.utc)}
    return {str: "" if least else "x", bool: not least, int: 0 if least else 1, float: 0.5, **plain}.get(hint)


@cache
def hints(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields and properties, those included that are imported for a type checker alone."""
    module = sys.modules[cls.__module__]
    names = dict(vars(module))
    for node in ast.walk(ast.parse(getsource(module))):
        if isinstance(node, ast.ImportFrom) and node.module:
            imported = import_module(node.module)
            named = {alias.name: getattr(imported, alias.name) for alias in node.names if hasattr(imported, alias.name)}
            names |= named
            if any(isinstance(one, str) for one in named.values()):  # a type in quotes, of names that are known there
                names = vars(imported) | names
    computed = {name: typing.get_type_hints(one.fget, names)["return"] for name, one in properties_of(cls).items()}
    return computed | typing.get_type_hints(cls, names)


def properties_of(cls: type) -> dict[str, property]:
    """What a dataclass computes of its fields."""
    return {name: one for name, one in vars(cls).items() if isinstance(one, property)}


def attributes(cls: type) -> dict[str, str]:
    """What a dataclass's docstring says of each field, and the docstrings of its properties."""
    block = (cls.__doc__ or "").partition("Attributes:")[2]
    described = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", block, re.MULTILINE)
    computed = [(name, one.__doc__ or "") for name, one in properties_of(cls).items()]
    described += [(name, text[:1].lower() + text[1:]) for name, text in computed]
    return {name: _in_json(re.sub(r"(?<!\.)\.$", "", " ".join(text.split()))) for name, text in described}


def _in_json(text: str) -> str:
    """A text with JSON's words for python's None, True and False."""
    return re.sub(r"\b(?:None|True|False)\b", lambda word: json.dumps(ast.literal_eval(word[0])), text)


def _about(cls: type) -> str:
    return (cls.__doc__ or "").strip().split("\n")[0]

"""JSON Schemas of what verbs print with `--format json`, made from the dataclasses of their results.

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
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from inspect import getsource
from pathlib import Path
from typing import Any

from introspect_cli.compare.groups import Groups
from introspect_cli.compare.result import DiffResult
from introspect_cli.health.findings import CheckResult
from introspect_cli.inspect.overview import Overview
from introspect_cli.inspect.runs import RunList
from introspect_cli.render.json import (
    FORMAT,
    check_document,
    diff_document,
    groups_document,
    overview_document,
    runs_document,
)

DOCUMENTS: dict[str, tuple[str, str, type, Any]] = {
    "diff": (
        "introspect diff A B --format json",
        "A comparison of two runs, of two checkpoints, or of a run with a checkpoint.",
        DiffResult,
        diff_document,
    ),
    "groups": (
        "introspect diff A B C... --format json",
        "More than two runs, by what they agree with.",
        Groups,
        groups_document,
    ),
    "check": (
        "introspect check RUN --format json",
        "What the health rules find in a run.",
        CheckResult,
        check_document,
    ),
    "show": ("introspect show RUN --format json", "What a run is.", Overview, overview_document),
    "runs": ("introspect runs --format json", "Runs below some directories.", RunList, runs_document),
}
"""Of each schema: the command, what it prints, the dataclass of its result, and what makes the document of one."""

NAMED_OTHERWISE = {
    ("Divergence", "noise"): "floor",
    ("CodeChanges", "changes"): "ranked",
    ("CheckResult", "not_observed"): "unseen",
    ("RunList", "runs"): "rows",
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
    }
}
"""Keys that no sample has."""

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
    known, said = hints(cls), attributes(cls)
    for name, hint in list(known.items()):
        inside = next((one for one in (hint, *typing.get_args(hint)) if is_dataclass(one)), None)
        if inside is not None and name not in document:  # its fields may stand among those of the outer one
            optional = type(None) in typing.get_args(hint)
            own = {one: typing.Optional[of] if optional else of for one, of in hints(inside).items()}  # noqa: UP045 - of a type that is given
            known, said = own | known, attributes(inside) | said
    whole: Definitions = {"description": _about(cls), "type": "object"}
    properties: Definitions = {}
    for key, value in document.items():
        if key == ANY_KEY:
            whole["additionalProperties"] = {"anyOf": [NUMBER, {"type": "string"}]}
            continue
        name = NAMED_OTHERWISE.get((cls.__name__, key), key)
        kind = _type(known[name], value, (*place, key), definitions) if name in known else _guess(value)
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
            return {"type": "array", "items": _type(arguments[0], value[0], (*place, 0), definitions)}
        each = [_type(one, value[at], (*place, at), definitions) for at, one in enumerate(arguments)]
        return {"type": "array", "prefixItems": each, "minItems": len(each), "maxItems": len(each)}
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, dict):
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
    found = _document(name, bare)
    for key in keys:
        found = found[key]
    return found


@cache
def _document(name: str, bare: type | None = None) -> Any:
    _, _, cls, make = DOCUMENTS[name]
    return make(_sample(cls, bare))


def _sample(cls: type, bare: type | None) -> Any:
    """A value of a dataclass with everything in it; of the class `bare`, with as little as its types allow."""
    own = hints(cls)
    return cls(**{field.name: _value(own[field.name], bare, least=cls is bare) for field in fields(cls) if field.init})


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
    if isinstance(hint, type) and is_dataclass(hint):
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
            found = import_module(node.module)
            names |= {alias.name: getattr(found, alias.name) for alias in node.names if hasattr(found, alias.name)}
    computed = {name: typing.get_type_hints(one.fget, names)["return"] for name, one in properties_of(cls).items()}
    return computed | typing.get_type_hints(cls, names)


def properties_of(cls: type) -> dict[str, property]:
    """What a dataclass computes of its fields."""
    return {name: one for name, one in vars(cls).items() if isinstance(one, property)}


def attributes(cls: type) -> dict[str, str]:
    """What a dataclass's docstring says of each field, and the docstrings of its properties."""
    block = (cls.__doc__ or "").partition("Attributes:")[2]
    found = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", block, re.MULTILINE)
    computed = [(name, one.__doc__ or "") for name, one in properties_of(cls).items()]
    found += [(name, text[:1].lower() + text[1:]) for name, text in computed]
    return {name: _in_json(re.sub(r"(?<!\.)\.$", "", " ".join(text.split()))) for name, text in found}


def _in_json(text: str) -> str:
    """A text with JSON's words for python's None, True and False."""
    return re.sub(r"\b(?:None|True|False)\b", lambda word: json.dumps(ast.literal_eval(word[0])), text)


def _about(cls: type) -> str:
    return (cls.__doc__ or "").strip().split("\n")[0]

"""The schema of the JSON that a comparison prints."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest


def schema(name):
    """A schema as it is shipped, but for a key that it does not have, which no schema of a tolerant reader minds."""
    found = json.loads(files("introspect_cli.render").joinpath(f"assets/{name}.schema.json").read_text("utf-8"))
    for place in (found, *found["$defs"].values()):
        if "properties" in place:
            place.setdefault("additionalProperties", False)
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    validator.check_schema(found)
    return validator(found)

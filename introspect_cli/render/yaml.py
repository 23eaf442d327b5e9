"""The same documents as YAML."""

from __future__ import annotations

from typing import Any

import yaml


def to_yaml(document: dict[str, Any]) -> str:
    """Block style, keys in order."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return str(yaml.dump(document, Dumper=dumper, sort_keys=False, allow_unicode=True, width=100)).rstrip("\n")

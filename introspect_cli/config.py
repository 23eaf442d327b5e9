"""Options from a file: `capture --config FILE.yaml`.

A project's options for capture are the same every time, so a YAML file may hold any of them by its long
name. Every scalar is read as the text it was written as: YAML would take the schedule `10:20` for the number
620, and `no` for false in a list of globs. The command line's own types make numbers and switches of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from introspect_cli.errors import UsageError
from introspect_cli.selection import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

_LONGEST = 1 << 16
"""Characters that options take at most: a device has no end."""
_UNSET = ("", "~", "null", "Null", "NULL")


def read_config(file: Path, *, known: Collection[str], lists: Collection[str]) -> dict[str, str | list[str]]:
    """The options in a YAML file, by parameter name.

    Args:
        file: a YAML mapping of long option names, with `-` or `_`, to values.
        known: parameter names of the options that may be given.
        lists: those among them that take several values.

    Raises:
        UsageError: no such file, not YAML, not a mapping, an unknown option, a value of the wrong form.
    """
    options: dict[str, str | list[str]] = {}
    for key, value in _mapping(file).items():
        name = str(key).replace("-", "_")
        if name not in known:
            names = [option.replace("_", "-") for option in known]
            hint = did_you_mean(str(key).replace("_", "-"), names) or ":"
            raise UsageError(f"{file} has an unknown option {key!r}{hint} known are {', '.join(names)}")
        values: list[Any] = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str) for item in values):
            raise UsageError(f"{file}: {key!r} takes a value or a list of values, not a mapping")
        if name in lists:
            options[name] = [item for item in values if item not in _UNSET]
        elif name == "steps":
            options[name] = ",".join(values)
        elif isinstance(value, list):
            raise UsageError(f"{file}: {key!r} takes one value, not a list")
        elif value not in _UNSET:
            options[name] = value
    return options


def _mapping(file: Path) -> dict[Any, Any]:
    import yaml

    try:
        with file.open(encoding="utf-8") as opened:
            text = opened.read(_LONGEST + 1)
        if len(text) > _LONGEST:
            raise UsageError(f"{file} is longer than {_LONGEST:,} characters: write one `option: value` a line")
        # BaseLoader makes nothing but text, lists and mappings: less than SafeLoader does
        content = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506 - see above
    except OSError as error:
        raise UsageError(f"the options in {str(file)!r} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" (line {where.line + 1})" if where is not None else ""
        raise UsageError(f"{file} is not YAML{line}: write one `option: value` a line") from error
    if content in (None, ""):
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{file} is not a mapping of options: write one `option: value` a line")
    return content

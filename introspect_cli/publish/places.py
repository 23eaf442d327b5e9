"""Where a run can be published to, as people write it, each with what takes numbers and files there.

A place is a file here and a line in the table; the logger's own client is imported when it is asked for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from introspect_cli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Place(Protocol):
    """Takes what is published."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of a step."""

    def keep(self, file: Path) -> None:
        """Take a file: the page, the packed run."""

    def close(self) -> str:
        """Let everything reach its place; where it can be looked at, in words."""


@dataclass(frozen=True)
class Kind:
    """A kind of place.

    Attributes:
        opener: `module:function`; called with what follows the colon and the run's name, it opens a `Place`.
        needs: the package that it needs, as pip calls it; "" for none.
    """

    opener: str
    needs: str = ""


PLACES: dict[str, Kind] = {
    "tensorboard": Kind("introspect_cli.publish.tensorboard:Events"),
    "mlflow": Kind("introspect_cli.publish.mlflow:Experiment", "mlflow"),
    "wandb": Kind("introspect_cli.publish.wandb:Project", "wandb"),
}
"""Loggers by name. Anything else is a directory, or a URL of fsspec's."""

_URL = re.compile(r"[a-z][a-z0-9+]{1,15}://")


def open_place(text: str, name: str) -> Place:
    """The place that a text means.

    Args:
        text: `mlflow`, `mlflow:RUN_ID`, `tensorboard:DIR`, `wandb:PROJECT`, a directory, or a URL.
        name: of the run, for loggers that name theirs.

    Raises:
        UsageError: its package is not installed.
    """
    word, _, rest = text.partition(":")
    kind = PLACES.get(word)
    if kind is None:
        opener = "introspect_cli.publish.files:Remote" if _URL.match(text) else "introspect_cli.publish.files:Directory"
        kind, rest = Kind(opener, "fsspec" if _URL.match(text) else ""), text
    module, _, function = kind.opener.partition(":")
    try:
        opened: Place = getattr(import_module(module), function)(rest, name)
    except ImportError as error:
        raise UsageError(f"publishing to {word} needs {kind.needs or error.name}: `pip install {kind.needs}`") from None
    return opened

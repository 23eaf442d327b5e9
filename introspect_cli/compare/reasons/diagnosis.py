"""What a sentence about the first divergence is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.reasons.clues import Clues
    from introspect_cli.compare.reasons.origin import Cause
    from introspect_cli.compare.result import Divergence, SettingChange


@dataclass(frozen=True)
class Story:
    """What the sentence is made of.

    Attributes:
        first: the first divergence.
        cause: why it is one.
        clues: what else was found around it.
        settings: settings that differ, the strongest first.
        ranks: how many ranks were compared.
    """

    first: Divergence
    cause: Cause
    clues: Clues
    settings: Sequence[SettingChange]
    ranks: int = 1

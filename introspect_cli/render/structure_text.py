"""What differs in structure, as lines below the sentence of a comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.result import Verdict
from introspect_cli.compare.structure import SHOWN, clause_of
from introspect_cli.records import clean
from introspect_cli.render.blocks import Block, line

if TYPE_CHECKING:
    from introspect_cli.compare.result import DiffResult

_LISTED = 12


def structure_blocks(result: DiffResult, *, everything: bool = False) -> list[Block]:
    """The changes with what they rest on; nothing where the sentence has said it all."""
    changes = result.structure
    told = result.verdict is not Verdict.DIVERGED and len(changes) <= SHOWN
    if not changes or (told and not any(change.evidence for change in changes)):
        return []
    shown = changes if everything else changes[:_LISTED]
    blocks: list[Block] = [line(), line("What differs besides numbers:", "heading")]
    for change in shown:
        text = f"{clause_of(change)} ({change.evidence})" if change.evidence else clause_of(change)
        blocks.append(line(clean(text), indent=2))
    if len(changes) > len(shown):
        blocks.append(line(f"and {len(changes) - len(shown)} more (--all lists them)", "dim", 2))
    return blocks

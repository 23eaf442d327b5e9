"""Changed statements as lines: the most likely cause with both sides, or all of them in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.changes.clues import Nearness
from introspect_cli.records import count
from introspect_cli.render.blocks import Block, Line, clean, line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.compare.changes.ranking import CodeChanges, Ranked
    from introspect_cli.compare.changes.statements import Side

HEADS = {
    Nearness.RECORDED: "Changed in a line that the records name",
    Nearness.COMPUTES: "Changed in the code that computes it",
    Nearness.BUILDS: "Changed in what builds it or gives it its values",
    Nearness.BETWEEN: "Changed in what ran between the last record that agrees and this one",
    Nearness.ELSEWHERE: "Changed elsewhere, in nothing that reaches this place by name",
}
"""What a group of changes has in common."""
_LONGEST = 6
"""Lines of a statement that are shown."""
_WHY = {
    "text": "its text is not in both runs",
    "secret": "only in comments or in what was redacted",
}


def code_blocks(code: CodeChanges | None) -> list[Block]:
    """The change that is most likely the cause, and how many there are; nothing where no statement changed."""
    if code is None or not code.ranked:
        return []
    best, every = code.ranked[0], len(code.ranked)
    if not best.likely:
        statements = f"{count(every, 'statement')} changed in {count(code.files, 'file')}"
        text = f"No changed statement reaches this place by name; {statements} (--changes lists them)."
        return [line(), line(text, "dim")]
    blocks: list[Block] = [line(), line(f"{HEADS[best.nearness]}:", "heading"), *change_lines(best)]
    if every > 1:
        likely = len(code.likely) - 1
        rest = f"and {count(every - 1, 'more changed statement')}"
        blocks.append(line(f"{rest}, {f'{likely:,}' if likely else 'none'} likely (--changes lists all)", "dim", 2))
    return blocks


def changes_blocks(code: CodeChanges | None) -> list[Block]:
    """All changes, the most likely cause first, by how near they are."""
    if code is None:
        return [line("Nothing is known of the source files: a run has no digests of them (--no-source).")]
    blocks: list[Block] = []
    for nearness in Nearness:
        changes = [one for one in code.ranked if one.nearness is nearness]
        if changes:
            blocks += [line(), line(f"{HEADS[nearness]}:", "heading")]
            for one in changes:
                blocks += change_lines(one)
    for name in code.in_comments:
        blocks.append(line(f"{clean(name)} changed, in comments alone.", "dim"))
    for name in code.in_names:
        blocks.append(line(f"{clean(name)} changed, in the names of variables alone.", "dim"))
    for name, why in code.unread:
        blocks.append(line(f"{clean(name)} changed: {_WHY.get(why, why)}.", "dim"))
    if not blocks:
        return [line(f"No source file on record differs ({count(code.compared, 'file')} compared).")]
    return blocks[1:] if blocks[0] == line() else blocks


def change_lines(one: Ranked) -> Iterator[Line]:
    """Both sides of a change, with the line above."""
    change = one.change
    scope = f"  in {clean(change.scope)}" if change.scope and change.unit != "value" else ""
    moved = "  (moved)" if change.unit == "moved" else ""
    yield Line(((clean(change.place), "name"), (f"{scope}{moved}", "dim")), indent=2)
    if change.unit == "file":
        only = "a" if change.b is None else "b" if change.a is None else ""
        whole = (
            "changed; it cannot be parsed" if change.file.endswith(".py") else "changed; it is not read value by value"
        )
        yield line(f"only in {only}" if only else whole, "dim", 4)
        return
    if one.above:
        yield line(f"  {clean(one.above, 160)}", "dim", 4, wrap=False)
    for side, sign, style in ((change.a, "-", "bad"), (change.b, "+", "good")):
        yield from _side(side, sign, style)


def _side(side: Side | None, sign: str, style: str) -> Iterator[Line]:
    if side is None:
        return
    lines = side.text.splitlines()
    for text in lines[:_LONGEST]:
        yield line(f"{sign} {clean(text, 160)}", style, 4, wrap=False)
    if len(lines) > _LONGEST:
        yield line(f"{sign} ... {count(len(lines) - _LONGEST, 'more line')}", "dim", 4)

"""A rendered answer as text."""

from introspect_cli.render.blocks import Table, table_lines


def text_of(blocks, width=100):
    lines = []
    for block in blocks:
        lines += [row.text for row in table_lines(block, width)] if isinstance(block, Table) else [block.text]
    return "\n".join(lines)

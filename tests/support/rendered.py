"""A rendered answer as text."""

from introspect_cli.render.blocks import lines_of


def text_of(blocks, width=100):
    return "\n".join(row.text for row in lines_of(blocks, width))

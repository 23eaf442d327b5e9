"""Changed statements on a page: both sides beside one another, the most likely cause first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.records import count
from introspect_cli.render.code_text import head_of
from introspect_cli.render.html_parts import text

if TYPE_CHECKING:
    from introspect_cli.compare.changes.ranking import CodeChanges, Ranked
    from introspect_cli.compare.changes.statements import Side

_SHOWN, _MOST = 3, 100
_LONGEST, _LINES = 200, 40


def code_html(code: CodeChanges | None) -> str:
    """The likely changes, and all others folded; nothing where no source file differs."""
    if code is None or not (code.ranked or code.in_comments or code.in_names):
        return ""
    shown = code.likely[:_SHOWN]
    parts = [_figure(one) for one in shown]
    rest = code.ranked[len(shown) : _MOST]
    if rest:
        more = f"{count(len(code.ranked) - len(shown), 'more changed statement')} in {count(code.files, 'file')}"
        likely = len(code.likely) - len(shown)
        folded = "".join(map(_figure, rest))
        parts.append(f"<details><summary>{more}, {likely or 'none'} of them likely</summary>{folded}</details>")
    if code.in_comments:
        names = ", ".join(code.in_comments[:_MOST])
        parts.append(f'<p class="quiet">Changed in comments alone: {text(names)}.</p>')
    if code.in_names:
        names = ", ".join(code.in_names[:_MOST])
        parts.append(f'<p class="quiet">Changed in the names of variables alone: {text(names)}.</p>')
    return f'<div class="code">{"".join(parts)}</div>'


def _figure(one: Ranked) -> str:
    change = one.change
    scope = f" in <code>{text(change.scope)}</code>" if change.scope else ""
    caption = f"<code>{text(change.place)}</code>{scope} <small>{text(head_of(one.nearness).lower())}</small>"
    sides = "".join(_side(name, side) for name, side in (("a", change.a), ("b", change.b)))
    return f'<figure><figcaption>{caption}</figcaption><div class="sides">{sides}</div></figure>'


def _side(name: str, side: Side | None) -> str:
    if side is None:
        return f'<pre class="{name}"><small>{name}</small> not there</pre>'
    lines = f"{name} {side.first}" if side.first == side.last else f"{name} {side.first}-{side.last}"
    code = "\n".join(text(own, _LONGEST) for own in side.text.splitlines()[:_LINES])
    return f'<pre class="{name}"><small>{lines}</small>\n{code}</pre>'

"""A collective differs, or only one run has it, though nothing recorded before it does: what a rank sends to others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.reasons.base import Cause, Reason, Scene
from introspect_cli.compare.reasons.evidence import all_before
from introspect_cli.compare.reasons.words import apart, what
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.facts import Facts
    from introspect_cli.records import Site, Summary


class Collective(Reason):
    """What was sent to other ranks, or came from them."""

    word = "collective"
    place = "the collectives of the ranks"
    kinds = frozenset({Kind.COLLECTIVE})
    priority = 5

    def applies(self, facts: Facts, position: int) -> Cause | None:
        """It may come from everything before it."""
        known = all_before(facts, float(facts.items.order[position]))
        return None if known is None else self.cause(*known)

    def sentence(self, scene: Scene) -> str:
        """Both collectives, each with its line."""
        first, site = scene.first, scene.site
        lines = tuple(_line(scene, side) for side in "ab")
        name = what(site)
        if first.a is None or first.b is None:
            side, other, line = ("b", "a", lines[1]) if first.a is None else ("a", "b", lines[0])
            text = _told(first.b if first.a is None else first.a)
            other_line = _in_its_place(scene, other)
            if other_line:
                return f"{name} is {text}{line} in {side}, and another one{other_line} in {other}: their order differs."
            return (
                f"only {side} has {name}{f' ({text}{line})' if text or line else ''}: it is missing in {other}, one "
                f"too many in {side}, or in another place."
            )
        if "." not in site.path:
            return (
                f"{name} is another one: {_told(first.a)}{lines[0]} in a, {_told(first.b)}{lines[1]} in b. One is "
                "missing, doubled or in another place."
            )
        return f"{name} differs{apart(first)}{lines[1]}: what the ranks compute, or the order of collectives."


def _told(summary: Summary | None) -> str:
    return "" if summary is None else summary.text.strip("'\"")


def _in_its_place(scene: Scene, side: str) -> str:
    """Where the run that lacks a collective calls what it has in its place; "" where it has nothing there."""
    own = scene.site
    for site in scene.facts.sites:
        same = (site.kind, site.fqn, site.call, _name(site)) == (own.kind, own.fqn, own.call, _name(own))
        if same and "." not in site.path and site.path != own.path:
            return _line(scene, side, site)
    return ""


def _name(site: Site) -> str:
    return site.path.partition(".")[0].partition("~")[0]


def _line(scene: Scene, side: str, site: Site | None = None) -> str:
    """Where a run calls it (or another), for the end of a clause."""
    reader = scene.facts.sides.a if side == "a" else scene.facts.sides.b
    sites = reader.sites
    own = site or scene.site
    for number, fqn in enumerate(sites.fqn):
        if fqn == own.fqn and sites.kind[number] == Kind.COLLECTIVE.value and int(sites.call[number]) == own.call:
            source = sites.source[number]
            if source and sites.path[number] == own.path:
                return f" at {source}"
    return ""


REASONS = (Collective(),)

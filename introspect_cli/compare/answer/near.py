"""Changed statements ranked by how likely each made the runs diverge.

The records say where the runs diverge and what was equal before: the module whose forward it is, the statements that
ran between the last record that agrees and the first that differs, the functions that seed or draw. From there, names
lead on: to the functions that this code calls, and to what gives it its values. A change that neither reaches is never
called likely. Only changes of what is computed are ranked.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from introspect_cli.compare.changes.code import OF_EVERY_CLASS, Code, can_matter
from introspect_cli.compare.changes.statements import ORDER, Nearness, Ranked, Statement
from introspect_cli.compare.evidence import Known, Thing
from introspect_cli.compare.names import ancestors, owner_of
from introspect_cli.compare.settings.beginning import (
    MAY_REST_ON_THEM,
    MODES,
    SCRIPT,
    differing_calls,
    first_difference,
    last_fillings,
)
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from introspect_cli.compare.answer.compared import Raised
    from introspect_cli.compare.changes.code import Depths
    from introspect_cli.compare.changes.statements import Change, CodeChanges, Definition
    from introspect_cli.compare.reasons.view import View
    from introspect_cli.compare.settings.beginning import Event


_LINE = re.compile(r"(.+):(\d+)\Z")


# --- the code that computes a place

_FORWARD = ("forward", "__call__", "training_step", "backward")
_SEED = r"manual_seed|[sg]et_state|rng_state|Generator\Z|default_rng|RandomState|seed"
_DRAW = (
    r"rand|multinomial|bernoulli|(normal|uniform|xavier|kaiming|orthogonal|exponential)\w*_\Z|shuffle|choice|sample|dropout"
    r"|\A(normal|uniform|permutation)\Z"
)
_FILL = (
    r"init(?!ial_seed)|reset_parameters|_weights\Z|(constant|zeros|ones|fill|copy|normal|uniform|orthogonal|sparse|eye|dirac)_\Z"
    r"|load_state_dict|from_pretrained"
)
_MODE = r"\A(train|eval|no_grad|inference_mode|requires_grad_?|compile|set_grad_enabled)\Z"
_CUT = r"detach|requires_grad|no_grad|checkpoint|register_hook|\Abackward|\Aapply\Z|retain_grad"
_LOAD = r"load_state_dict|\Aload\Z|from_pretrained|load_checkpoint"
_SAVE = r"state_dict|\Asave"
_HANDLE = (
    r"clip_grad|unscale_|zero_grad|no_sync|register_\w*hook|backward|\Ascale\Z|\Aupdate\Z|DDP|DistributedDataParallel|FSDP"
    r"|FullyShardedDataParallel|fully_shard|\Agrad\Z"
)
_SEND = r"all_reduce|all_gather|reduce_scatter|broadcast|barrier|\Asend|recv|scatter"
_TUNE = r"LR\Z|[Ss]chedul|[Ww]arm|swa|\Alr\Z|add_param_group|param_groups"
_DATA = r"[Dd]ata[Ss]et|Sampler|Loader|DataModule|DataPipe|[Cc]ollat|set_epoch"
_WRITE = r"\A[a-z]\w*_\Z|load_state_dict|update_parameters|vector_to_parameters|\Aset_\Z|\Adata\Z"
_DEVICE = re.compile(r"device|cuda|mps|accelerator|\Atorch\Z")
_FORMAT = r"\Amemory_format\Z"
_BACKWARD = frozenset(("backward", "manual_backward", "scale", "grad"))
_LEADS = ("training_step", "compute_loss")
_GETS = ("__getitem__", "__iter__", "__getitems__", "__next__")
_AROUND = 2
_FAR = 5


class Leads(NamedTuple):
    """Which code computes the place of a divergence, by its reason.

    Attributes:
        calls: a pattern of what it calls or gives.
        through: what is meant beside it: the forward passes of the `modules` at the place; what leads to the `loss` (of
            a script, to the model); what makes batches (`data`), unless they are equal; what gives the `tensor` a
            value; all that a step runs (`between`), as it may lie between the last record that agreed and the first
            that did not; and the functions that it calls (`called`).
    """

    calls: str = _FORMAT
    through: tuple[str, ...] = ()


_LEADS_BY_REASON: Final[Mapping[str, Leads]] = {
    **dict.fromkeys(("module", "own_code", "op"), Leads(_FORMAT, ("modules",))),
    "buffer": Leads(rf"{_WRITE}|{_MODE}", ("modules",)),
    "by_hand": Leads(rf"{_WRITE}|{_LOAD}", ("modules", "tensor")),
    "backward": Leads(_CUT, ("modules", "loss")),
    "loss": Leads(_FORMAT, ("loss",)),
    "script": Leads(_FORMAT, ("loss", "data", "between", "called")),
    "split": Leads(rf"{_HANDLE}|{_DATA}", ("loss", "data")),
    "batch": Leads(_DATA, ("data",)),
    "gradient": Leads(_HANDLE, ("modules", "loss", "between")),
    **dict.fromkeys(("collective", "parts"), Leads(rf"{_HANDLE}|{_SEND}")),
    "optimizer": Leads(_TUNE, ("words", "between")),
    "structure": Leads(_CUT, ("modules", "tensor", "between")),
    "initial": Leads(rf"{_FILL}|{_SEED}", ("tensor", "between")),
    "outside": Leads(rf"{_WRITE}|{_LOAD}", ("tensor", "between", "called")),
    "rng": Leads(rf"{_SEED}|{_DRAW}|{_MODE}", ("between",)),
    "resumed": Leads(rf"{_LOAD}|{_SAVE}", ("between",)),
    "product": Leads(_SAVE),
    "gap": Leads(rf"{_MODE}|{_HANDLE}|{_TUNE}", ("modules", "loss", "data", "between")),
    "propagated": Leads(rf"{_MODE}|{_HANDLE}|{_TUNE}", ("modules", "loss", "between")),
}


class Clues(NamedTuple):
    """What is on record at a divergence, or of an exception, by which changed statements are known.

    Attributes:
        reason: the word of its reason; of a gap, that which would apply if all had been recorded.
        lines: `file:line` of the user's code that the records of a and of b themselves name.
        names: the module that it is about and those around it, the innermost first.
        words: names that differ or are known to matter: hyper-parameters, attributes, what one run only has.
    """

    reason: str
    lines: tuple[list[str], list[str]]
    names: Sequence[str] = ()
    words: frozenset[str] = frozenset()


def clues_of(at: View | None, ending: Raised | None) -> Clues:
    """The clues of a first divergence and of the exception that ended a run; without a divergence, of that alone."""
    lines: tuple[list[str], list[str]] = ([], [])
    if ending is not None:
        lines[ending.side == "b"].append(ending.where)
    if at is None:
        return Clues("raised", lines)
    cause, site = at.cause, at.site
    if at.first.a is not None:
        lines[0].append(at.first.source)
    subject = cause.module or cause.subject or site.fqn
    around = owner_of(subject) if cause.reason == "structure" else subject
    replaced = at.classes_of(around) if cause.reason in {"structure", "own_code", "module"} else ()
    subject = at.parameter_user if cause.reason == "gradient" else around if replaced else subject
    names = [name for name in (subject, *ancestors(subject)) if name in at.modules]
    words = {*replaced, _last_part(cause.subject), _last_part(site.fqn) * (cause.reason in {"initial", "outside"})}
    if site.kind is Kind.OPTIMIZER_STATE:
        words |= {*re.findall(r"\w+", site.path)}
    if at.dtypes:
        words |= {*at.dtypes, "autocast", "to", "half", "float", "dtype"}
    for change in at.tuned:
        words |= {change.name.rpartition(".")[2], change.about} if None not in (change.a, change.b) else set()
    for name in (*names[:1], *at.unseen_inside):
        keys = {key for key, _, _ in at.attributes(name)}
        words |= keys | {at.modules[name].module_class} if keys else keys
        words |= {"train", "eval"} if "training" in keys else set()
    for events, place in zip(_suspect_events(at), lines, strict=True):
        # what a module draws tells nothing of why one run has no such module
        there = [event for event in events if cause.reason != "structure" or event.name == subject]
        place += [event.line for event in there]
        words |= {word for event in there for word in event.name.split(".")[-2:]}
        words |= {*MODES} if any(event.by in MODES for event in there) else set()
    reason = (
        "by_hand" if cause.rests_on(Thing.REWRITTEN) else "structure" if replaced else cause.instead or cause.reason
    )
    return Clues(reason, lines, names, frozenset(w for w in words if len(w) > 1 and not w.isdecimal()))


def _suspect_events(at: View) -> tuple[Sequence[Event], Sequence[Event]]:
    """Seedings and draws that may be to blame: of a, of b.

    Of a random state in a later step, the calls that set it. Before the first step, the first of each generator that
    differ, where the reason may rest on them. Of an initial value also its last filling, where function or arguments
    differ; none where it was filled alike.
    """
    runs, rank, reason = at.runs, at.first.rank, at.cause.reason
    if not at.is_first_step:
        return differing_calls(runs, at.first)[:2] if reason == "rng" else ([], [])
    filled = last_fillings(runs, rank, at.site.fqn) if reason == "initial" else (None, None)
    one, two = (event and (event.by, event.arguments) for event in filled)
    alike = None not in filled and one == two and len({event and event.state for event in filled}) == 1
    begins = reason in {"rng", "initial", "structure", "batch"} and not alike
    names = [*("torch", "python", "numpy") * begins, *[SCRIPT] * (at.explained_reason in MAY_REST_ON_THEM)]
    parted = (first_difference(runs, rank, name, by_name=reason != "rng") for name in names)
    pairs = [*(each.first for each in parted), *[filled] * (one != two)]
    return [one for one, _ in pairs if one is not None], [two for _, two in pairs if two is not None]


def _last_part(name: str) -> str:
    """The last part of a dotted name that is no number: `blocks` of `blocks.3` or `blocks(a)`; "" for none."""
    return next((part.partition("(")[0] for part in reversed(name.split(".")) if not part.isdecimal()), "")


def _reach(code: Code, at: View | None, clues: Clues, side: int) -> tuple[Depths, ...]:
    """Statements of one version that are RECORDED, COMPUTES, BUILDS and BETWEEN, in this order, with their depths.

    Left out is what runs after a place in the first forward pass. One deeper is what does not reach the part of the
    output; in its module's first call it is `_FAR` deeper.

    Args:
        code: the version.
        at: the divergence; None for an exception.
        clues: of it.
        side: 0 for a, 1 for b.
    """
    recorded = dict.fromkeys(_statements_on(code, clues.lines[side]), 0)
    if at is None:
        computes = code.reached_from(*(s.place for s in recorded))
        return recorded, computes, code.statements_behind([*recorded, *computes], ())
    models = {_last_part(module.variable) for module in at.modules.values() if module.variable}
    roots = {module.module_class for name, module in at.modules.items() if "." not in name}
    models |= {name.rpartition(":")[2] for root in code.callers_of(roots) for name in root.gives}
    leads = _LEADS_BY_REASON.get(clues.reason, Leads())
    between = code.training_loops() if "between" in leads.through else set[Statement]()
    if "called" in leads.through:
        between |= code.with_what_runs(dict.fromkeys(between, 0)).keys()
    is_in_first_pass = at.site.phase is Phase.FORWARD and at.first.step == 0
    is_first = is_in_first_pass and not at.site.call
    apart = _statements_apart(code, at, first=is_first)
    computes = _computing(code, at, side, clues, models, between, apart if is_first else set())
    within = {s.scope.rpartition(".")[2] for s in recorded if s.scope} - OF_EVERY_CLASS  # what a line on record is in
    computes = {s: 1 for name in within for s in code.takers.get(name, ())} | computes
    if at.site.phase is Phase.START and at.is_first_step:  # what models are built by has run, with all that it calls
        built = (code.methods(module.module_class, "__init__") for module in at.modules.values())
        between |= {s for s in code.reached_from(*set().union(*built)) if not s.scope.endswith(".__init__")}
    if at.cause.reason == "gap":  # what was not recorded may be anything
        between.update(code.statements)
    reach = recorded, computes, code.statements_behind([*recorded, *computes], models), dict.fromkeys(between, 0)
    around = ancestors(at.site.fqn) if is_in_first_pass and at.cause.reason != "gap" else ()
    late = _statements_behind(code, at, around)
    return tuple({s: depth + (s in apart) for s, depth in depths.items() if s not in late} for depths in reach)


def _statements_apart(code: Code, at: View, *, first: bool) -> set[Statement]:
    """Statements of the module's forward that do not reach the part of its output that the place is.

    Of all that it returns where it is no part, `first`: the module's first call; none at other places.
    """
    part, owner = at.site.path.strip("[]"), at.modules.get(at.site.fqn)
    number = int(part) if part.isdecimal() else None
    if at.site.kind is not Kind.OUTPUT or owner is None or (number is None and not first):
        return set()
    places = code.methods(owner.module_class, "forward")
    return {s for place in places for s in code.statements_apart(place, number, first=first)}


def _statements_behind(code: Code, at: View, owners: Sequence[str]) -> set[Statement]:
    """Statements of the modules `owners` behind what they call of the place's module inside them."""
    inner = [(each, at.site.fqn.removeprefix(f"{each}.").partition(".")[0]) for each in owners if each in at.modules]
    return {s for owner, name in inner for s in code.statements_after(at.modules[owner].module_class, name)}


def _calling(code: Code, at: View, side: int) -> set[Definition]:
    """The function that calls the module of which an input differs, by the line on record; empty for all else."""
    row = at.table.rows_of["ab"[side]].get(at.union) if at.site.kind is Kind.INPUT else None
    reader, batch = (at.step.comparison.a, at.step.comparison.b)[side], at.table.halves[side].batch
    return set() if row is None else {s.place for s in _statements_on(code, [reader.sites.source[batch.site[row]]])}


def _statements_on(code: Code, lines: Sequence[str]) -> list[Statement]:
    """Statements on lines given as `file:line`; other texts give none."""
    places = filter(None, map(_LINE.fullmatch, lines))
    return [s for line in places for s in code.statements_at(line[1], int(line[2]), int(line[2]))]


def _computing(
    code: Code, at: View, side: int, clues: Clues, models: set[str], between: set[Statement], apart: set[Statement]
) -> Depths:
    """Statements that compute the first value that differs, with their depth: by the reason, and what they call.

    Args:
        code: the version.
        at: the divergence.
        side: 0 for a, 1 for b.
        clues: of it.
        models: what the script calls its models.
        between: what a step runs; where it is known, no other call of a model is one of the training.
        apart: what does not reach the place from the code around it, and is with what it calls `_FAR` away.
    """
    reason, (pattern, through) = clues.reason, _LEADS_BY_REASON.get(clues.reason, Leads())
    calling = _calling(code, at, side) if "modules" in through else set()
    optimizers = {name.partition("#")[0] for side in at.steppers for name in side}
    named = clues.words | optimizers if {"words", "modules"} & {*through} else set[str]()
    named |= {_last_part(at.site.fqn)} if "tensor" in through else set()
    near: Depths = code.reached_from(*calling) | {s: 0 for s in code.statements if named & (s.gives | s.calls)}
    owners = (*clues.names[:1], *at.unseen_inside), clues.names[1:]
    classes, around = ([at.modules[name].module_class for name in names] for names in owners)
    for names, depth in ((around, _AROUND), (classes, 0)) if "modules" in through else ((optimizers, 0),):
        methods = {place for name in names for place in code.methods(name, *_FORWARD, "step")}
        near = code.reached_from(*methods, depth=depth or int(not calling <= methods), without=apart) | near
    # lines on record of a random state that differs are of seedings
    calls = re.compile(_SEED if reason == "rng" and any(map(any, clues.lines)) else pattern)
    near = {s: 1 for s in code.statements if any(map(calls.search, s.calls | s.gives))} | near
    if "data" in through and at.known(Thing.BATCHES) is not Known.EQUAL:
        gets = {s.place for s in code.statements if s.scope.endswith(_GETS) or re.search(_DATA, s.scope)}
        near = code.reached_from(*gets, depth=1) | near
    if "loss" in through:
        starts = code.callers_of(models if reason == "script" else _BACKWARD)
        if reason == "script" and between and not at.site.evaluates:
            starts &= between
        starts |= {s for s in code.statements if s.scope.endswith(_LEADS)}
        near = code.statements_behind(starts, models) | near
    near = code.with_what_runs({s: 1 for s, depth in near.items() if depth <= 1}) | near
    return code.with_what_runs(dict.fromkeys(apart, _FAR)) | near


_ELSEWHERE = ORDER.index(Nearness.ELSEWHERE), 0
_BASES = "Module", "Optimizer"


def _nearness(statement: Statement, reach: Sequence[Depths]) -> tuple[int, int]:
    """(index in `ORDER`, depth) of a statement by the first set that has it; the smaller the nearer.

    A bare expression that gives no value is 1 deeper. ELSEWHERE if no set has it, or if it cannot matter and is no line
    on record, as an assertion that failed is.
    """
    makes_nothing = isinstance(statement.node, ast.Expr) and not statement.gives
    places = [(place, depths[statement] + makes_nothing) for place, depths in enumerate(reach) if statement in depths]
    return places[0] if places and (places[0] == (0, 0) or can_matter(statement)) else _ELSEWHERE


def ranked(code: CodeChanges, at: View | None, ending: Raised | None) -> tuple[Ranked, ...]:
    """The changes by nearness, then by names hit (most first), then by depth (smallest first).

    Files that cannot be parsed count as empty.

    Args:
        code: the changes, with the texts of both versions.
        at: the divergence; None for an exception alone.
        ending: the exception that ended one run in the step of the divergence.
    """
    clues = clues_of(at, ending)
    trees = at.step.modules if at is not None else ({}, {})
    built = {name.partition("#")[0] for side in at.setup.named.values() for name in side} if at is not None else set()
    ran_in = [{(each.module_class, each.source.rpartition(":")[0]) for each in tree.values()} for tree in trees]
    ran_in = [classes | {(name, "") for name in built} for classes in ran_in]
    scripts = [run.manifest.get("script") or "" for run in at.runs] if at is not None else ("", "")
    versions = [Code(*each) for each in zip(code.texts, ran_in, scripts, strict=True)]
    sides = [(version, _reach(version, at, clues, side)) for side, version in enumerate(versions)]
    modules = {module.module_class for module in at.modules.values()} if at is not None else set()
    ran = {kind for version, _ in sides for name in modules | built for kind in version.kinds_of(name)}
    ran |= {base for base, known in zip(_BASES, (modules, built), strict=True) if known}
    placed = [_ranked_change(one.change, sides, at, clues.words, ran) for one in code.ranked]
    return tuple(sorted(placed, key=_order))


def _order(one: Ranked) -> tuple[int, int, int, bool]:
    """Sort key of a change; of two that are equally near, one that both versions have in one place is first."""
    is_elsewhere = one.change.unit == "moved" or None in (one.change.a, one.change.b)
    return ORDER.index(one.nearness), -one.hits, one.depth, is_elsewhere


def _ranked_change(
    change: Change,
    sides: Sequence[tuple[Code, Sequence[Depths]]],
    at: View | None,
    named: frozenset[str],
    ran: set[str],
) -> Ranked:
    """A change with the nearest of its statements in either version.

    `hits` counts the words of its text that are among `named`, one that changed three times, one that gets a value once
    more. A change that `_only_defines`, or names devices where both runs have the tensor on one, is `_FAR` deeper, has
    no hits and cannot matter; one in a class of modules or optimizers of which none is among those that `ran` is
    BETWEEN at best, without hits, and so is one of a `forward` as the first step begins.
    """
    counts = [Counter(re.findall(r"\w+(?:\.\d+)?", side.text if side else "")) for side in (change.a, change.b)]
    words = set((counts[0] - counts[1]) + (counts[1] - counts[0])) or set(counts[0] + counts[1])
    hits = 2 * len(words & named) + len(set(counts[0] + counts[1]) & named)
    best, matters, given = _ELSEWHERE, False, set[str]()
    files = change.file_a or change.file, change.file
    for file, side, (code, reach) in zip(files, (change.a, change.b), sides, strict=True):
        if side is not None:
            inside = code.statements_at(file, side.first, sys.maxsize if change.unit == "file" else side.last)
            best = min([best, *(_nearness(statement, reach) for statement in inside)])
            matters |= any(map(can_matter, inside))
            given |= {name.rpartition(":")[2] for statement in inside for name in statement.gives}
    hits += len(given & named)
    held = {side.layout.device for side in (at.first.a, at.first.b) if side is not None} if at is not None else ()
    if _only_defines(change, ran) or (len(held) == 1 and all(map(_DEVICE.search, words))):
        return Ranked(change, ORDER[best[0]], best[1] + _FAR, can_matter=False)
    bases = ran.intersection(_BASES)
    owners = {name for name in change.scope.split(".") for code, _ in sides if bases & (code.kinds_of(name) - {name})}
    idle = bool(owners) and not owners & ran
    if at is not None and at.site.phase is Phase.START and at.is_first_step:  # no model has run
        idle |= change.scope.endswith(".forward")
    behind = max(best[0], ORDER.index(Nearness.BETWEEN) * idle)
    return Ranked(change, ORDER[behind], best[1], hits * (not idle), can_matter=matters)


_DEFINED = re.compile(r"(?:async )?(def|class) (\w+)(?:\([\w., ]*\b(Module|Optimizer)\b)?")


def _only_defines(change: Change, ran: set[str]) -> bool:
    """Whether a change adds or removes a whole function that is no method, or a class of which none ran."""
    alone = change.a if change.b is None else change.b if change.a is None else None
    match = _DEFINED.match(alone.text) if alone is not None else None
    if match is None:
        return False
    return "." not in change.scope if match[1] == "def" else (match[3] or "Module") in ran and match[2] not in ran

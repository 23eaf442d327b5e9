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
from collections import Counter, defaultdict
from functools import cache, partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from introspect_cli.compare.changes.statements import (
    BLOCKS,
    FUNCTIONS,
    ORDER,
    Clues,
    Definition,
    Nearness,
    Ranked,
    Statement,
    statements_of,
    tree_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from introspect_cli.compare.changes.statements import Change


Depths: TypeAlias = dict[Statement, int]
"""Statements, each with how many calls or values lie between it and what was asked for."""


def last_name(node: ast.AST) -> str:
    """Last part of a name or attribute, subscripts dropped: `AdamW` of `torch.optim.AdamW`; "" for other nodes."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


_LOGS = re.compile(
    r"print|log|info|debug|warning|add_scalars?|log_dict|log_metrics|plot|write|flush|perf_counter|time|basicConfig"
    r"|savefig|set_description|set_postfix"
)
_EVERYWHERE = frozenset(("self", "cls", "args", "kwargs", "config", "cfg", "torch", "nn", "np", "F"))
"""Names that stand in every other statement and lead everywhere."""
_OF_EVERY_CLASS = frozenset(("__init__", "forward", "step", "train", "eval", "to", "backward"))
"""Methods whose name does not say whose they are."""


def _string_constants(nodes: Iterable[ast.AST | None]) -> Iterator[str]:
    """Values of the nodes that are constant texts."""
    return (n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))


def _innermost_object(node: ast.AST) -> ast.AST:
    """The object that a chain of accesses and calls begins with: `rows` of `rows[0].append`."""
    while isinstance(node, (ast.Subscript, ast.Attribute, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node


def _nodes_of(statement: ast.stmt) -> Iterator[ast.AST]:
    """Nodes of a statement without its blocks: of a compound one, those of its head, without the statement itself."""
    fields = [value for name, value in ast.iter_fields(statement) if name not in BLOCKS]
    nodes = [node for value in fields for node in (value if isinstance(value, list) else [value])]
    parts = [node for node in nodes if isinstance(node, ast.AST)] if hasattr(statement, "body") else [statement]
    return (each for part in parts for each in ast.walk(part))


def _bound_names(function: ast.AST) -> set[str]:
    """Names that a function binds, parameters included, and those of functions inside it."""
    nodes = [*ast.walk(function)]
    bound = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    bound |= {n.arg for n in ast.walk(function.args) if isinstance(n, ast.arg)}  # type: ignore[attr-defined] # a function
    return bound - {name for n in nodes if isinstance(n, (ast.Global, ast.Nonlocal)) for name in n.names}


def can_matter(statement: Statement) -> bool:
    """Whether a statement can change a number.

    False for an import, `pass`, an assertion, assignments to dunder names alone, and a call in `_LOGS` that is a
    statement.
    """
    node, gives = statement.node, statement.gives
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return not _LOGS.fullmatch(last_name(node.value.func))
    if gives and all(name.startswith("__") for name in gives):  # `__version__`
        return False
    return not isinstance(node, (ast.Import, ast.ImportFrom, ast.Pass, ast.Assert))


class Code:
    """All statements of one version of the source, indexed by the names that they give, take and call."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        """Parse and index all files at once, by name; files that Python cannot parse are left out."""
        self.statements: list[Statement] = []
        self.classes: dict[str, list[tuple[str, str, tuple[str, ...]]]] = defaultdict(list)
        """By simple name: file, qualified name, and simple names of the bases."""
        self.functions: dict[str, list[Definition]] = defaultdict(list)
        """By the name that calls them."""
        self.called_as: dict[str, str] = {}
        """By parameter, what calls its function."""
        self.by_definition: dict[Definition, list[Statement]] = defaultdict(list)
        self.givers: dict[str, list[Statement]] = defaultdict(list)
        self.callers: dict[str, list[Statement]] = defaultdict(list)
        self.takers: dict[str, list[Statement]] = defaultdict(list)
        self._bound = cache(_bound_names)
        for file, text in texts.items():
            tree = tree_of(text)
            for statement in statements_of(file, tree.body if tree is not None else ()):
                self._add(statement)

    def _add(self, statement: Statement) -> None:
        """Index a statement, and the function or class whose head it is."""
        node = statement.node
        self._read_names(statement)
        self.statements.append(statement)
        self.by_definition[statement.place].append(statement)
        read = (self.givers, statement.gives), (self.takers, statement.takes), (self.callers, statement.calls)
        for index, names in read:
            for name in names:
                index[name].append(statement)
        if isinstance(node, ast.ClassDef):
            self.classes[node.name].append((*statement.place, tuple(map(last_name, node.bases))))
        if isinstance(node, FUNCTIONS):
            owner = statement.scope.rpartition(".")[0].rpartition(".")[2]
            called = owner if node.name in {"__init__", "__call__"} else node.name
            self.functions[called].append(statement.place)
            self.called_as.update(dict.fromkeys(statement.gives, called))

    def _read_names(self, statement: Statement) -> None:
        """Fill in what a statement gives, takes and calls.

        A name that a function around binds is written `function:name`. A call that is a statement also gives what it is
        a method of and what it is handed, as it may change them.
        """
        node, gives, takes, calls = statement.node, statement.gives, statement.takes, statement.calls

        def key(name: str) -> str:
            """The name, with its function in front if it is local."""
            return next((f"{of}:{name}" for of, node in statement.functions if name in self._bound(node)), name)

        for each in _nodes_of(node):
            side = takes if isinstance(getattr(each, "ctx", None), ast.Load) else gives
            if isinstance(each, ast.Name):
                side.add(key(each.id))
            elif isinstance(each, ast.Attribute):
                side.add(each.attr)
            elif isinstance(each, ast.Subscript):
                side.update(_string_constants([each.slice]))
                base = _innermost_object(each)
                if side is gives and isinstance(base, ast.Name):
                    gives.add(key(base.id))
            elif isinstance(each, ast.arg):
                gives.add(key(each.arg))
            elif isinstance(each, ast.keyword) and each.arg:
                gives.add(each.arg)
            elif isinstance(each, ast.Dict):
                gives.update(_string_constants(each.keys))
            elif isinstance(each, ast.Call):
                calls.add(last_name(each.func))
                if last_name(each.func) == "add_argument":
                    gives.update(text.lstrip("-").replace("-", "_") for text in _string_constants(each.args))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):  # it may change what it is of, or is handed
            held = getattr(node.value.func, "value", node)
            gives.update(n.attr for n in ast.walk(held) if isinstance(n, ast.Attribute) and held is not node)
            changed = [_innermost_object(node.value.func), *node.value.args]
            gives.update(key(n.id) for n in changed if isinstance(n, ast.Name))
        takes -= _EVERYWHERE

    def statements_at(self, file: str, first: int, last: int) -> set[Statement]:
        """Statements of a file that have any line from `first` to `last`, both included."""
        return {s for s in self.statements if s.file == file and s.lines[0] <= last and s.lines[1] >= first}

    def callers_of(self, names: Iterable[str]) -> set[Statement]:
        """Statements that call any of these last names."""
        return {statement for name in names for statement in self.callers.get(name, ())}

    def methods(self, class_name: str, *names: str) -> set[Definition]:
        """Places of the methods of a class with any of these names, with those of base classes in these files.

        Classes of one simple name in several files are taken together.
        """
        methods, seen, pending = set[Definition](), set[str](), [class_name]
        while pending:
            name = pending.pop()
            if name not in seen:
                seen.add(name)
                for file, qualified, bases in self.classes.get(name, ()):
                    pending += bases
                    methods |= {(file, f"{qualified}.{method}") for method in names} & self.by_definition.keys()
        return methods

    def functions_meant(self, name: str, by: Definition) -> list[Definition]:
        """Functions that a call of `name` in place `by` may mean.

        Those of the same class; else of the same file; else all of that name, if they are at most `_MOST_MEANT`. [] for
        names in `_OF_EVERY_CLASS`.
        """
        places = [] if name in _OF_EVERY_CLASS else self.functions.get(name, [])
        same_class = [place for place in places if place == (by[0], f"{by[1].rpartition('.')[0]}.{name}")]
        same_file = [place for place in places if place[0] == by[0]]
        return same_class or same_file or (places if len(places) <= _MOST_MEANT else [])

    def statements_after(self, class_name: str, name: str) -> Iterator[Statement]:
        """Statements of a class's methods behind the last one that takes the attribute `name`, in no loop with it."""
        for file, qualified, _ in self.classes.get(class_name, ()):
            for place in (
                each for each in self.by_definition if each[0] == file and each[1].startswith(f"{qualified}.")
            ):
                calling = [s for s in self.by_definition[place] if name in s.takes]
                for s in self.by_definition[place] if calling and not place[1].endswith("__init__") else ():
                    both = {*s.around} & {*calling[-1].around, calling[-1]}
                    if s.lines[0] > calling[-1].lines[1] and not any(isinstance(e.node, _LOOPS) for e in both):
                        yield s

    def reached_from(self, *places: Definition, depth: int = 0) -> Depths:
        """Statements of these functions and of all that they call or name, each with `depth` plus the calls between."""
        return self.with_what_runs({s: depth for place in places for s in self.by_definition.get(place, ())})

    def with_what_runs(self, depths: Depths) -> Depths:
        """These statements and those of all functions that they call or name, each with a depth more for each call."""
        return _closure(depths, self._statements_inside, sys.maxsize)

    def _statements_inside(self, statement: Statement) -> Iterator[Statement]:
        """Those of functions that a statement calls or names.

        `forward` and `backward` of a class whose `apply` is called count as called.
        """
        named = statement.calls | statement.takes
        places = {place for name in named for place in self.functions_meant(name, statement.place)}
        for name in statement.takes if "apply" in statement.calls else ():
            places |= self.methods(name, "forward", "backward")
        return (each for place in places for each in self.by_definition.get(place, ()))

    def statements_behind(self, seeds: Iterable[Statement], stop: Container[str]) -> Depths:
        """Statements whose values may reach `seeds`, each with its distance, from 0 for seeds to `_MOST_VALUES` - 1.

        A step leads to the statements around one, to those that give what it takes (what it takes as a parameter comes
        from where the function is handed on), and to returns of what it calls. Names in `stop` lead nowhere.
        """
        return _closure(dict.fromkeys(seeds, 0), partial(self._statements_before, stop=stop), _MOST_VALUES - 1)

    def _statements_before(self, statement: Statement, stop: Container[str]) -> Iterator[Statement]:
        """Statements one step behind."""
        yield from statement.around
        for name in (name for name in statement.takes if name.rpartition(":")[2] not in stop):
            yield from self.givers.get(name, ())
            yield from self.takers.get(self.called_as.get(name, ""), ())
        for name in statement.calls:
            for place in self.functions_meant(name, statement.place):
                yield from (s for s in self.by_definition[place] if isinstance(s.node, (ast.Return, *FUNCTIONS)))

    def training_loops(self) -> set[Statement]:
        """Outermost statements around calls of `backward`, with all statements in them; none for a call outside any."""
        heads = {s.around[0] for s in self.callers.get("backward", ()) if s.around}
        return {s for s in self.statements if s in heads or heads.intersection(s.around)}


def _closure(seeds: Depths, step: Callable[[Statement], Iterable[Statement]], most: int) -> Depths:
    """Statements that at most so many steps lead to, each with the smallest number of steps, after that of its seed."""
    depths: Depths = {}
    edge = seeds
    while edge and most >= 0:
        depths |= edge
        edge = {other: depth + 1 for s, depth in edge.items() for other in step(s) if other not in depths}
        most -= 1
    return depths


_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_MOST_MEANT = 3
_MOST_VALUES = 7


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
_FORMAT = r"\Amemory_format\Z"
_BACKWARD = frozenset(("backward", "manual_backward", "scale", "grad"))
_LEADS = ("training_step", "compute_loss")
_GETS = ("__getitem__", "__iter__", "__getitems__", "__next__")
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


def _reach(code: Code, clues: Clues, side: int) -> tuple[Depths, ...]:
    """Statements of one version that are RECORDED, COMPUTES, BUILDS and BETWEEN, in this order, with their depths.

    Args:
        code: the version.
        clues: of the divergence.
        side: 0 for a, 1 for b.
    """
    recorded = {s: 0 for file, line in clues.lines[side] for s in code.statements_at(file, line, line)}
    models = clues.models | {name.rpartition(":")[2] for root in code.callers_of(clues.roots) for name in root.gives}
    leads = _LEADS_BY_REASON.get(clues.reason, Leads())
    between = code.training_loops() if "between" in leads.through else set[Statement]()
    if "called" in leads.through:
        between |= code.with_what_runs(dict.fromkeys(between, 0)).keys()
    computes = _computing(code, clues, leads, models, between)
    if clues.reason == "raised":
        computes = code.reached_from(*(s.place for s in recorded))
    if clues.gap:  # what was not recorded may be anything
        between.update(code.statements)
    behind = code.statements_behind([*recorded, *computes], models)
    late = {s for owner, name in clues.behind for s in code.statements_after(owner, name)}
    reach = recorded, computes, behind, dict.fromkeys(between, 0)
    return tuple({s: depth for s, depth in depths.items() if s not in late} for depths in reach)


def _computing(code: Code, clues: Clues, leads: Leads, models: frozenset[str], between: set[Statement]) -> Depths:
    """Statements that compute the first value that differs, with their depth: by the reason, and what they call.

    Args:
        code: the version.
        clues: of the divergence.
        leads: of its reason.
        models: what the script calls its models.
        between: what a step runs; where it is known, no other call of a model is one of the training.
    """
    reason, through = clues.reason, leads.through
    named = clues.words | {*clues.optimizers} if {"words", "modules"} & {*through} else set[str]()
    named |= {clues.tensor} if "tensor" in through else set()
    near: Depths = {s: 0 for s in code.statements if named & (s.gives | s.calls)}
    modules = {*clues.classes, *clues.inside} if "modules" in through else {*clues.optimizers}
    methods = {place for name in modules for place in code.methods(name, *_FORWARD, "step")}
    near = code.reached_from(*methods) | near
    # lines on record of a random state that differs are of seedings
    pattern = re.compile(_SEED if reason == "rng" and any(clues.lines) else leads.calls)
    near = {s: 1 for s in code.statements if any(map(pattern.search, s.calls | s.gives))} | near
    if "data" in through and not clues.batch_is_equal:
        gets = {s.place for s in code.statements if s.scope.endswith(_GETS) or re.search(_DATA, s.scope)}
        near = code.reached_from(*gets, depth=1) | near
    if "loss" in through:
        starts = code.callers_of(models if reason == "script" else _BACKWARD)
        if reason == "script" and between and not clues.evaluates:
            starts &= between
        starts |= {s for s in code.statements if s.scope.endswith(_LEADS)}
        near = code.statements_behind(starts, models) | near
    return code.with_what_runs({s: 1 for s, depth in near.items() if depth <= 1}) | near


_ELSEWHERE = ORDER.index(Nearness.ELSEWHERE), 0


def _nearness(statement: Statement, reach: Sequence[Depths]) -> tuple[int, int]:
    """(index in `ORDER`, depth) of a statement by the first set that has it; the smaller the nearer.

    A bare expression that gives no value is 1 deeper. ELSEWHERE if no set has it, or if it cannot matter.
    """
    makes_nothing = isinstance(statement.node, ast.Expr) and not statement.gives
    places = [(place, depths[statement] + makes_nothing) for place, depths in enumerate(reach) if statement in depths]
    return places[0] if places and can_matter(statement) else _ELSEWHERE


def ranked(
    changes: Sequence[Change], texts: tuple[Mapping[str, str], Mapping[str, str]], clues: Clues | None
) -> tuple[Ranked, ...]:
    """Changes by nearness, then by names hit (most first), then by depth (smallest first).

    Files that cannot be parsed count as empty.

    Args:
        changes: the changed statements.
        texts: files of a and of b, by their names in b.
        clues: of the divergence; None leaves all ELSEWHERE in the order given.
    """
    if clues is None or not changes:
        return tuple(Ranked(change, Nearness.ELSEWHERE) for change in changes)
    sides = [(code := Code(files), _reach(code, clues, side)) for side, files in enumerate(texts)]
    placed = [_ranked_change(change, sides, clues) for change in changes]
    return tuple(sorted(placed, key=lambda one: (ORDER.index(one.nearness), -one.hits, one.depth)))


def _ranked_change(change: Change, sides: Sequence[tuple[Code, Sequence[Depths]]], clues: Clues) -> Ranked:
    """A change with the nearest of its statements in either version.

    `hits` counts the words of its text that are among the clues, one that changed three times. A change that
    `_only_defines` is `_FAR` deeper, has no hits and cannot matter.
    """
    counts = [Counter(re.findall(r"\w+(?:\.\d+)?", side.text if side else "")) for side in (change.a, change.b)]
    words = set((counts[0] - counts[1]) + (counts[1] - counts[0])) or set(counts[0] + counts[1])
    hits = 2 * len(words & clues.words) + len(set(counts[0] + counts[1]) & clues.words)
    best, matters = _ELSEWHERE, False
    files = change.file_a or change.file, change.file
    for file, side, (code, reach) in zip(files, (change.a, change.b), sides, strict=True):
        if side is not None:
            inside = code.statements_at(file, side.first, sys.maxsize if change.unit == "file" else side.last)
            best = min([best, *(_nearness(statement, reach) for statement in inside)])
            matters |= any(map(can_matter, inside))
    if _only_defines(change, clues):
        return Ranked(change, ORDER[best[0]], best[1] + _FAR, can_matter=False)
    return Ranked(change, ORDER[best[0]], best[1], hits, can_matter=matters)


_DEFINED = re.compile(r"(?:async )?(def|class) (\w+)(?:\([\w., ]*\bModule\b)?")


def _only_defines(change: Change, clues: Clues) -> bool:
    """Whether a change adds or removes a whole function that is no method, or a class of modules of which none ran."""
    alone = change.a if change.b is None else change.b if change.a is None else None
    match = _DEFINED.match(alone.text) if alone is not None else None
    if match is None:
        return False
    return "." not in change.scope if match[1] == "def" else bool(clues.ran) and match[2] not in clues.ran

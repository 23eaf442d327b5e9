"""Effects of functions as values, so that equal computations written differently are equal.

A local name stands for the value last given to it. A renamed variable, a new temporary, moved lines, a lambda made a
function, a loop made a comprehension, or an inverted branch leave the effects of a function unchanged: what it returns,
stores and calls, under which conditions, how often. Values are interned: equal values have one key, whatever their
lines and variable names.

Where effects differ, the smallest differing parts are the changes, each with the syntax that wrote it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from introspect_cli.compare.changes.statements import DEFINITIONS, FUNCTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from introspect_cli.compare.changes.statements import Definition

_ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_TURNED = {"IsNot": "Is", "NotEq": "Eq", "NotIn": "In"}
_SWAPPED = {"Gt": "Lt", "GtE": "LtE"}
STATEMENTS = frozenset(
    {"do", "store", "return", "if", "loop", "with", "try", "match", "raise", "assert", "delete", "break", "continue"}
    | {"defines", "unused"}
)
"""Kinds of effects that are statements of their own."""
_IMPORTS = (ast.Import, ast.ImportFrom)
_MOST_INLINED = 3
_EACH = "<each>"
"""A name that no code has."""


class Value:
    """A value as an expression over values.

    Attributes:
        kind: what makes it, mostly a class of the syntax tree.
        parts: what it is made of: values, and names, numbers and texts.
        node: the syntax that wrote it.
        file: where that stands.
        key: equal for equal values of both versions.
        inside: keys of the values that it is made of, its own among them.
        uses: how many values are made of it.
    """

    __slots__ = ("file", "inside", "key", "kind", "node", "parts", "uses")
    __match_args__ = ("kind", "parts")

    def __init__(self, kind: str, parts: tuple[Any, ...], node: ast.AST, file: str, key: int) -> None:
        """Keep the parts, and collect the keys inside them."""
        self.kind, self.parts, self.node, self.file, self.key, self.uses = kind, parts, node, file, key, 0
        values = [part for part in parts if isinstance(part, Value)]
        self.inside: frozenset[int] = frozenset({key}).union(*(value.inside for value in values))
        for value in values:
            value.uses += 1


class Difference(NamedTuple):
    """The smallest parts in which two versions differ; None for what only the other has.

    Attributes:
        around: of a part that only one has, what it is a part of; None for a whole effect.
    """

    a: Value | None
    b: Value | None
    around: tuple[Value, Value] | None = None

    @property
    def moved(self) -> bool:
        """Whether both versions have an equal value, at another place or in another order."""
        return self.a is not None and self.b is not None and self.a.key == self.b.key


Environment: TypeAlias = "dict[str, Value]"


class Names(NamedTuple):
    """Meaning of a version's names: own modules, renamings, and functions to inline.

    Attributes:
        modules: names of the version's own files, as they are imported.
        renamed: functions, classes, variables of files and attributes that have another name in the other version.
        inlined: functions that the other version lacks, whose calls stand for what they do.
        numbers: of b's functions, by place, the numbers that their parameters have in a, where these are others.
        refused: functions to inline that a call could not be replaced by; filled as calls are read.
        kept: modules of files that did not change, no packages, as they are imported: what they give has their name.
    """

    modules: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = {}
    inlined: Mapping[str, tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]] = {}
    numbers: Mapping[Definition, Mapping[str, int]] = {}
    refused: set[str] = set()  # noqa: RUF012 - each version gives its own
    kept: Mapping[str, str] = {}


Interned: TypeAlias = "dict[object, int]"
"""The keys of the values of both versions."""


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> list[tuple[ast.arg, ast.expr | None]]:
    """The parameters of a function with their defaults, in the order of their numbers: those with `*` and `**` last."""
    given = node.args
    placed, rest = [*given.posonlyargs, *given.args], filter(None, (given.vararg, given.kwarg))
    defaults = [*[None] * (len(placed) - len(given.defaults)), *given.defaults, *given.kw_defaults]
    return [*zip_longest([*placed, *given.kwonlyargs, *rest], defaults)]


_METHOD = re.compile(
    r"torch\.(?:nn\.functional\.)?(relu|sigmoid|tanh|softmax|log_softmax|exp|log|sqrt|rsqrt|abs|neg|pow|sum|mean|std|var|max"
    r"|min|amax|amin|argmax|clamp|reshape|flatten|permute|transpose|squeeze|unsqueeze|add|sub|mul|div)"
)
"""Functions of torch that are methods of their first argument as well, by their whole names."""
_OPERATORS = {"torch.add": "Add", "torch.sub": "Sub", "torch.mul": "Mult", "torch.div": "Div"} | dict.fromkeys(
    ("torch.matmul", "torch.mm", "torch.bmm", "matmul", "mm", "bmm"), "MatMult"
)
"""The operator that computes the same bits as a function of torch, or a method of a tensor, of two arguments."""

_TELLS = frozenset({"ArgumentParser", "add_argument", "add_argument_group", "add_parser", "option", "tqdm", "trange"})
_TOLD = frozenset({"help", "description", "epilog", "metavar", "usage", "desc"})
"""Keywords of these calls that are shown, and change no number."""

_MADE = frozenset({"call", "List", "Dict", "Set"})
"""Kinds of values that are others each time, though the expressions are equal."""
_OF_OTHERS = frozenset({"argument", "each", "part", "attribute", "Subscript"})
"""Kinds of values that were not made where they are used, and may be changed for others."""


class Reader:
    """Reads one function, class body or file into `effects` and `calls`."""

    def __init__(self, interned: Interned, names: Names, file: str) -> None:
        """Begin without effects; nothing is read before `read`, `read_block` or `value` is called."""
        self.names, self._interned, self._file = names, interned, file
        self.effects: list[Value] = []
        self.calls: list[Value] = []
        self.order: list[Value] = []
        """Calls, stores, changes in place and attributes that are read, in the order in which they run."""
        self._context: tuple[Value, ...] = ()
        self._shared: set[str] = set()
        self._depth = 0
        self.idle: set[tuple[int, int]] = set()
        """Keys of loops, each with that of what a name becomes in it, where nothing in it reads what the name was."""
        self.made: dict[int, dict[ast.AST, int]] = {}
        """Numbers of the syntax that makes equal values anew, by their key; what is inlined counts on."""

    def make(self, kind: str, node: ast.AST, *parts: Any) -> Value:
        """A value of this kind and these parts, written by `node`; equal kind and equal parts give an equal key."""
        described = (kind, *((part.key,) if isinstance(part, Value) else (type(part), part) for part in parts))
        return Value(kind, parts, node, self._file, self._interned.setdefault(described, len(self._interned)))

    def read(self, node: Any, env: Environment, numbers: Mapping[str, int] | None = None) -> None:
        """Add the effects of a function, class or file: decorators, bases and defaults, then its body.

        Of a lambda, a `return`; of a class or file, `defines` for the names that it binds and that are no imports, and,
        where it is inside another one, for the functions and classes in it.

        Args:
            node: the syntax.
            env: names around it; not changed.
            numbers: a parameter is known by its place, or by its number here, not by its name.
        """
        inner = dict(env)
        heads = [each for name in ("decorator_list", "bases", "keywords") for each in getattr(node, name, ())]
        for part in heads:
            self._add_effect("head", part, self.value(part.value if isinstance(part, ast.keyword) else part, dict(env)))
        if not isinstance(node, (*FUNCTIONS, ast.Lambda)):
            self.read_block([each for each in node.body if self._depth or not isinstance(each, DEFINITIONS)], inner)
            for name, value in inner.items():
                if env.get(name) is not value and not isinstance(value.node, _IMPORTS):
                    self._add_effect("defines", value.node, self.names.renamed.get(name, name), value)
            return
        for place, (argument, default) in enumerate(parameters_of(node)):
            by_sign = {node.args.vararg: "*", node.args.kwarg: "**"}
            number = (numbers or {}).get(argument.arg, by_sign.get(argument, place))
            inner[argument.arg] = self.make("argument", argument, self._depth, number)
            if default is not None:
                self._add_effect("default", default, number, self.value(default, dict(env)))
        body: Any = node.body
        self.read_block([ast.copy_location(ast.Return(body), body)] if isinstance(node, ast.Lambda) else body, inner)

    def _inner_reader(self, file: str) -> Reader:
        """A reader of what is inside, one deeper."""
        reader = Reader(self._interned, self.names, file)
        reader._depth, reader._context, reader.idle = self._depth + 1, self._context, self.idle
        return reader

    # --- expressions: `_on_X` makes the value of an `ast.X`; `value` finds it by this name

    def value(self, node: ast.AST, env: Environment) -> Value:
        """The value of an expression, by its `_on_` method; may add effects and calls and bind names in `env`."""
        value: Value = getattr(self, f"_on_{type(node).__name__.lower()}", self._generic_value)(node, env)
        return value

    def _values(self, nodes: Iterable[ast.AST | str | None], env: Environment, node: ast.AST) -> Value:
        """The values of several expressions as one `list` value; None is left out, and a name is a constant."""
        named = (ast.copy_location(ast.Constant(each), node) if isinstance(each, str) else each for each in nodes)
        return self.make("list", node, *(self.value(each, env) for each in named if each is not None))

    def _on_name(self, node: ast.Name, env: Environment) -> Value:
        """The value last given to a name in `env`; else a `name`, by its name in the other version.

        A name that a `global` or `nonlocal` declares is a `name` always. Arguments and imports become values written by
        this node.
        """
        if node.id in env and node.id not in self._shared:
            value = env[node.id]
            elsewhere = value.kind == "argument" or isinstance(value.node, _IMPORTS)  # told where it is used
            return self.make(value.kind, node, *value.parts) if elsewhere else value
        return self.make("name", node, self.names.renamed.get(node.id, node.id))

    def _on_attribute(self, node: ast.Attribute, env: Environment) -> Value:
        """A `name` of one of the version's own modules, an `import` of another one, else an `attribute` of a value."""
        of = self.value(node.value, env)
        if of.kind == "name" and of.parts[0] in self.names.modules:
            return self._own_name(node, node.attr, of.parts[0])
        if of.kind == "import":
            return self.make("import", node, f"{of.parts[0]}.{node.attr}")
        value = self.make("attribute", node, of, self.names.renamed.get(node.attr, node.attr))
        return self._in_order(value) if isinstance(node.ctx, ast.Load) else value

    def _on_namedexpr(self, node: ast.NamedExpr, env: Environment) -> Value:
        env[node.target.id] = value = self.value(node.value, env)
        return value

    def _on_unaryop(self, node: ast.UnaryOp, env: Environment) -> Value:
        value = self.value(node.operand, env)
        return self.make("not" if isinstance(node.op, ast.Not) else type(node.op).__name__, node, value)

    def _on_binop(self, node: ast.BinOp, env: Environment) -> Value:
        """An operator with its two operands and the `with` contexts around it, as a call has them."""
        one, two = self.value(node.left, env), self.value(node.right, env)
        return self.make("BinOp", node, one, ast.dump(node.op), two, *self._context)

    def _on_compare(self, node: ast.Compare, env: Environment) -> Value:
        """A comparison with `not` in front for `!=`, `is not`, `not in`, and with sides swapped for `>` and `>=`.

        A chain of several keeps its operators and order.
        """
        if len(node.ops) > 1:
            return self._generic_value(node, env)
        kind, one, two = type(node.ops[0]).__name__, self.value(node.left, env), self.value(node.comparators[0], env)
        if kind in _SWAPPED:
            kind, one, two = _SWAPPED[kind], two, one
        compared = self.make("compare", node, _TURNED.get(kind, kind), one, two)
        return self.make("not", node, compared) if kind in _TURNED else compared

    def _on_ifexp(self, node: ast.IfExp, env: Environment) -> Value:
        """A conditional value; a `not` in front of the test swaps the branches instead."""
        test, either = self.value(node.test, env), (node.body, node.orelse)
        if test.kind == "not":
            test, either = test.parts[0], either[::-1]
        return self._conditional(node, test, *(self.value(each, env) for each in either))

    def _conditional(self, node: ast.AST, test: Value, one: Value | None, two: Value | None) -> Value:
        """A conditional value of a test that has no `not` in front. None stands for unset."""
        none = self.make("unset", node)
        return self.make("either", node, test, one or none, two or none)

    def _nested_value(self, node: Any, env: Environment) -> Value:
        """A nested function, lambda or class as a value made of its effects."""
        reader = self._inner_reader(self._file)
        reader.read(node, {**env, getattr(node, "name", ""): self.make("itself", node)})
        return self.make("function", node, self.make("list", node, *reader.all_effects()))

    _on_lambda = _nested_value

    def _comprehension(self, node: Any, env: Environment) -> Value:
        """A comprehension as element, iterables and conditions; list comprehensions and generators are equal."""
        env = dict(env)
        conditions = []
        overs = []
        for generator in node.generators:
            overs.append(self._bind_each(generator.target, generator.iter, env))
            conditions += [self.value(test, env) for test in generator.ifs]
        element = (
            self.make("pair", node, self.value(node.key, env), self.value(node.value, env))
            if isinstance(node, ast.DictComp)
            else self.value(node.elt, env)
        )
        kind = {ast.DictComp: "dict of", ast.SetComp: "set of"}.get(type(node), "list of")
        return self.make(kind, node, element, self.make("list", node, *overs), self.make("list", node, *conditions))

    _on_listcomp = _on_setcomp = _on_generatorexp = _on_dictcomp = _comprehension

    def _bind_each(self, target: ast.expr, over: ast.expr, env: Environment) -> Value:
        """Bind a loop's variables in `env` to elements of `over`, and return the iterable's value.

        Through `zip` and `enumerate` into a tuple of as many variables, they are bound to elements of what is inside;
        of `enumerate`, the inner iterable is returned.
        """
        match over, target:
            case ast.Call(ast.Name("zip"), given), ast.Tuple(targets) if (
                len(given) == len(targets) and "zip" not in env
            ):
                overs = [self._bind_each(one, each, env) for one, each in zip(targets, given, strict=True)]
                return self.make("zip", over, *sorted(overs, key=lambda value: value.key))
            case ast.Call(ast.Name("enumerate"), [first, *start], named), ast.Tuple([number, each]):
                inner = self._bind_each(each, first, env)
                starts = self._values([*start, *(keyword.value for keyword in named)], env, over).parts
                self._assign(number, self.make("index", target, inner, *starts), env)
                return inner
        value = self.value(over, env)
        self._assign(target, self.make("each", target, value), env)
        return value

    def _on_call(self, node: ast.Call, env: Environment) -> Value:
        """A call as function, arguments, keywords by name and the `with` contexts around it; it is added to `calls`.

        A call of a function in `names.inlined` is what its body gives, if that can be inlined. `x.size(1)` is
        `x.shape[1]`, `torch.relu(x)` is `x.relu()`, `torch.mm(a, b)` is `a @ b`, and `map(f, xs)`, in a list too, the
        comprehension.
        """
        match node:
            case ast.Call(ast.Attribute(of, "size"), [] | [ast.Constant(int())], []):
                shape = self.make("attribute", node, self.value(of, env), "shape")
                return self.make("part", node, shape, *map(ast.literal_eval, node.args)) if node.args else shape
            case ast.Call(ast.Name("map"), [called, over], []) if "map" not in env:
                each = ast.comprehension(ast.Name(_EACH, ast.Store()), over, [], 0)
                written = ast.ListComp(ast.Call(called, [ast.Name(_EACH, ast.Load())], []), [each])
                return self.value(ast.fix_missing_locations(ast.copy_location(written, node)), env)
            case ast.Call(ast.Name("list"), [ast.ListComp() | ast.GeneratorExp() | ast.Call(ast.Name("map"))], []):
                return self.value(node.args[0], env)
        function = self.value(node.func, env)
        given = [self.value(each, env) for each in node.args]
        told = _TOLD if str(*function.parts[-1:]).rpartition(".")[2] in _TELLS else ()
        passed = [
            (each, each.arg or "**", self.value(each.value, env)) for each in node.keywords if each.arg not in told
        ]
        done = self._inline(node, function, given, {name: value for _, name, value in passed})
        if done is not None:
            return done
        operands = [function.parts[0], *given] if function.kind == "attribute" else given
        operator = _OPERATORS.get(function.parts[-1]) if function.kind in {"attribute", "import"} else None
        if operator is not None and len(operands) == 2 and not passed:
            return self.make("BinOp", node, operands[0], f"{operator}()", operands[1], *self._context)
        if given and function.kind == "import" and (method := _METHOD.fullmatch(function.parts[0])):
            function, given = self.make("attribute", node, given[0], method[1]), given[1:]
        named = (
            self.make("keyword", each, self.names.renamed.get(name, name), value)
            for each, name, value in sorted(passed, key=lambda one: one[1])
        )
        listed = self.make("list", node, *given), self.make("list", node, *named)
        value = self._in_order(self.make("call", node, function, *listed, *self._context))
        self.calls.append(value)
        return value

    def _on_subscript(self, node: ast.Subscript, env: Environment) -> Value:
        """A part that is read by its number, as unpacking gives it; any other subscript as it is."""
        match node:
            case ast.Subscript(of, ast.Constant(int(place)), ast.Load()) if place >= 0:
                return self.make("part", node, self.value(of, env), place)
        return self._generic_value(node, env)

    def _inline(
        self, node: ast.Call, function: Value, given: Sequence[Value], keywords: Mapping[str, Value]
    ) -> Value | None:
        """Add the effects of the body of a function in `names.inlined` and return its result; None for any other one.

        None, and no effects, also where arguments cannot be bound one by one, or where it returns before its last
        statement. The constant None where it returns nothing.

        Args:
            node: the call.
            function: value of what is called; `self` is what it is an attribute of.
            given: values of positional arguments.
            keywords: values of keyword arguments.
        """
        file, made = self.names.inlined.get(str(*function.parts[-1:]), ("", None))
        if made is None or function.kind not in {"name", "attribute"} or self._depth >= _MOST_INLINED:
            return None
        names = [argument.arg for argument, _ in parameters_of(made)]
        of = [function.parts[0]] if names[:1] == ["self"] and function.kind == "attribute" else []
        env = {each.arg: self.value(default, {}) for each, default in parameters_of(made) if default is not None}
        env |= {**dict(zip(names, [*of, *given], strict=False)), **keywords}
        reader = self._inner_reader(file)
        reader.made = self.made
        if {*names} == env.keys() and not any(each.kind == "Starred" for each in given):
            reader.read_block(made.body, env)
            last = reader.effects.pop() if reader.effects and reader.effects[-1].kind == "return" else None
            if not any(map(_returns, reader.effects)):
                self.effects += reader.effects
                self.calls += reader.calls
                self.order += reader.order
                return self.make("Constant", node, "None") if last is None else last.parts[0]
        self.names.refused.add(made.name)
        return None

    def _generic_value(self, node: ast.AST, env: Environment) -> Value:
        """A value of a node whose class has no `_on_` method, made of its fields."""
        parts = [
            self._values(child, env, node)
            if isinstance(child, list)
            else self.value(child, env)
            if isinstance(child, ast.AST) and not isinstance(child, (ast.boolop, ast.operator))
            else ast.dump(child)
            if isinstance(child, ast.AST)
            else repr(child)
            for field, child in ast.iter_fields(node)
            if field not in {"ctx", "type_comment", "kind"}
        ]
        return self.make(type(node).__name__, node, *parts)

    # --- statements: `_on_X` adds the effects of an `ast.X` and binds its names; `read_block` finds it by this name

    def _add_effect(self, kind: str, node: ast.AST, *parts: Any) -> Value:
        """Add an effect of this kind, written by `node`."""
        self.effects.append(self.make(kind, node, *parts))
        return self.effects[-1]

    def _in_order(self, value: Value) -> Value:
        """Add a value to `order`, and return it."""
        self.order.append(value)
        return value

    def _effects_of_block(self, statements: Sequence[ast.stmt], env: Environment, node: ast.AST) -> Value:
        """Read statements and return their effects as one `list` value instead of leaving them in `effects`."""
        mark = len(self.effects)
        self.read_block(statements, env)
        done = self.make("list", node, *self.effects[mark:])
        del self.effects[mark:]
        return done

    def _assign(self, target: ast.AST, value: Value, env: Environment) -> None:
        """Bind a local name in `env`, unpack a tuple or list, or add an effect `store` for any other target.

        `store` too for a name that a `global` or `nonlocal` declares. A starred target is bound to a value `rest`.
        """
        if isinstance(target, ast.Name):
            if target.id in self._shared:
                self._in_order(self._add_effect("store", target, self.make("name", target, target.id), value))
            else:
                env[target.id] = self._told_apart(value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            value = self._told_apart(value)
            given = value.parts[0].parts if value.kind in {"Tuple", "List"} else ()
            plain = len(given) == len(target.elts) and not any(isinstance(part, ast.Starred) for part in target.elts)
            for place, each in enumerate(target.elts):
                self._assign(each, given[place] if plain else self.make("part", each, value, place), env)
        elif isinstance(target, ast.Starred):
            self._assign(target.value, self.make("rest", target, value), env)
        else:
            self._in_order(self._add_effect("store", target, self.value(target, env), value))

    def _told_apart(self, value: Value) -> Value:
        """A value that is made anew each time: numbered from the second on that equal expressions give to names.

        Two lists that begin empty, two draws and two models of one class are not the same; what a method without
        arguments gives, such as `model.parameters()`, mostly is.
        """
        asks = value.kind == "call" and value.parts[0].kind == "attribute" and not value.parts[1].parts
        if value.kind not in _MADE or asks:
            return value
        numbers = self.made.setdefault(value.key, {})
        number = numbers.setdefault(value.node, len(numbers))
        return self.make("again", value.node, value, number) if number else value

    def read_block(self, statements: Sequence[ast.stmt], env: Environment) -> None:
        """Read the statements of a block in their order; adds effects and binds names in `env`.

        An `if` without an `else` whose body ends by a return, raise, continue or break has the rest of the block as its
        `else`. Statements without an `_on_` method have no effect, except `match`.
        """
        for place, statement in enumerate(statements):
            kind = type(statement).__name__.lower().removeprefix("async").removesuffix("star")
            if isinstance(statement, ast.If):
                ends = not statement.orelse and isinstance(statement.body[-1], _ENDS)
                self._read_branches(statement, statements[place + 1 :] if ends else statement.orelse, env)
                if ends:
                    return
            elif kind == "match":
                self._add_effect("match", statement, self._generic_value(statement, env))
            elif hasattr(self, f"_on_{kind}"):
                getattr(self, f"_on_{kind}")(statement, env)

    def _on_expr(self, node: ast.Expr, env: Environment) -> None:
        value = self.value(node.value, env)
        if value.kind != "Constant":
            self._add_effect("do", node, value)

    def _on_assign(self, node: ast.Assign | ast.AnnAssign, env: Environment) -> None:
        value = self.value(node.value, env) if node.value is not None else None
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if value is not None:
                self._assign(target, value, env)

    _on_annassign = _on_assign

    def _on_augassign(self, node: ast.AugAssign, env: Environment) -> None:
        """Bind the target to a value `in-place` and the operator's name, of what it was and the right side.

        Where a name stands for an object that others may hold, that is changed too: it counts as a call.
        """
        was = self.value(node.target, env)
        value = self._in_order(self.make(f"in-place {type(node.op).__name__}", node, was, self.value(node.value, env)))
        if isinstance(node.target, ast.Name) and was.kind in _OF_OTHERS:
            self.calls.append(value)
        self._assign(node.target, value, env)

    def _read_branches(self, node: ast.If, orelse: Sequence[ast.stmt], env: Environment) -> None:
        """Read both branches of an `if` and bind in `env` what they bind, conditionally where they differ.

        A branch that ends by a return, raise, continue or break binds nothing. Two branches that only return become one
        return of a conditional value; any other effects become an effect `if`, none if there are none.

        Args:
            node: the statement.
            orelse: what stands for its `else`.
            env: names before it; changed.
        """
        test = self.value(node.test, env)
        bodies: tuple[Sequence[ast.stmt], Sequence[ast.stmt]] = node.body, orelse
        if test.kind == "not":
            test, bodies = test.parts[0], (orelse, node.body)
        envs = dict(env), dict(env)
        done = [self._effects_of_block(body, inner, node) for body, inner in zip(bodies, envs, strict=True)]
        ends = [part.parts[0] for part in done if len(part.parts) == 1 and part.parts[0].kind == "return"]
        if len(ends) == 2:
            self._add_effect("return", node, self._conditional(node, test, ends[0].parts[0], ends[1].parts[0]))
        elif any(part.parts for part in done):
            self._add_effect("if", node, test, *done)
        ended = [bool(body) and isinstance(body[-1], _ENDS) for body in bodies]
        if any(ended):
            env |= envs[0] if ended[1] else envs[1]
            return
        self._merge(node, test, envs, env)

    def _merge(self, node: ast.AST, test: Value, either: tuple[Environment, Environment], env: Environment) -> None:
        """Bind in `env` what both of two environments bind, conditionally where they differ."""
        for name in dict.fromkeys([*either[0], *either[1]]):
            one, two = either[0].get(name), either[1].get(name)
            alike = one is not None and two is not None and one.key == two.key
            env[name] = one if one is not None and alike else self._conditional(node, test, one, two)

    def _on_for(self, node: ast.For | ast.AsyncFor | ast.While, env: Environment) -> None:
        """Read a loop: its variables, body and `else`; names that it binds become values of kind `after` in `env`.

        Names bound before it that its body binds again are of kind `carried` inside it. A loop that only fills an empty
        list or dictionary becomes a comprehension bound to its name. Any other becomes an effect `loop`, unless it has
        no effects and rebinds nothing.
        """
        inner, times = dict(env), Counter[int]()
        own = _stored_names([] if isinstance(node, ast.While) else [node.target])
        carried = {name: at for name, at in _stored_names([node]).items() if name in env and name not in own}
        was = dict[str, int]()
        for name, at in carried.items():
            inner[name] = self.make("carried", at, env[name], times[env[name].key])
            was[name] = inner[name].key
            times[env[name].key] += 1
        if isinstance(node, ast.While):
            over = self.value(node.test, inner)
        else:
            over = self._bind_each(node.target, node.iter, inner)
        done = self._effects_of_block(node.body, inner, node)
        filled = self._as_comprehension(node, over, done, env)
        if filled is not None:
            env |= filled
            return
        updates = self.make("list", node, *(inner[name] for name in carried))
        if done.parts or carried:
            loop = self._add_effect("loop", node, over, done, updates)
            others = {**inner, "<over>": over, "<done>": done}
            for name in carried:
                if not any(was[name] in value.inside for other, value in others.items() if other != name):
                    self.idle.add((loop.key, inner[name].key))
        for name, value in inner.items():
            if name not in env or env[name].key != value.key:
                env[name] = self.make("after", node, over, value)
        self.read_block(node.orelse, env)

    _on_while = _on_for

    def _as_comprehension(self, node: ast.AST, over: Value, done: Value, env: Environment) -> Environment | None:
        """A mapping of one name to a comprehension, where a loop only fills a list or dictionary that was empty.

        None otherwise. Conditions around the filling become the comprehension's. Takes the loop's `append` out of
        `calls`.

        Args:
            node: the loop.
            over: value of what it runs over.
            done: effects of its body.
            env: names around it.
        """
        conditions = []
        while len(done.parts) == 1 and done.parts[0].kind == "if" and not done.parts[0].parts[2].parts:
            conditions.append(done.parts[0].parts[0])
            done = done.parts[0].parts[1]
        match done.parts:
            case [Value("do", [Value("call", [Value(_, [target, "append"]), Value(_, [element]), *_]) as call])]:
                kind = "list of"
                self.calls = [each for each in self.calls if each is not call]
            case [Value("store", [Value("Subscript", [target, key]), value])]:
                kind, element = "dict of", self.make("pair", node, key, value)
            case _:
                return None
        names = [name for name, value in env.items() if value is target]
        begun = target.parts[0] if target.kind == "again" else target
        if len(names) != 1 or begun.kind not in {"List", "Dict"} or any(part.parts for part in begun.parts):
            return None
        rest = self.make("list", node, over), self.make("list", node, *conditions)
        return {names[0]: self.make(kind, node, element, *rest)}

    def _on_with(self, node: ast.With | ast.AsyncWith, env: Environment) -> None:
        """Add an effect `with` of the contexts and the body's effects; calls in the body have the contexts as parts."""
        context = self._context
        for item in node.items:
            value = self.value(item.context_expr, env)
            self._context = (*self._context, value)
            if item.optional_vars is not None:
                self._assign(item.optional_vars, self.make("entered", item.context_expr, value), env)
        done = self._effects_of_block(node.body, env, node)
        self._add_effect("with", node, self.make("list", node, *self._context[len(context) :]), done)
        self._context = context

    def _on_try(self, node: ast.Try, env: Environment) -> None:
        """Add an effect `try` of all blocks; names that a handler binds otherwise become conditional in `env`."""
        parts = [self._effects_of_block(node.body, env, node)]
        for handler in node.handlers:
            caught = self._values([handler.type], env, handler)
            inner = env | ({handler.name: self.make("caught", handler, caught)} if handler.name else {})
            parts.append(self.make("handler", handler, caught, self._effects_of_block(handler.body, inner, handler)))
            self._merge(handler, caught, (inner, dict(env)), env)
        parts += [self._effects_of_block(node.orelse, env, node), self._effects_of_block(node.finalbody, env, node)]
        self._add_effect("try", node, *parts)

    def _on_return(self, node: ast.Return, env: Environment) -> None:
        none = ast.copy_location(ast.Constant(None), node)
        self._add_effect("return", node, self.value(node.value or none, env))

    def _on_raise(self, node: ast.stmt, env: Environment) -> None:
        values = (self.value(child, env) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
        self._add_effect(type(node).__name__.lower(), node, *values)

    _on_assert = _on_delete = _on_break = _on_continue = _on_raise

    def _on_global(self, node: ast.Global | ast.Nonlocal, _: Environment) -> None:
        self._shared |= set(node.names)

    _on_nonlocal = _on_global

    def _on_functiondef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, env: Environment) -> None:
        env[node.name] = self._nested_value(node, env)

    _on_classdef = _on_functiondef

    def _on_import(self, node: ast.Import, env: Environment) -> None:
        """Bind each module's name: an own module to a `name`, another one to an `import`."""
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            whole = alias.name if alias.asname else name
            env[name] = self.make("name" if whole in self.names.modules else "import", node, whole)

    def _on_importfrom(self, node: ast.ImportFrom, env: Environment) -> None:
        """Bind each name: of an own module to a `name`, of another one to an `import`.

        For all names of a module that has not changed, an effect.
        """
        own = node.level > 0 or (node.module or "") in self.names.modules
        for alias in node.names:
            value = env[alias.asname or alias.name] = (
                self._own_name(node, alias.name, node.module or "", node.level)
                if own
                else self.make("import", node, f"{node.module}.{alias.name}")
            )
            if alias.name == "*" and (not own or len(value.parts) > 1):
                self._add_effect("binds", node, value)

    def _own_name(self, node: ast.AST, name: str, module: str, level: int = 0) -> Value:
        """A `name` of one of the version's own modules, with the file if it has not changed: nothing moved out of it.

        Args:
            node: the syntax.
            name: function, class or variable.
            module: as it is imported.
            level: number of dots before it.
        """
        home = ".".join(self._file.split("/")[:-level]) if level else ""
        file = self.names.kept.get(f"{home}.{module}".strip("."))
        return self.make("name", node, self.names.renamed.get(name, name), *([file] if file else []))

    def all_effects(self) -> list[Value]:
        """`effects`, then calls and changes in place that no effect uses, as kind `unused`: they may draw or write.

        Outermost calls only.
        """
        inside: frozenset[int] = frozenset().union(*(effect.inside for effect in self.effects))
        unused = {call.key: call for call in self.calls if call.key not in inside}
        inner: frozenset[int] = frozenset().union(
            *(part.inside for call in unused.values() for part in call.parts if isinstance(part, Value))
        )
        left = (call for key, call in unused.items() if key not in inner)
        return [*self.effects, *(self.make("unused", call.node, call) for call in left)]


def _stored_names(nodes: Iterable[ast.AST]) -> dict[str, ast.Name]:
    """Names that get a value anywhere in these nodes, each where it gets the last one that the walk meets."""
    every = (n for node in nodes for n in ast.walk(node))
    return {n.id: n for n in every if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _returns(effect: Value) -> bool:
    """Whether an effect is a `return`, or a block that contains one."""
    inside = effect.parts if effect.kind in {"if", "loop", "try", "with", "handler", "list"} else ()
    return effect.kind == "return" or any(_returns(each) for each in inside if isinstance(each, Value))


# --- what differs


def differences(a: Sequence[Value], b: Sequence[Value]) -> list[Difference]:
    """The smallest parts in which the effects of two functions differ.

    Values of one shape are compared part by part, others differ as a whole, and so may what is inside them; of two of
    which one is inside the other, it is what was put around it, or taken away. Where both functions have both values,
    the choice between them differs, and so what they are a part of. A value that one version alone has at one place,
    and the other alone at another, is one difference that `moved`.
    """
    found: dict[tuple[_WrittenAt | None, _WrittenAt | None], Difference] = {}
    seen: set[tuple[int, int]] = set()
    known = [frozenset[int]().union(*(effect.inside for effect in effects)) for effects in (b, a)]
    pending = [*_replaced_parts(a, b, None)]
    while pending:
        one, two, around = pending.pop()
        if one is not None and two is not None:
            if one.key == two.key or (id(one), id(two)) in seen:
                continue
            seen.add((id(one), id(two)))
            inside = one.key in two.inside, two.key in one.inside
            once = (inside[0] and two.uses == 1) or (inside[1] and one.uses == 1) or {one.kind, two.kind} <= _WRITTEN
            if one.key in known[0] and two.key in known[1] and not once:
                one, two = around or (one, two)
            elif (inner := _differing_parts(one, two, around)) is not None:
                pending += inner
                continue
            else:
                pending += [] if any(inside) else _also_differing(one, two)
                one, two = (None if within else each for each, within in zip((one, two), inside, strict=True))
        found.setdefault((_written_at(one), _written_at(two)), Difference(one, two, around))
    gone = {each.a.key: spots for spots, each in found.items() if each.a is not None and each.b is None}
    for spots, each in list(found.items()):
        if each.a is None and each.b is not None and each.b.key in gone:
            found[spots] = Difference(found.pop(gone.pop(each.b.key)).a, each.b)
    return list(found.values())


_WRITTEN = frozenset({"Constant", "import", "name"})
"""Kinds of values that are made where they are written."""
_WrittenAt: TypeAlias = "tuple[int, str, int]"
"""The key of a value, and the file and line that wrote it."""


def _written_at(value: Value | None) -> _WrittenAt | None:
    return None if value is None else (value.key, value.file, getattr(value.node, "lineno", 0))


_Pairs: TypeAlias = "Iterator[tuple[Value | None, Value | None, tuple[Value, Value] | None]]"
"""Values of a and of b, None for what the other alone has, each pair with what it is in; None for an effect."""


def _replaced_parts(one: Sequence[Value], two: Sequence[Value], around: tuple[Value, Value] | None) -> _Pairs:
    """Parts of two lists that were replaced, in pairs."""
    keys = [[value.key for value in values] for values in (one, two)]
    for tag, low, high, start, stop in SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_opcodes():
        if tag != "equal":
            yield from ((x, y, around) for x, y in _paired_effects(one[low:high], two[start:stop]))


def _differing_parts(one: Value, two: Value, around: tuple[Value, Value] | None) -> _Pairs | None:
    """Pairs of parts in which two lists, or two values of one kind and of equal names, differ.

    None where they differ as a whole: in kind, names or number of parts, since one is inside the other, or where
    arguments were exchanged.
    """
    if one.kind == two.kind == "list":
        in_order = any(part.kind in STATEMENTS for part in one.parts)
        exchanged = not in_order and sorted(part.key for part in one.parts) == sorted(part.key for part in two.parts)
        return None if exchanged else _replaced_parts(one.parts, two.parts, around)
    values = [[part for part in value.parts if isinstance(part, Value)] for value in (one, two)]
    if one.kind != two.kind or _names_of(one) != _names_of(two):
        return None
    differ = [(x, y, (one, two)) for x, y in zip(*values, strict=True) if x.key != y.key]
    called = (values[0][0], values[1][0]) if one.kind == "call" and differ[0][0] is one.parts[0] else None
    other = called is not None and (called[0].kind, _names_of(called[0])) != (called[1].kind, _names_of(called[1]))
    whole = two.key in one.inside or one.key in two.inside or other
    return None if whole and len(differ) > 1 else iter(differ)


def _also_differing(one: Value, two: Value) -> _Pairs:
    """Pairs inside two values that differ as a whole: what something was put around, else what functions are given."""
    for place, (small, large) in enumerate(((one, two), (two, one))):
        parts = [large]
        while parts and small.kind not in _WRITTEN:
            parts = [*{v.key: v for part in parts for v in part.parts if isinstance(v, Value)}.values()]
            for part in parts:
                if head_of(part) == head_of(small) and _likeness(small, part) > _LIKE:
                    yield (part, small, (one, two)) if place else (small, part, (one, two))
                    return
    if one.kind == two.kind == "call":
        given = _replaced_parts(one.parts[1].parts, two.parts[1].parts, (one, two))
        yield from (each for each in given if each[0] and each[1] and head_of(each[0]) == head_of(each[1]))


def head_of(value: Value) -> tuple[object, ...]:
    """What two values have alike whose parts are compared one by one: kind, names, of a call its function or method."""
    if value.kind != "call":
        return value.kind, *_names_of(value)
    called = value.parts[0]
    return value.kind, *_names_of(value), *(_names_of(called) if called.kind == "attribute" else [called.key])


def _names_of(value: Value) -> list[Any]:
    """Names, numbers and texts of a value in their places; None in those of values."""
    return [None if isinstance(part, Value) else part for part in value.parts]


def _paired_effects(one: Sequence[Value], two: Sequence[Value]) -> Iterator[tuple[Value | None, Value | None]]:
    """Pairs of values of two lists, None for what one list alone has.

    If kinds are equal one by one, in order. Else the most alike first (`_likeness` over `_LIKE`); what remains, and is
    inside nothing of the other list, pairs up in order if it is equally many.
    Defaults pair up by their parameter alone.
    """
    if len(one) == len(two) and all(x.kind == y.kind != "default" for x, y in zip(one, two, strict=True)):
        yield from zip(one, two, strict=True)
        return
    left, right = dict(enumerate(one)), dict(enumerate(two))
    alike = ((_likeness(x, y), i, j) for i, x in enumerate(one) for j, y in enumerate(two))
    for like, i, j in sorted(alike, key=lambda each: -each[0]):
        if like > _LIKE and i in left and j in right:
            yield left.pop(i), right.pop(j)
    gone = [value for value in left.values() if not any(value.key in other.inside for other in two)]
    come = [value for value in right.values() if not any(value.key in other.inside for other in one)]
    replaced = len(gone) == len(come) and all(value.kind != "default" for value in gone)
    yield from zip(gone, come, strict=True) if replaced else [*zip_longest(gone, []), *zip_longest([], come)]


_LIKE = 0.1


def _likeness(one: Value, two: Value) -> float:
    """Share of keys that two values of one kind have in common, 0 to 1; 2 where one is inside the other.

    Of the defaults of two parameters 0, of one 1.
    """
    if one.key in two.inside or two.key in one.inside:  # a condition came, or a block
        return 2.0
    if one.kind == two.kind == "default":  # of one parameter, or of two
        return float(one.parts[0] == two.parts[0])
    return len(one.inside & two.inside) / len(one.inside | two.inside) * (one.kind == two.kind)

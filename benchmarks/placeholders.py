"""Sentences as placeholders: what is left of an answer where no text that it is made of can be read.

A comparison that asks what one of its own sentences says (`name.startswith("the random state")`) changes its answer
when somebody words the sentence better. So before the package is imported, every fragment of a sentence in its code is
replaced by a placeholder, each occurrence by one of its own, `⟦17⟧`. A question put to a sentence then gets another
answer than before, and what follows from it differs. `Restored.text` puts the fragments back, so that the rest of an
answer can be compared with that of the code as it stands, too.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType, ModuleType

PACKAGES = ("introspect_cli.compare", "introspect_cli.health", "introspect_cli.store.ranks.combine")
"""What is rewritten, with all that is below it: the makers of sentences and of notes of records."""

IDENTIFIERS = frozenset(
    {"only a", "only b", "not seen", "not observed"}  # states, as `result.py` lists them and renderers ask for them
    | {"messages of", "messages of ", "send to"}  # what captures write of messages between ranks, and readers know
)
"""Texts with a blank in them that are no part of a sentence."""

MARK = "__fragment__"
_PLACEHOLDER = re.compile("⟦([0-9]+)⟧")
_WORDS = re.compile(r"[a-z]", re.IGNORECASE)
_CONSTANT = re.compile(r"_?[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
_PATTERNS = frozenset({"compile", "match", "search", "fullmatch", "sub", "split", "findall"})
SAID = frozenset({"sentence", "evidence", "notes", "suggestions", "text", "note", "cause", "site", "unseen"})
"""Keys of the documents of `diff` and `check` under which there are sentences, and nothing that is decided."""


class Fragments:
    """The fragments that were replaced, by number."""

    def __init__(self) -> None:
        """None yet."""
        self._texts: list[str] = []

    def replaced(self, text: str) -> str:
        """A placeholder of its own for this occurrence."""
        self._texts.append(text)
        return f"⟦{len(self._texts) - 1}⟧"

    def mark(self, number: int, value: Any) -> Any:
        """What a name in capitals stands for: where that is a fragment, a placeholder of the place that uses it."""
        if isinstance(value, str) and _PLACEHOLDER.search(value):
            self._texts[number] = value
            return f"⟦{number}⟧"
        return value

    def restored(self, text: str) -> str:
        """The text with the fragments in their places."""
        while (put_in := _PLACEHOLDER.sub(lambda match: self._texts[int(match[1])], text)) != text:
            text = put_in
        return text


def is_fragment(text: str) -> bool:
    """Whether a text is a part of a sentence, and no identifier nor template for `format`."""
    return " " in text and "{" not in text and bool(_WORDS.search(text)) and text not in IDENTIFIERS


class _Replacing(ast.NodeTransformer):
    """Replaces the fragments of one module."""

    def __init__(self, fragments: Fragments) -> None:
        self._fragments = fragments

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if isinstance(node.value, str) and is_fragment(node.value):
            return ast.copy_location(ast.Constant(self._fragments.replaced(node.value)), node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if not isinstance(node.ctx, ast.Load) or not _CONSTANT.fullmatch(node.id):
            return node
        number = ast.Constant(int(self._fragments.replaced("")[1:-1]))
        call = ast.Call(ast.Name(MARK, ast.Load()), [number, node], [])
        return ast.fix_missing_locations(ast.copy_location(call, node))

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.FormattedValue:
        node.value = self.visit(node.value)  # how it is formatted is no text
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in _PATTERNS and ast.unparse(function.value) == "re":
            return node
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return node

    def _body(self, node: Any) -> Any:
        documented = ast.get_docstring(node, clean=False) is not None
        kept = node.body[:documented]
        node.body = node.body[documented:]
        returns, node_returns = getattr(node, "returns", None), hasattr(node, "returns")
        if node_returns:
            node.returns = None
        self.generic_visit(node)
        if node_returns:
            node.returns = returns
        node.body = kept + node.body
        return node

    visit_Module = visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _body  # noqa: N815


def replaced(tree: ast.Module, fragments: Fragments) -> ast.Module:
    """The code with its fragments replaced; it wants `fragments.mark` as a global called `MARK`."""
    changed: ast.Module = ast.fix_missing_locations(_Replacing(fragments).visit(tree))
    return changed


class _Loader(importlib.machinery.SourceFileLoader):
    fragments: Fragments

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = replaced(ast.parse(self.get_data(path), path), self.fragments)
        code: CodeType = compile(tree, path, "exec", dont_inherit=True)
        return code

    def exec_module(self, module: ModuleType) -> None:
        vars(module)[MARK] = self.fragments.mark
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, fragments: Fragments) -> None:
        self._fragments = fragments

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(PACKAGES):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return spec
        loader = _Loader(spec.loader.name, spec.loader.path)
        loader.fragments = self._fragments
        spec.loader = loader
        return spec


def install() -> Fragments:
    """Replace fragments in what this process imports of the package from now on."""
    early = [name for name in sys.modules if name.startswith(PACKAGES)]
    assert not early, f"imported already: {early}"
    fragments = Fragments()
    sys.meta_path.insert(0, _Finder(fragments))
    return fragments


def decided(document: Any) -> Any:
    """A document without its sentences."""
    if isinstance(document, dict):
        return {name: decided(value) for name, value in document.items() if name not in SAID}
    return [decided(value) for value in document] if isinstance(document, list) else document

"""Count how often the changed line that made two runs diverge is the first that `diff` names.

Every planted fault of `fixtures` that a flag switches on is made a change of the source: both versions of the script
are written without the flag's comparisons, one as if the fault were off and one as if it were on, so that the changed
statements are known by construction. Beside them b has decoys: in other functions (`--decoys`, three by default, drawn
by the case's name; 0 for all of them) one statement written in another way that computes the same; a message that is
printed; a function that nobody calls.

    python benchmarks/lines.py [--only PATTERN] [--decoys N] [--keep DIRECTORY] [--jobs N] [-v]

named: the first change that is listed is one of the fault's. later: it is called likely, and another comes first.
wrong: what only prints, or what nobody calls, is called likely. The exit status is 0 where nine of ten are named and
none is wrong.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import random
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cases import FIXTURES, Captures, compare, load_cases, load_field_cases
from forks import Forks

from introspect_cli.compare.changes.statements import changed_statements

if TYPE_CHECKING:
    from typing import Any

    from cases import Case, Side

FLAGS = {"--fault": "fault", "--bug": "bug"}
UNUSED = "never_called"


@dataclass(frozen=True)
class Variant:
    """A fault as two versions of a script.

    Attributes:
        case: the pair that it was.
        a: the script without the fault.
        b: the script with it, and with decoys.
        planted: scope and texts of the fault's statements.
    """

    case: Case
    a: str
    b: str
    planted: frozenset[tuple[str, str, str]]


class Switched(ast.NodeTransformer):
    """A script as it is with one value of its flag, without the flag."""

    def __init__(self, flag: str, value: str) -> None:
        self.flag, self.value = flag, value

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        """A comparison of the flag becomes what it comes to."""
        self.generic_visit(node)
        if len(node.ops) != 1 or not self._is_flag(node.left):
            return node
        try:
            wanted = ast.literal_eval(node.comparators[0])
        except ValueError:
            return node
        if isinstance(node.ops[0], (ast.In, ast.NotIn)):
            return ast.Constant((self.value in wanted) is isinstance(node.ops[0], ast.In))
        return ast.Constant((wanted == self.value) is isinstance(node.ops[0], ast.Eq))

    def _is_flag(self, node: ast.expr) -> bool:
        return self.flag == (getattr(node, "attr", None) or getattr(node, "id", None))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        """Fold `not`."""
        self.generic_visit(node)
        constant = _constant(node.operand)
        return ast.Constant(not constant) if isinstance(node.op, ast.Not) and constant is not None else node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        """Fold `and` and `or`."""
        self.generic_visit(node)
        decides = isinstance(node.op, ast.Or)
        left = [value for value in node.values if _constant(value) is not (not decides)]
        if any(_constant(value) is decides for value in left[:1]) or not left:
            return ast.Constant(decides if left else not decides)
        return left[0] if len(left) == 1 else ast.BoolOp(node.op, left)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        """Keep the branch that is taken."""
        self.generic_visit(node)
        constant = _constant(node.test)
        return node if constant is None else node.body if constant else node.orelse

    def visit_If(self, node: ast.If) -> Any:
        """Keep the branch that is taken."""
        self.generic_visit(node)
        constant = _constant(node.test)
        if constant is None:
            return node
        return (node.body if constant else node.orelse) or None

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Leave no body empty."""
        super().generic_visit(node)
        if isinstance(getattr(node, "body", None), list) and not node.body:  # type: ignore[attr-defined]
            node.body = [ast.Pass()]  # type: ignore[attr-defined]
        return node


def _constant(node: ast.expr) -> bool | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, bool) else None


def switched(text: str, flag: str, value: str) -> str:
    """A script with one value of its flag."""
    return ast.unparse(ast.fix_missing_locations(Switched(flag, value).visit(ast.parse(text))))


class Decoys(ast.NodeTransformer):
    """In functions without a fault, one assignment written in another way."""

    def __init__(self, spared: set[str], seed: str, most: int, tree: ast.Module) -> None:
        self.spared, self.random = spared, random.Random(seed)
        self.prefix: list[str] = []
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and self._plain(node)]
        self.chosen = set(self.random.sample(functions, min(most or len(functions), len(functions))))

    @staticmethod
    def _plain(node: ast.FunctionDef) -> list[ast.Assign | ast.Return]:
        return [own for own in node.body if isinstance(own, (ast.Assign, ast.Return)) and own.value is not None]

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Go on by its name."""
        self.prefix.append(node.name)
        self.generic_visit(node)
        self.prefix.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Write one statement in another way."""
        name = ".".join([*self.prefix, node.name])
        if name not in self.spared and node in self.chosen:
            own = self.random.choice(self._plain(node))
            own.value = ast.Subscript(ast.List([own.value], ast.Load()), ast.Constant(0), ast.Load())
        return node


def variant_of(case: Case, decoys: int) -> Variant | None:
    """The fault of a case as a change of the source; None where it is none that a flag switches on."""
    found = _flag_of(case)
    if found is None:
        return None
    flag, value = found
    text = (FIXTURES / case.a.script).read_text(encoding="utf-8")
    off, on = switched(text, flag, "none"), switched(text, flag, value)
    changes = changed_statements("script", off, on)
    if not changes:
        return None
    planted = {(change.scope, *(side.text if side else "" for side in (change.a, change.b))) for change in changes}
    tree = ast.parse(on)
    tree = Decoys({change.scope for change in changes}, case.name, decoys, tree).visit(tree)
    extra = ast.parse(f"def {UNUSED}(x):\n    print('nobody calls this', x)\n    return x * 2\n").body
    tree.body[-1:-1] = [*extra, *ast.parse("print('begins', end='')").body]
    return Variant(case, off, ast.unparse(ast.fix_missing_locations(tree)), frozenset(planted))


def _flag_of(case: Case) -> tuple[str, str] | None:
    """The flag of a case that b has beside a's arguments, and its value."""
    rest = list(case.b.args[len(case.a.args) :])
    if len(rest) == 2 and rest[0] in FLAGS and case.b.args[: len(case.a.args)] == case.a.args and not case.b.env:
        return FLAGS[rest[0]], rest[1]
    return None


def capture(variant: Variant, captures: Captures, run: Any) -> tuple[Path, Path]:
    """Both versions captured; that without the fault once for all faults of one script."""
    paths = []
    for letter, text in (("a", variant.a), ("b", variant.b)):
        side: Side = variant.case.a
        shared = f"{letter}-{abs(hash((text, side.args, side.options))):x}"

        def make(target: Path, text: str = text, side: Side = side) -> None:
            home = target.with_name(f"{target.name}-source")
            place = home / Path(side.script)
            place.parent.mkdir(parents=True)
            beside = (FIXTURES / side.script).parent
            for other in beside.iterdir():
                if other.name not in {place.name, "__pycache__"}:
                    (place.parent / other.name).symlink_to(other)
            place.write_text(text, encoding="utf-8")
            done = run("capture", "-q", "--force", *side.options, "-o", str(target), str(place), *side.args)
            if done.returncode != 0:
                raise RuntimeError(done.stderr[-300:])

        paths.append(captures.made(shared, make))
    return paths[0], paths[1]


def judged(variant: Variant, captures: Captures, run: Any) -> tuple[str, str]:
    """`named`, `second`, `missed`, `wrong` or why it could not be told, and what was said."""
    try:
        answer = compare(*capture(variant, captures, run), run)
    except RuntimeError as error:
        return "failed", str(error)[-200:]
    if answer["verdict"] != "diverged":
        return "not diverged", answer["sentence"]
    code = answer["code"] or {"changes": []}
    listed = code["changes"]
    told = f"[{answer['first']['reason']}] " + "; ".join(
        f"{one['nearness']} {one['place'].rpartition('/')[2]} {one['scope']}: {((one['b'] or one['a'])['text'])[:50]!r}"
        for one in listed[:3]
    )
    wrong = [one for one in listed if one["likely"] and (one["scope"].startswith(UNUSED) or "begins" in str(one["b"]))]
    if wrong:
        return "wrong", f"{wrong[0]['place']}: {told}"
    keys = [(one["scope"], *(one[side]["text"] if one[side] else "" for side in "ab")) for one in listed]
    places = [place for place, key in enumerate(keys) if key in variant.planted]
    if not places or not listed[places[0]]["likely"]:
        return "missed", told
    return "named" if places[0] == 0 else "later", told


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="names of the cases to run, as a glob")
    parser.add_argument("--decoys", type=int, default=3, help="functions with a decoy; 0 for all")
    parser.add_argument("--keep", type=Path, help="a directory for the runs, kept and used again")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("-v", "--verbose", action="store_true", help="say what was named in each case")
    options = parser.parse_args()
    cases = [case for case in [*load_cases(), *load_field_cases()] if case.expect]
    chosen = [case for case in cases if fnmatch.fnmatch(case.name, options.only)]
    variants = [variant for case in chosen if (variant := variant_of(case, options.decoys)) is not None]
    counted: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        directory = options.keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        run = Forks()
        captures = Captures(directory, run)
        found = pool.map(lambda variant: judged(variant, captures, run), variants)
        for variant, (verdict, told) in zip(variants, found, strict=True):
            counted[verdict] = counted.get(verdict, 0) + 1
            if options.verbose or verdict != "named":
                print(f"{variant.case.name:40} {verdict:12} {told}", flush=True)
    print(", ".join(f"{verdict} {number}" for verdict, number in sorted(counted.items())), f"of {len(variants)}")
    compared = sum(number for verdict, number in counted.items() if verdict not in {"failed", "not diverged"})
    return 0 if counted.get("named", 0) >= 0.9 * compared and not counted.get("wrong") else 1


if __name__ == "__main__":
    sys.exit(main())

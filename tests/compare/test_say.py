"""The English of `diff`: it stands in one file, each finding has its words, and a finding says what its fields hold."""

import ast
from pathlib import Path

import pytest

import introspect_cli

FOLDER = Path(introspect_cli.__file__).parent / "compare"
FINDERS = sorted(
    {
        *(FOLDER / "reasons").glob("*.py"),
        *(FOLDER / "answer").glob("*.py"),
        FOLDER / "settings/beginning.py",
    }
)
WITH_WORDS = {"explain.py", "rows.py"}
"""What puts a sentence together, and what the reference says of each reason."""


def sentences(path):
    """Texts of two words or more in a file that are no documentation of it, and no error."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    raised = (part for node in ast.walk(tree) if isinstance(node, ast.Raise) for part in ast.walk(node))
    documented |= {id(part) for part in raised}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    said = [node.value for node in texts if id(node) not in documented and "|" not in node.value]
    return [text for text in said if len([word for word in text.split() if word.isalpha() and len(word) > 1]) > 1]


@pytest.mark.parametrize("path", [path for path in FINDERS if path.name not in WITH_WORDS], ids=lambda path: path.stem)
def test_what_finds_causes_says_nothing(path):
    assert sentences(path) == []


def codes_of(path):
    """Codes of findings that a file gives by name."""
    calls = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
    named = (call.args[0] for call in calls if getattr(call.func, "id", "") == "found" and call.args)
    return {code.value for code in named if isinstance(code, ast.Constant)}


def test_every_finding_has_words():
    words = (FOLDER / "say.py").read_text(encoding="utf-8")
    assert [code for code in set().union(*map(codes_of, FINDERS)) if f'"{code}":' not in words] == []

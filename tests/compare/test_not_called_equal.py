"""Differences in what is easily left unseen are named, or said to be unseen: no answer calls them equal."""

from __future__ import annotations

import re
import shutil
from types import SimpleNamespace

import pytest

from introspect_cli.compare.reasons.rows import reason_named
from introspect_cli.compare.settings.differences import Difference
from introspect_cli.compare.settings.settings import Blame, setting_changes


def test_a_run_that_was_copied_in_part_says_so(tmp_path, project, introspect):
    shutil.copytree(project("a"), tmp_path / "part")
    for path in (tmp_path / "part").rglob("*"):
        if path.is_file() and path.suffix != ".yaml":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    answer = introspect("diff", "a", "part")
    assert answer.returncode == 2
    assert re.search(r"Run b holds \d of the 3 steps that its manifest names", " ".join(answer.stdout.split()))


@pytest.mark.parametrize("stepped", [False, True])
def test_a_rate_weighs_the_same_on_the_command_line_and_in_a_file(stepped):
    given = Difference("command", "--optim.lr", 1, 2), Difference("files", "conf.yaml: optim.lr", 1, 2, "optim.lr")
    for reason in ("optimizer", "module", "initial", "outside"):
        weights = {
            Blame(reason_named(reason).weights, reason_named(reason).names, stepped=stepped).weight(change)
            for change in given
        }
        assert len(weights) == 1


@pytest.mark.parametrize(
    ("paths", "more", "said"),
    [
        (("/projects/one/train.py", "/projects/two/train.py"), {"sources": {}}, []),
        (("/projects/one/train.py", "/projects/two/train.py"), {}, ["argument 0"]),  # what they hold is not on record
        (("/projects/one/train.py", "/projects/two/other.py"), {"sources": {}}, ["argument 0"]),
    ],
)
def test_the_same_script_in_another_folder_explains_nothing(paths, more, said):
    """A pair of worktrees: the path of the script differs, and what it holds is told by its hash."""
    a, b = (
        SimpleNamespace(settings={"command": {"argv": [path, "--lr", "1e-3"]}, **more}, manifest={}) for path in paths
    )
    assert [change.name for change in setting_changes(a, b)] == said

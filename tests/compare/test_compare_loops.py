"""Faults in loops as people write them: reinforcement learning, adapters, decoders. Each was once told wrongly."""

from __future__ import annotations

from types import SimpleNamespace

from introspect_cli.compare.settings.settings import setting_changes


def test_the_same_script_in_another_folder_explains_nothing():
    """A pair of worktrees: the path of the script differs, and what it holds is told by its hash."""

    def said(path_a, path_b, **more):
        a, b = (
            SimpleNamespace(settings={"command": {"argv": [path, "--lr", "1e-3"]}, **more}, manifest={})
            for path in (path_a, path_b)
        )
        return [change.name for change in setting_changes(a, b)]

    assert said("/projects/one/train.py", "/projects/two/train.py", sources={}) == []
    assert said("/projects/one/train.py", "/projects/two/train.py") == ["argument 0"]  # what they hold is not on record
    assert said("/projects/one/train.py", "/projects/two/other.py", sources={}) == ["argument 0"]

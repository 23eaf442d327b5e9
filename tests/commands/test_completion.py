"""Shells complete verbs, options and values, and say so in a script they can read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(introspect, shell):
    done = introspect("completion", shell)
    assert done.returncode == 0, done.stderr
    assert f"_INTROSPECT_COMPLETE={shell}_complete" in done.stdout


def test_bash_and_fish_can_read_their_scripts(introspect, tmp_path):
    for shell in ("bash", "zsh", "fish"):
        if shutil.which(shell):
            script = tmp_path / shell
            script.write_text(introspect("completion", shell).stdout)
            assert subprocess.run([shell, "-n", script], check=False).returncode == 0


def completed(words):
    settings = {"_INTROSPECT_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [sys.executable, "-m", "introspect_cli"],
        env=os.environ | settings, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


def test_verbs_options_and_values_are_completed():
    assert completed("introspect c") == ["capture", "check", "completion"]
    assert completed("introspect imp") == ["import"]
    assert "--fail-on" in completed("introspect check --fail")
    assert completed("introspect export run --format p") == ["parquet"]


def test_an_unknown_shell_is_a_sentence(introspect):
    done = introspect("completion", "powershell")
    assert done.returncode == 2
    assert "bash" in done.stderr

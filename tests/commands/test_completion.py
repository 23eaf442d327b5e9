"""Shells complete verbs, options and values, by click's own scripts."""

from __future__ import annotations

import os
import subprocess
import sys


def completed(words, instruction="bash_complete"):
    settings = {"_INTROSPECT_COMPLETE": instruction, "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [sys.executable, "-m", "introspect_cli"],
        env=os.environ | settings, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout if instruction == "bash_source" else [line.partition(",")[2] for line in done.stdout.split()]


def test_verbs_options_and_values_are_completed():
    assert "_INTROSPECT_COMPLETE=bash_complete" in completed("", "bash_source")
    assert completed("introspect c") == ["capture", "check"]
    assert completed("introspect imp") == ["import"]
    assert "--fail-on" in completed("introspect check --fail")
    assert completed("introspect export run --format p") == ["parquet"]

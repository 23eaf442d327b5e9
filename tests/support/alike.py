"""A script bare and captured, and that nothing tells them apart."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def script(path, text):
    path.write_text(textwrap.dedent(text))
    return path


def both(file, out, *options, python=None):
    """What python alone and the capture give for a script."""
    python = python or sys.executable
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    settings = {"capture_output": True, "text": True, "cwd": file.parent, "env": environment}
    bare = subprocess.run([python, file], check=False, **settings)
    command = [python, "-m", "introspect_cli", "capture", "-q", "-o", out, *options, file]
    return bare, subprocess.run(command, check=False, **settings)


def assert_alike(bare, seen):
    assert (seen.stdout, seen.stderr, seen.returncode) == (bare.stdout, bare.stderr, bare.returncode)

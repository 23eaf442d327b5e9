"""What a script does under python and under the runner."""

from __future__ import annotations

import re
import subprocess


def dedent(text):
    lines = text.split("\n")
    if lines[0].strip():
        return text
    indent = len(lines[1]) - len(lines[1].lstrip())
    return "\n".join(line[indent:] for line in lines[1:])


def outcome(command, cwd, *, feed=b"", merged=False):
    done = subprocess.run(
        command,
        cwd=cwd,
        input=feed,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        check=False,
    )
    shown = [re.sub(rb" at 0x[0-9a-f]+", b"", stream or b"") for stream in (done.stdout, done.stderr)]
    return done.returncode, *shown

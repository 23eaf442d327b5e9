"""The tutorial and the guides: their commands are run in the order in which they stand, and print what the page says.

`INTROSPECT_WRITE_PAGES=1` writes what they print into the page instead.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("quick_python")

DOCS = Path(__file__).resolve().parent.parent / "docs"
WRITES = bool(os.environ.get("INTROSPECT_WRITE_PAGES"))
WIDTH = "80"
ELSEWHERE = {
    "accelerate.md", "lightning.md", "notebooks.md", "transformers.md",  # test_pages.py, test_api.py
    "trainer-and-engine.md",  # test_rl.py
    "checkpoints.md",  # test_checkpoints.py
}  # fmt: skip
"""Pages whose scripts other tests run."""
PAGES = [DOCS / "start.md", *(page for page in sorted(DOCS.glob("guides/*.md")) if page.name not in ELSEWHERE)]
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$|^<!-- run\n(.*?)^-->$', re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.]*\.(?:py|md))")
ENVIRONMENT = {
    "COLUMNS": WIDTH,
    "GIT_AUTHOR_NAME": "reader", "GIT_AUTHOR_EMAIL": "reader@example.org", "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "reader", "GIT_COMMITTER_EMAIL": "reader@example.org",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z", "GIT_CONFIG_GLOBAL": os.devnull,
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor",  # else torch sets it in some processes
    "PATH": os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ["PATH"]]),
}  # fmt: skip


@pytest.fixture(scope="module")
def programs(tmp_path_factory, quick_python):
    """A folder with an `introspect` that need not import torch each time, for what shells and git run."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "introspect").write_text(f'#!/bin/sh\nexec {sys.executable} -m introspect_cli "$@"\n')
    (folder / "introspect").chmod(0o755)
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_print_what_it_says(page, tmp_path, introspect, programs, monkeypatch):
    monkeypatch.setitem(ENVIRONMENT, "PATH", os.pathsep.join([str(programs), ENVIRONMENT["PATH"]]))
    place = tmp_path / "project"
    place.mkdir()
    text = page.read_text(encoding="utf-8")
    written, end, printed, commands = [], 0, None, 0
    for block in BLOCK.finditer(text):
        language, title, body, hidden = block.groups()
        written.append(text[end : block.start()])
        end = block.end()
        whole = block[0]
        if title:
            (place / title).parent.mkdir(parents=True, exist_ok=True)
            (place / title).write_text(body)
        elif language == "sh" or hidden:
            lines = (hidden or body).replace("\\\n", " ").splitlines()
            printed = "".join(ran(line, place, introspect) for line in lines)
            commands += len(lines)
        elif language == "text" and printed is not None:
            if WRITES:
                whole = f"```text\n{shortened(printed, body)}```"
            else:
                assert alike(printed, body), f"\n{printed}\n--- but the page has\n{body}"
            printed = None
        written.append(whole)
    assert commands
    if WRITES:
        page.write_text("".join([*written, text[end:]]), encoding="utf-8")


def ran(line, place, introspect):
    """What a command prints; a number after `# exit status` is the one it has."""
    command, _, comment = line.partition("  #")
    words = shlex.split(command)
    if words[:1] == ["introspect"] and not set("|&<>") & set(command):
        done = introspect(*words[1:], cwd=place, env=os.environ | ENVIRONMENT)
    else:
        environment = os.environ | ENVIRONMENT
        done = subprocess.run(
            command, shell=True, cwd=place, env=environment, text=True, capture_output=True, check=False
        )
    assert "Traceback" not in done.stderr, done.stderr
    wanted = re.search(r"exit status (-?\d+)", comment)
    code = 128 - done.returncode if done.returncode < 0 else done.returncode  # as a shell has it
    assert code in ({int(wanted[1])} if wanted else {0, 1}), (line, done.stdout, done.stderr)
    shown = done.stdout.replace(str(place), "/home/reader/project")
    return "".join(line.rstrip() + "\n" for line in shown.strip("\n").splitlines())


def shortened(printed, body):
    """As much of what is printed as the page had before; all of it where it had nothing."""
    if not body.endswith("...\n"):
        return printed
    return "".join(printed.splitlines(keepends=True)[: body.count("\n") - 1]) + "...\n"


def alike(printed, body):
    """Whether the same words are printed, with numbers that other kernels may give."""
    printed, body = ((re.sub(r"\s+|<(?=1e-07)", " ", text)) for text in (shortened(printed, body), body))
    if NUMBER.sub("#", printed) != NUMBER.sub("#", body):
        return False
    return all(map(close, NUMBER.findall(printed), NUMBER.findall(body)))


def close(one, other):
    """Whether two numbers may be one: counts are equal, measurements near, and roundings of one size."""
    if one.isdigit() and other.isdigit():
        return one == other
    return math.isclose(float(one), float(other), rel_tol=0.3 if float(other) > 1e-6 else 0.9)

"""The commands of all pages are run, in the order in which they stand, and print what the page says.

Each guide has a directory to itself; the README and the reference share one, see `documented.py`.

`INTROSPECT_WRITE_PAGES=1` writes what they print into the page instead.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import documented
import pytest

pytestmark = pytest.mark.usefixtures("quick_python")

DOCS = Path(__file__).resolve().parents[2] / "docs"
WRITES = bool(os.environ.get("INTROSPECT_WRITE_PAGES"))
WIDTH = "80"
ROOT = DOCS.parent
FORM = re.compile(r"\.\.\.|\[OPTIONS\]|\[--")
"""A form of commands, no command."""
TOGETHER = {"accelerate.md", "checkpoints.md", "lightning.md", "notebooks.md", "transformers.md"}
"""Guides whose commands are run with those of the reference; `test_pages.py` runs the scripts on them."""
GUIDES = [DOCS / "start.md", *(page for page in sorted(DOCS.glob("guides/*.md")) if page.name not in TOGETHER)]
OTHERS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted({*DOCS.rglob("*.md")} - {*GUIDES})]
NOT_HERE = {
    r"pip install": "sets up an environment from an index: .ci/run does, in an empty one",
    r"^(pytest|ruff|mypy|mkdocs|python (-m build|docs|setup.py|benchmarks))": "tests, linters and benchmarks",
    r"s3://|https://": "another machine",
    r"mlflow|wandb": "servers of theirs; test_publish.py has stand-ins for both",
    r"show (step N|values NAME|graph RUN)|bisect --good REV": "forms: test_reference.py runs one of each",
    r"accelerate launch": "test_launchers.py starts one",
    r"-o run torchrun": "the guide many-gpus.md starts one, test_launchers.py too",
    r"capture -o train.py$": "a mistake that the page on messages explains",
}
"""Commands that are not run, and why; of these, `test_pages.py` holds the options against those that there are."""
BLOCK = re.compile(
    r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$|^<!-- run\n(.*?)^-->$|`(introspect [^`]+)`', re.MULTILINE | re.DOTALL
)
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.]*\.(?:py|md))")
ENVIRONMENT = {
    "COLUMNS": WIDTH, "FIXTURES": str(ROOT / "fixtures"),
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


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_the_commands_of_a_guide_print_what_it_says(page, tmp_path, introspect, programs, monkeypatch):
    monkeypatch.setitem(ENVIRONMENT, "PATH", os.pathsep.join([str(programs), ENVIRONMENT["PATH"]]))
    place = tmp_path / "project"
    place.mkdir()
    assert follow(page, partial(ran, place=place, introspect=introspect), place)


@pytest.mark.longest
def test_the_commands_of_the_readme_and_the_reference_print_what_they_say(tmp_path, introspect, programs, monkeypatch):
    monkeypatch.setitem(ENVIRONMENT, "PATH", os.pathsep.join([str(programs), ENVIRONMENT["PATH"]]))
    monkeypatch.setitem(ENVIRONMENT, "BROWSER", "true")
    monkeypatch.setitem(ENVIRONMENT, "HOME", str(tmp_path))
    documented.write_files(tmp_path)
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    for line in documented.PREPARED.strip().splitlines():
        ran(line, tmp_path, introspect)
    documented.write_checkpoints(tmp_path)
    ran("introspect import mine -o ours", tmp_path, introspect)
    seen, problems = {}, []

    def kept(run, *arguments):
        """What it returns; what is wrong with it is listed with the rest at the end."""
        try:
            return run(*arguments)
        except AssertionError as problem:
            problems.append(str(problem))
            return ""

    def once(line):
        for word, meant in documented.PLACEHOLDERS.items():
            line = re.sub(rf"(?<= ){re.escape(word)}(?= |$)", meant, line)
        line = re.sub(r"  +#(?! exit).*", "", line)
        if line not in seen:
            seen[line] = kept(in_its_place, line, tmp_path, introspect)
        return seen[line]

    for page in OTHERS:
        kept(follow, page, once, tmp_path)
    assert not problems, "\n=====\n".join(problems)
    assert len(seen) > 80


def in_its_place(line, place, introspect):
    """What a command prints; what it writes is not there before, and is what it was afterwards."""
    written = re.search(r" (?:-o|--output) (\S+)", line)
    target = place / written[1] if written else None
    aside = target and target.with_name(f"{target.name}.aside")
    if target and target.exists():
        target.rename(aside)
    try:
        return ran(line, place, introspect)
    finally:
        if target and aside.exists():
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
            aside.rename(target)


def follow(page, run, place):
    """Run the commands of a page, and compare what they print; how many there are."""
    text = page.read_text(encoding="utf-8")
    written, end, printed, commands = [], 0, None, 0
    for block in BLOCK.finditer(text):
        language, title, body, hidden, inline = block.groups()
        written.append(text[end : block.start()])
        end = block.end()
        whole = block[0]
        if title:
            (place / title).parent.mkdir(parents=True, exist_ok=True)
            (place / title).write_text(body)
        elif language == "sh" or hidden:
            lines = list(commands_of(hidden or body))
            printed = "".join(map(run, lines))
            commands += len(lines)
        elif language == "text" and printed is None:
            lines = re.findall(r"^ {2}(introspect .*?)(?: {3}.*)?$", body, re.MULTILINE)
            for line in commands_of("\n".join(lines)):
                run(line)
                commands += 1
        elif inline:
            line = " ".join(inline.split())
            if len(line.split()) > 2 and not FORM.search(line) and not any(re.search(w, line) for w in NOT_HERE):
                run(line)
                commands += 1
        elif language == "text":
            if WRITES:
                whole = f"```text\n{shortened(printed, body)}```"
            else:
                assert alike(printed, body), f"\n{printed}\n--- but {page.name} has\n{body}"
            printed = None
        written.append(whole)
    if WRITES:
        page.write_text("".join([*written, text[end:]]), encoding="utf-8")
    return commands


def commands_of(block):
    """The lines of a block that are run here."""
    for line in block.replace("\\\n", " ").splitlines():
        if not any(re.search(which, line) for which in NOT_HERE):
            yield line.removesuffix(" &&")


def ran(line, place, introspect):
    """What a command prints; a number after `# exit status` is the one it has."""
    command, _, comment = line.partition(" #")
    words = shlex.split(command)
    if words[:1] == ["introspect"] and not set("|&<>~*") & set(re.sub("'[^']*'", "", command)):
        done = introspect(*words[1:], cwd=place, env=os.environ | ENVIRONMENT)
    else:
        environment = os.environ | ENVIRONMENT
        done = subprocess.run(
            command, shell=True, cwd=place, env=environment, text=True, capture_output=True, check=False
        )
    assert "Traceback" not in done.stderr, done.stderr
    wanted = re.search(r"exit status (-?\d+)(?!:)", comment)
    code = 128 - done.returncode if done.returncode < 0 else done.returncode  # as a shell has it
    assert code in ({int(wanted[1])} if wanted else {0, 1}), (line, done.stdout, done.stderr)
    shown = done.stdout.replace(str(place), "/home/reader/project")
    return "".join(line.rstrip() + "\n" for line in shown.strip("\n").splitlines())


def shortened(printed, body):
    """As much of what is printed as the page had before; all of it where it had nothing."""
    if body.startswith("...\n"):
        first = body.splitlines(keepends=True)[1]
        printed = f"...\n{first}{printed.partition(first)[2]}"
    if not body.endswith("...\n"):
        return printed
    return "".join(printed.splitlines(keepends=True)[: body.count("\n") - 1]) + "...\n"


def alike(printed, body):
    """Whether the same words are printed, with numbers that other kernels may give."""
    printed, body = ((re.sub(r"\s+|<(?=1e-07)", " ", text)) for text in (shortened(printed, body), body))
    printed, body = ((re.sub(r"\d+ of them (?=within|only)", "", text)) for text in (printed, body))
    if NUMBER.sub("#", printed) != NUMBER.sub("#", body):
        return False
    return all(map(close, NUMBER.findall(printed), NUMBER.findall(body)))


def close(one, other):
    """Whether two numbers may be one: counts are equal, measurements near, and roundings of one size."""
    if one.isdigit() and other.isdigit():
        return one == other
    return math.isclose(float(one), float(other), rel_tol=0.3 if float(other) > 1e-6 else 0.9)

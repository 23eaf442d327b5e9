"""The scripts of the pages on frameworks run as they stand there, and what the pages say of them holds."""

from __future__ import annotations

import copy
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch

import introspect_cli
from introspect_cli import cli

pytestmark = pytest.mark.usefixtures("quick_python")

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def scripts(page):
    return blocks(DOCS / page)


def blocks(path):
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def run_page(tmp_path, introspect):
    def run(page):
        train, *callback = scripts(page)
        (tmp_path / "train.py").write_text(train)
        done = introspect("capture", "--no-packages", "-o", "runA", "train.py")
        assert done.returncode == 0, done.stderr
        for text in callback:
            (tmp_path / "callback.py").write_text(text)
            command = [sys.executable, "callback.py"]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        return tmp_path

    return run


def commands_of(text):
    """Every command of the tool in a page: in blocks, and in the middle of a sentence."""
    for found in re.findall(
        r"^(?: {4})?(introspect [^`\n]*(?:\\\n[^`\n]*)*)$|`(introspect [^`]*)`", text, re.MULTILINE
    ):
        yield " ".join("".join(found).replace("\\\n", " ").split())


@pytest.mark.parametrize("path", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_every_command_on_a_page_has_options_that_the_tool_takes(path):
    """`test_guides.py` runs the commands of guides; this reads those of every page, examples of help included."""
    for line in commands_of(path.read_text(encoding="utf-8")):
        words = shlex.split(re.split(r" [#|>&]|\.\.\.|;|  +\(", line)[0])[1:]
        if words[0] not in cli.VERBS:  # a sentence that begins with the tool's name, or `introspect VERB`
            continue
        command, context = cli.introspect, click.Context(cli.introspect)
        while isinstance(command, click.Group) and words and words[0].islower() and not words[0].startswith("-"):
            inner = command.get_command(context, words[0])
            if inner is None and command is not cli.introspect:  # a run or a directory: the command where none is named
                inner = command.get_command(context, {"show": "run", "runs": "list"}[command.name or ""])
                words = [command.name or "", *words]
            assert inner is not None, line
            command = inner
            context = click.Context(command, parent=context, **command.context_settings)
            words = words[1:]
        try:
            command.make_parser(context).parse_args(words)
        except click.UsageError as error:
            pytest.fail(f"{line}: {error.format_message()}")


def test_every_option_of_a_capture_is_on_a_page_that_says_when_it_is_wanted():
    """Pages of reference list all options; a guide, or a page on costs or neutrality, says what each is for."""
    pages = [path for path in PAGES if path.parent.name != "reference"]
    text = "".join(path.read_text(encoding="utf-8") for path in (*pages, ROOT / "README.md"))
    named = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", text))
    capture = cli.introspect.get_command(click.Context(cli.introspect), "capture")
    options = [option for option in capture.params if isinstance(option, click.Option) and not option.hidden]
    assert [option.name for option in options if not named & {*option.opts, *option.secondary_opts}] == []


def test_links_between_pages_lead_somewhere():
    for path in (*DOCS.rglob("*.md"), DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md"):
        for target, _, anchor in (
            link.partition("#") for link in re.findall(r"\]\((?!https?:)([^)]+)\)", path.read_text())
        ):
            page = path.parent / target if target else path
            assert page.exists(), (path.name, target)
            heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE) if anchor else []
            assert not anchor or anchor in {
                re.sub(r"[^a-z0-9 -]", "", each.lower()).replace(" ", "-") for each in heads
            }


def test_the_readme_describes_every_extra():
    project = (DOCS.parent / "pyproject.toml").read_text(encoding="utf-8")
    section = project.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    extras = re.findall(r"^(\w+) = \[$", section, re.MULTILINE)
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    table = readme.partition("## Extras")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == extras


def test_the_readmes_notebook_cell_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cell = next(text for text in blocks(DOCS.parent / "README.md") if "recording(" in text)

    def train(model, lr=0.1):
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()

    net = torch.nn.Linear(2, 1)
    with introspect_cli.recording(net, "runA"):
        train(copy.deepcopy(net), lr=0.2)
    exec(cell, {"model": net, "train": train})
    assert "lr 0.2 -> 0.1" in introspect_cli.diff("runA", "runB").sentence


def test_the_scripts_of_the_page_on_lightning_run(run_page):
    pytest.importorskip("lightning.pytorch")
    place = run_page("guides/lightning.md")
    same = introspect_cli.diff(place / "runA", place / "runB")
    assert same.same, same.sentence
    assert same.sentence.endswith("up to and including step 7 (epoch 1, batch 3).")
    diverged = introspect_cli.diff(place / "runA", place / "runC")
    assert diverged.sentence.startswith("First divergence at step 0 (epoch 0, batch 0): ")
    assert "lr" in diverged.sentence


def test_the_scripts_of_the_page_on_transformers_run(run_page, introspect):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    place = run_page("guides/transformers.md")
    diverged = introspect_cli.diff(place / "runA", place / "runB")
    assert not diverged.same
    assert diverged.first.step_words == "step 0 (epoch 0, batches 0-1)"
    assert "lr" in diverged.sentence
    done = introspect("show", "step", "3", "runA", "--kinds", "loss", cwd=place)
    assert done.stdout.startswith("Step 3 (epoch 0, batches 6-7)"), done.stdout + done.stderr


def test_the_script_of_the_page_on_accelerate_runs(run_page):
    pytest.importorskip("accelerate")
    place = run_page("guides/accelerate.md")
    with introspect_cli.open_run(place / "runA") as run:
        labels = run.run.rank(0).labels
        assert [each["epoch"] for each in labels.values()] == [0] * 4 + [1] * 4
        calls = {record.site.call for record in run.records(5) if record.site.kind.value == "loss"}
    assert calls == {0, 1}

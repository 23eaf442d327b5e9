"""Write the pages of `docs/reference/` that say what the code knows, and the schemas of `--format json`.

    python docs/reference.py

The pages are committed, so that they can be read as files; `tests/repository/test_reference.py` fails where they are
stale.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(Path(__file__).resolve().parent))

from schema import DOCUMENTS, schema  # noqa: E402 - the file beside this one, wherever this is run from

import introspect_cli  # noqa: E402 - as above
from introspect_cli import cli  # noqa: E402 - as above
from introspect_cli.capture.options import HEADINGS  # noqa: E402 - as above
from introspect_cli.capture.ranks.launchers import LAUNCHERS  # noqa: E402 - as above
from introspect_cli.compare.reasons.rows import ROWS  # noqa: E402 - as above
from introspect_cli.health.check import choose  # noqa: E402 - as above
from introspect_cli.render.json import document  # noqa: E402 - as above
from introspect_cli.statistics import DERIVED_STATS, STATISTICS  # noqa: E402 - as above

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(introspect_cli.__file__).parent
NOTE = "<!-- Made by `python docs/reference.py`; a change of this file is lost. -->"

VARIABLES = {
    "COLUMNS": "Width of what is printed, where it is not a terminal.",
    "LOCAL_WORLD_SIZE": "How many ranks of this machine share the memory for `--keep-around`; torchrun sets it.",
    "MLFLOW_EXPERIMENT_NAME": "The experiment that `--publish mlflow` writes to.",
    "NO_COLOR": "Anything: print without colours.",
    "TORCHINDUCTOR_CACHE_DIR": "Files below it are the compiler's, and no sources of the script.",
    "TRITON_CACHE_DIR": "As `TORCHINDUCTOR_CACHE_DIR`.",
    "WANDB_PROJECT": "The project that `--publish wandb` writes to.",
}
"""What the environment variables do that a person may set; `variables_read` finds which there are."""

BETWEEN_PROCESSES = {"INTROSPECT_FOLLOW", "_INTROSPECT_COMPLETE", "PYTHONPATH", "TORCHELASTIC_RESTART_COUNT"}
"""Variables that introspect and launchers set for the processes that they start; nobody else sets them."""


def pages() -> dict[Path, str]:
    """Every generated file and its text."""
    folder = ROOT / "docs/reference"
    made = {name: schema(name) for name in DOCUMENTS}
    return {
        folder / "verbs.md": verbs(),
        folder / "reasons.md": reasons_page(),
        folder / "rules.md": rules(),
        folder / "statistics.md": statistics(),
        folder / "environment.md": environment(),
        folder / "json.md": json_page(made),
        folder / "python.md": python(),
        **{
            PACKAGE / f"render/assets/{name}.schema.json": json.dumps(one, indent=1) + "\n"
            for name, one in made.items()
        },
    }


def page(title: str, introduction: str, lines: Iterator[str]) -> str:
    """A page of its parts."""
    return "\n".join([f"# {title}", "", NOTE, "", introduction, "", *lines]).rstrip() + "\n"


def verbs() -> str:
    """Every verb with its options, as `--help` has them; an option of three verbs or more stands once, at the end."""
    top = click.Context(cli.introspect, info_name="introspect")
    commands = [cli.command_of(name) for name in cli.VERBS]
    times = Counter(line for command in commands for line in every_option(command, top))
    shared = [line for line, count in times.items() if count > 2]

    def lines() -> Iterator[str]:
        for command in commands:
            yield from verb(command, top, "##", shared)
        yield from ("## Shared options", "", *shared)

    about = "What `introspect VERB --help` prints; options of several verbs stand once, [at the end](#shared-options)."
    return page("Verbs and options", about, lines())


def every_option(command: click.Command, parent: click.Context) -> Iterator[str]:
    """The options of a verb and of those below it, a line each."""
    context = click.Context(command, info_name=command.name, parent=parent)
    yield from (line for line, _ in options_of(command, context))
    if isinstance(command, click.Group):
        for below in command.commands.values():
            yield from every_option(below, context)


def options_of(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """A command's options as lines of a list, each with the heading that it stands under."""
    for option in command.get_params(context):
        record = option.get_help_record(context) if isinstance(option, click.Option) else None
        if record is not None and "--help" not in option.opts:
            text = re.sub(r"; x>=\d+\]| \[[\d<=]*x[<>=\d]*\]", lambda limit: "]" * limit[0].startswith(";"), record[1])
            text = escaped(text.replace("  [", " [").rstrip())
            yield f"- `{record[0]}`: {text}".rstrip(": "), getattr(option, "heading", "")


def verb(command: click.Command, parent: click.Context, heading: str, shared: list[str]) -> Iterator[str]:
    """A verb and those below it."""
    context = click.Context(command, info_name=command.name, parent=parent)
    usage = " ".join(command.collect_usage_pieces(context))
    yield from (f"{heading} {context.command_path}", "", f"`{context.command_path} {usage}`", "")
    yield from (escaped(inspect.cleandoc(command.help or "")), "")
    groups: dict[str, list[str]] = {}
    also = []
    for line, title in options_of(command, context):
        if line in shared:
            also.append(re.findall(r"--[\w-]+", line)[0])
        else:
            groups.setdefault(title, []).append(line)
    for title, options in sorted(groups.items(), key=lambda group: (*HEADINGS, "").index(group[0])):
        yield from ((f"**{title}**", "") if title else ())
        yield from (*options, "")
    if also:
        yield from (f"[Shared](#shared-options): {', '.join(f'`{name}`' for name in also)}.", "")
    if command.epilog:
        yield from ("```text", *inspect.cleandoc(command.epilog).replace("\b\n", "").strip().split("\n"), "```", "")
    if isinstance(command, click.Group):
        for below in command.commands.values():
            yield from verb(below, context, heading + "#", shared)


def escaped(text: str) -> str:
    """Help as markdown: what looks like a mark of it stands as it is."""
    parts = text.split("`")  # every second one is code
    parts[::2] = [re.sub(r"[*<]|(?<!\w)_|_(?!\w)", r"\\\g<0>", part) for part in parts[::2]]
    return "`".join(parts)


def reasons_page() -> str:
    """What each reason says."""
    lines = (f"- `{reason.word}`: {reason.about}" for reason in sorted(ROWS, key=lambda one: one.word))
    about = "The word of `reason` in `introspect diff --format json`, and what it says of the first divergence."
    return page("Reasons", about, lines)


def rules() -> str:
    """Every rule of `introspect check`."""
    every = document(rules=choose((), ()))["rules"]
    lines = (f"- **{rule['rule']}** ({rule['level']}): {escaped(rule['about'])}." for rule in every)
    about = "What `introspect check` looks for. `check --list` says from which numbers on, findings what causes it."
    return page("Health rules", about, lines)


def statistics() -> str:
    """What is kept of every tensor."""

    def lines() -> Iterator[str]:
        for name, statistic in STATISTICS.items():
            asked = (
                " Kept only where `capture --stats` names it, since it needs a sort." if statistic.on_request else ""
            )
            yield f"- `{name}`: {statistic.about}.{asked}"
        yield from ("", "These follow from the others, so they take no room:", "")
        yield from (f"- `{name}`: {about}." for name, about in DERIVED_STATS.items())

    about = (
        "Statistics are over the finite elements; NaN, +Inf and -Inf are counted and left out. n is the number of "
        "finite elements, and Mk the sum of the k-th powers of their deviations from the mean. "
        "[How they are computed](kernels.md) says what is kept of complex numbers, integers and other types."
    )
    return page("Statistics", about, lines())


def variables_read() -> set[str]:
    """Every environment variable that the package reads by name."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = {
            target.id: node.value.value
            for node in ast.walk(tree)
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                read = ast.unparse(node.func) in {"os.environ.get", "environ.get", "os.getenv", "os.environ.pop"}
                asked = node.args[0] if read else None
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
                asked = node.slice
            else:
                continue
            if isinstance(asked, ast.Constant):
                names.add(asked.value)
            elif isinstance(asked, ast.Name) and isinstance(constants.get(asked.id), str):
                names.add(constants[asked.id])
    return names - BETWEEN_PROCESSES


def environment() -> str:
    """The environment variables that are read."""

    def lines() -> Iterator[str]:
        for name in sorted(variables_read() | VARIABLES.keys()):
            yield f"- `{name}`: {VARIABLES[name]}"
        yield from ("", "## Launchers", "", "A process learns its rank from what its launcher set, in this order:", "")
        for launcher in LAUNCHERS[1:]:  # the first is introspect itself
            yield f"- `{launcher.rank}` of `{launcher.world_size}`, on its machine `{launcher.local_rank}`"

    about = (
        "introspect reads these environment variables. Those that torch and other libraries read have the meaning that "
        "they always have."
    )
    return page("Environment variables", about, lines())


def json_page(schemas: dict[str, dict[str, Any]]) -> str:
    """The schemas in words."""
    made = schemas["diff"]

    def keys(of: dict[str, Any]) -> Iterator[str]:
        for key, value in of["properties"].items():
            words = ", ".join(f"`{one}`" for one in value.get("enum", ()))
            text = escaped(value.get("description", "")).removesuffix(".")
            yield f"- `{key}`: " + "; ".join(filter(None, (text, words))) + "."

    def lines() -> Iterator[str]:
        yield from keys(made)
        yield from ("", "## Schemas", "", "Each has all keys, with what they mean.", "")
        for name, one in schemas.items():
            command = one["title"].removesuffix(" --format json")
            yield f"- `{name}.schema.json`: `{command}`"

    about = (
        "`introspect diff A B --format json` prints one object, in strict JSON; `--format yaml` prints it as YAML. "
        "`check`, `runs`, `show` with each of its views, `bisect` and a `diff` of more than two runs have documents "
        "too. A JSON Schema of each comes with the package, below `render/assets/` of `introspect_cli`; the tests hold "
        "real answers against them. [Reasons](reasons.md) says what the word of `reason` means. Checksums have 16 "
        "hexadecimal digits; a record has the [statistics](statistics.md) by name. A divergence has `step`, `rank`, "
        "`phase`, `kind`, `fqn`, `call` and `path`, `role`, `reason`, what runs `a` and `b` recorded, and `rel_l2`."
        "\n\n```python\nimport json\nfrom importlib.resources import files\n\n"
        'schema = files("introspect_cli.render") / "assets" / "diff.schema.json"\n'
        "schema = json.loads(schema.read_text())\n```"
    )
    return page("JSON documents", about, lines())


def python() -> str:
    """The functions of the package that are for others, by their docstrings."""

    def lines() -> Iterator[str]:
        for name in introspect_cli.__all__:
            value = getattr(introspect_cli, name)
            if not callable(value):
                continue
            text = inspect.cleandoc(value.__doc__ or "")
            about, *parts = re.split(r"\n(Args|Returns|Raises|Yields):\n", text)
            yield from (f"## {name}", "", "```python", f"{name}{signature(value)}", "```", "", about.strip(), "")
            for title, block in zip(parts[::2], parts[1::2], strict=True):
                items = re.findall(r"^ {4}(\*{0,2}\w+): (.*(?:\n {8}.*)*)", block, re.MULTILINE)
                plain = " ".join(block.split())
                if items:
                    yield from (f"**{title}**", "")
                    yield from (f"- `{item}`: {' '.join(words.split())}" for item, words in items)
                    yield ""
                elif plain:
                    yield from (f"**{title}**: {plain}", "")

    about = "`import introspect_cli` has these functions. [Notebooks and scripts](../guides/notebooks.md) shows them."
    return page("Python", about, lines())


def signature(function: Any) -> str:
    """A function's parameters with their types as they are written."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(function)))


def main() -> None:
    """Write all of them."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()

"""How long a comparison of two large runs takes, and how much memory; how large the page about them is.

Two runs of 10 million records (1,000 steps of 10,000 sites), equal, with one record of the last step changed, and with
every record changed by a rounding and compared under a tolerance. Stores are built with the store's own writer, in a
temporary directory that is removed; each comparison runs in a process of its own, and start-up is measured beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from made_runs import write_large
from measuring import Row, bounded, seconds, show

if TYPE_CHECKING:
    from collections.abc import Iterator

TOOL = [sys.executable, "-m", "introspect_cli"]
RUN = """
import json, resource, sys, time
began = time.perf_counter()
import click, numpy, rich.console, yaml
from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions
from introspect_cli.render.diff_text import diff_blocks
from introspect_cli.store.run import open_run
ready = time.perf_counter()
options = DiffOptions(rtol=float(sys.argv[3]))
with open_run(sys.argv[1]) as a, open_run(sys.argv[2]) as b:
    result = compare_runs(a, b, options)
diff_blocks(result)
print(json.dumps({
    "import": ready - began, "compare": time.perf_counter() - ready, "verdict": result.verdict.value,
    "diverged": result.counts.diverged, "within": result.counts.within,
    "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
}))
"""


def measure(a: Path, b: Path, rtol: float = 0.0) -> dict[str, Any]:
    """Compare in a fresh process, the second time counting, so that files are in memory as they are after a capture."""
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", RUN, str(a), str(b), str(rtol)], check=True, capture_output=True, text=True
        )
    return json.loads(done.stdout)


def startup(*commands: list[str]) -> list[float]:
    """Seconds that commands take from start to end, best of 9 turns.

    As of an installed package, whose bytecode is there: the first turn writes it, whatever the environment says.
    """
    best = [float("inf")] * len(commands)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(9):
        for number, command in enumerate(commands):
            run = partial(subprocess.run, command, check=False, capture_output=True, env=environment)
            best[number] = min(best[number], seconds(run))
    return best


def page(root: Path) -> Iterator[Row]:
    """What the page of two runs costs in which every record differs, and how long a browser takes to show it.

    The browser is a Chromium without a window, if there is one; an empty page is opened beside it.
    """
    target, empty = root / "page.html", root / "empty.html"
    command = [*TOOL, "report", str(root / "a"), str(root / "b"), "-o", str(target)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    yield bounded("the page of these: making it, CPU", took, "s")
    yield bounded("the page of these", target.stat().st_size / 1e6, "MB", most=5)
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        yield Row("the page of these: opening it", None, note="no Chromium here")
        return
    empty.write_text("<!doctype html><title>empty</title>")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--screenshot={root / 'page.png'}"]
    shown, nothing = startup([*command, target.as_uri()], [*command, empty.as_uri()])
    yield bounded("the page of these: longer to open than an empty one", shown - nothing, "s", most=2)


def measured(root: Path, steps: int, sites: int) -> Iterator[Row]:
    """The rows of the table."""
    write_large(root / "a", steps, sites)
    for change, rtol, most, what in (
        ("", 0.0, 0.2, "equal"),
        ("last", 0.0, 0.5, "one record of the last step differs"),
        ("all", 1e-5, 6.0, "all differ by a rounding, --rtol 1e-5"),
        ("all", 0.0, None, "all differ, nothing tolerated"),
    ):
        shutil.rmtree(root / "b", ignore_errors=True)
        write_large(root / "b", steps, sites, change=change)
        got = measure(root / "a", root / "b", rtol)
        yield replace(
            bounded(what, got["compare"], "s", most=most), note=f"{got['memory'] / 1e6:.0f} MB, {got['verdict']}"
        )
    yield from page(root)
    for name, change in (("small", ""), ("small2", "last")):
        write_large(root / name, 3, 50, change=change)
    python = [sys.executable, "-c"]
    click, helped, imports, diff = startup(
        [*python, "import click"],
        [*TOOL, "--help"],
        [*python, "import click, numpy, rich.console, yaml"],
        [*TOOL, "diff", str(root / "small"), str(root / "small2")],
    )
    yield bounded("introspect --help; 1.5 x importing click", helped, "s", most=1.5 * click)
    yield bounded("a diff of two small runs; 2 x its imports", diff, "s", most=2 * imports)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--sites", type=int, default=10_000)
    asked = parser.parse_args()
    print(f"{asked.steps * asked.sites:,} records a run: {asked.steps:,} steps of {asked.sites:,} sites")
    with tempfile.TemporaryDirectory() as folder:
        show(measured(Path(folder), asked.steps, asked.sites))


if __name__ == "__main__":
    main()

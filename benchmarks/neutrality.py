"""Every architecture and every way of training that is trained bare and watched, and whether the bits agree.

The tests are the measurement: each trains from the same seeds without and with a capture and compares every loss,
parameter, gradient, buffer, optimizer state and generator. This runs them all, the wide sweep included, and prints
what they found as tables.

    python benchmarks/neutrality.py                 # everything, some minutes
    python benchmarks/neutrality.py --only ways
    python benchmarks/neutrality.py --only architectures
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent.parent / "tests"
SWEEP = "test_neutral_architectures.py"
GROUPS = {
    "test_neutral_autograd.py": "forward and backward",
    "test_neutral_optimizers.py": "optimizers and schedules",
    "test_neutral_modules.py": "modules and values",
    "test_neutral_compilers.py": "compilers",
    "test_neutral_processes.py": "processes and threads",
    "test_neutral_traces.py": "no trace left",
    "test_neutral_tracebacks.py": "tracebacks",
    "test_neutral_endings.py": "endings",
}


class Collected:
    """Remembers how each test ended."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Hear of a test's setup, call or teardown."""
        if report.when == "call" or not report.passed:
            before = self.outcomes.get(report.nodeid, "passed")
            self.outcomes[report.nodeid] = report.outcome if before == "passed" else before


def run(files: list[str]) -> dict[str, str]:
    """Run test files, the sweep included; how each test ended."""
    collected = Collected()
    arguments = ["-q", "-m", "sweep or not sweep", "--no-header", "-p", "no:cacheprovider", "--tb=line"]
    pytest.main([*arguments, *(str(TESTS / name) for name in files)], plugins=[collected])
    return collected.outcomes


def way(nodeid: str) -> str:
    """A test's name as words."""
    name, _, case = nodeid.rpartition("::")[2].partition("[")
    return name.removeprefix("test_").replace("_", " ") + (f" ({case.rstrip(']')})" if case else "")


def architectures(outcomes: dict[str, str]) -> list[str]:
    """The table of architectures, a row a family."""
    sys.path.insert(0, str(TESTS))
    from test_neutral_architectures import ARCHITECTURES

    families: dict[str, list[str]] = defaultdict(list)
    names: dict[str, list[str]] = defaultdict(list)
    for nodeid, outcome in outcomes.items():
        found = re.search(r"test_architecture\[(.+)\]$", nodeid)
        if found:
            families[ARCHITECTURES[found[1]]].append(outcome)
            names[ARCHITECTURES[found[1]]] += [] if outcome == "passed" else [f"{found[1]} {outcome}"]
    rows = ["| architectures | tried | equal to the bit | not |", "|---|---:|---:|---|"]
    for family, own in families.items():
        rows.append(f"| {family} | {len(own)} | {own.count('passed')} | {', '.join(names[family])} |")
    total = [outcome for own in families.values() for outcome in own]
    return [*rows, f"| all | {len(total)} | {total.count('passed')} | |"]


def ways(outcomes: dict[str, str]) -> list[str]:
    """The table of ways of training, a row a group."""
    groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for nodeid, outcome in outcomes.items():
        groups[GROUPS[nodeid.partition("::")[0].rpartition("/")[2]]].append((way(nodeid), outcome))
    rows = ["| ways | tried | as bare | which |", "|---|---:|---:|---|"]
    for group, own in groups.items():
        listed = "; ".join(name if outcome == "passed" else f"**{name}: {outcome}**" for name, outcome in own)
        rows.append(f"| {group} | {len(own)} | {sum(outcome == 'passed' for _, outcome in own)} | {listed} |")
    total = [outcome for own in groups.values() for _, outcome in own]
    return [*rows, f"| all | {len(total)} | {total.count('passed')} | |"]


def main() -> int:
    """Run and print; 1 if anything differs."""
    parser = argparse.ArgumentParser(description="Train bare and watched, and compare every bit.")
    parser.add_argument("--only", choices=["ways", "architectures"])
    only = parser.parse_args().only
    outcomes: dict[str, str] = {}
    tables: list[str] = []
    if only != "ways":
        found = run([SWEEP])
        tables += [*architectures(found), ""]
        outcomes |= found
    if only != "architectures":
        found = run(list(GROUPS))
        tables += ways(found)
        outcomes |= found
    print("\n" + "\n".join(tables))
    return int("failed" in outcomes.values())


if __name__ == "__main__":
    sys.exit(main())

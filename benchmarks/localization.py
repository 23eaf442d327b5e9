"""Count how many planted faults are named at exactly the right place.

A comparison that points somewhere near the fault still costs an evening, so a case counts only when step, phase,
kind, name and role of the first divergence are right and its sentence says what a reader needs (`cases.py`).

    python benchmarks/localization.py [--only PATTERN] [--jobs N] [--keep DIRECTORY] [--gpu]

With `--matrix`, every fault again under every configuration of `configurations.py`, and each claim of each answer held
against the records (`claims.py`).
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from cases import FIXTURES, Captures, introspect, judge, load_cases, load_field_cases, load_operator_cases
from configurations import CONFIGURATIONS
from forks import Forks
from matrix import chosen, print_matrix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cases import Case


def main() -> int:
    """Print the table; the exit status is 0 when every case is right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="names of the cases to run, as a glob")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--keep", type=Path, help="a directory for the runs, kept and used again")
    parser.add_argument("--warm", action="store_true", help="fork captures from a process that has torch imported")
    parser.add_argument(
        "--matrix", action="store_true", help="every fault under every configuration, each claim checked"
    )
    parser.add_argument("--configurations", default="*", help="names of the configurations to try, as a glob")
    parser.add_argument("--gpu", action="store_true", help="the pairs of `fixtures/cases_gpu.yaml`, which need one")
    options = parser.parse_args()
    everything = [*load_cases(), *load_operator_cases(), *load_field_cases()]
    if options.gpu:
        everything = load_cases(FIXTURES / "cases_gpu.yaml")
    cases = [case for case in everything if fnmatch.fnmatch(case.name, options.only)]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        directory = options.keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        run = Forks() if options.warm else introspect
        captures = Captures(directory, run)
        if options.matrix:
            wanted = [one for one in CONFIGURATIONS if fnmatch.fnmatch(one.name, options.configurations)]
            return print_matrix(chosen(cases, wanted), captures, options.jobs)
        verdicts = []
        for case, problems in zip(cases, pool.map(lambda case: judge(case, captures, run), cases), strict=True):
            verdicts.append((case, not problems))
            if problems:
                print(f"{case.name:44} {'; '.join(problems)}", flush=True)
    print(table(verdicts))
    return int(not all(right for _, right in verdicts))


def table(verdicts: Sequence[tuple[Case, bool]]) -> str:
    """How many of each script's cases are right, and of all."""
    lines = [f"{'script':24} {'planted faults':>14} {'right':>6} {'equal pairs':>12} {'false alarms':>13}"]
    for script in [*dict.fromkeys(case.a.script for case, _ in verdicts), "all"]:
        chosen = [(case, right) for case, right in verdicts if script in (case.a.script, "all")]
        planted = [right for case, right in chosen if case.expect]
        same = [right for case, right in chosen if not case.expect]
        alarms = len(same) - sum(same)
        lines.append(f"{script:24} {len(planted):14} {sum(planted):6} {len(same):12} {alarms:13}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

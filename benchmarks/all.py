"""Every target of speed, memory and size, a benchmark at a time: overhead, throughput, memory, store, comparison, page.

Run on an idle machine: python benchmarks/all.py [--quick]. A target that is missed says MISSED.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

FULL = {"overhead.py": (), "throughput.py": (), "memory.py": (), "store.py": (), "diff.py": ()}
QUICK = {
    "overhead.py": ("--quick", "--workload", "gpt d=256"),
    "throughput.py": (),
    "memory.py": (),
    "store.py": ("--records", "1000000"),
    "diff.py": ("--steps", "100"),
}


def main() -> None:
    """Run them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one workload, smaller stores")
    for name, options in (QUICK if parser.parse_args().quick else FULL).items():
        print(f"\n== {name} {' '.join(options)}", flush=True)
        subprocess.run([sys.executable, str(Path(__file__).with_name(name)), *options], check=False)


if __name__ == "__main__":
    main()

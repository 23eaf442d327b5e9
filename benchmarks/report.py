"""How large the page of two long runs is, what making it costs, and how long a browser takes to show it.

Two runs of 10 million records (1,000 steps of 10,000 sites) in which every record differs by a rounding: the page that
has most to show. The browser is a Chromium without a window, if there is one; an empty page is opened beside it.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from diff import build, startup

MOST_BYTES, MOST_SECONDS = 5e6, 2.0


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--sites", type=int, default=10_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        build(root / "a", asked.steps, asked.sites)
        build(root / "b", asked.steps, asked.sites, change="all")
        page = root / "page.html"
        command = [sys.executable, "-m", "introspect_cli", "report", str(root / "a"), str(root / "b"), "-o", str(page)]
        subprocess.run(command, check=True, capture_output=True)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        took, memory = used.ru_utime + used.ru_stime, used.ru_maxrss * 1024
        size = page.stat().st_size
        print(f"{asked.steps:,} steps of {asked.sites:,} sites, two runs, every record differs")
        print(f"making it      {took:7.1f} s of CPU, {memory / 1e6:.0f} MB")
        print(
            f"size           {size / 1e6:7.2f} MB  {'met' if size < MOST_BYTES else 'MISSED'} ({MOST_BYTES / 1e6:.0f})"
        )
        browser = shutil.which("chromium") or shutil.which("google-chrome")
        if browser is None:
            print("opening it     no Chromium here")
            return
        empty = root / "empty.html"
        empty.write_text("<!doctype html><title>empty</title>")
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--screenshot={root / 'page.png'}"]
        shown, nothing = startup([*command, page.as_uri()], [*command, empty.as_uri()])
        longer = shown - nothing
        told = "met" if longer < MOST_SECONDS else "MISSED"
        print(f"opening it     {longer:7.2f} s longer than an empty page  {told} ({MOST_SECONDS:.0f})")


if __name__ == "__main__":
    main()

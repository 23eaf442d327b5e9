"""Runs of many ranks in object storage: what sending and comparing them costs, in requests, bytes and seconds.

    python -m moto.server -p 5599 &                     # or any other storage
    export AWS_ENDPOINT_URL=http://127.0.0.1:5599 AWS_ACCESS_KEY_ID=a AWS_SECRET_ACCESS_KEY=b
    python benchmarks/objects.py FOLDER s3://bucket/runs --ranks 64 --steps 100

The runs are those of `scale.py`. Requests that are made together take one answer's time, so these are counted as well.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

import scale

from introspect_cli.publish.send import Sender
from introspect_cli.store import pieces, remote
from introspect_cli.store.objects import Storage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.errors import StoreError


class Counted(Storage):
    """Storage that counts what it is asked for."""

    requests = together = fetched = sent = 0

    def entries(self, folder: str = "") -> dict[str, int] | None:
        """Count a listing."""
        Counted.requests += 1
        Counted.together += 1
        return super().entries(folder)

    def read(self, wanted: Sequence[tuple[str, int, int]]) -> list[bytes | StoreError]:
        """Count ranges."""
        got = super().read(wanted)
        Counted.requests += len(wanted)
        Counted.together += 1
        Counted.fetched += sum(len(data) for data in got if isinstance(data, bytes))
        return got


def main() -> None:
    """Write and send the runs, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("url")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--sites", type=int, default=200)
    given = parser.parse_args()
    remote.Storage = Counted  # type: ignore[misc] # for the readers
    begun = Storage(given.url)
    begun.system.makedirs(begun.root.partition("/")[0] if given.url.startswith("s3:") else begun.root, exist_ok=True)
    for name in ("rows", "again", "late", "columns"):
        path = given.folder / name
        if not path.exists():
            scale.build(path, name, given.ranks, given.steps, given.sites, lean=False)
        clock = time.perf_counter()
        Sender(path, f"{given.url}/{name}").send()
        print(f"{name}: sent in {time.perf_counter() - clock:.1f} s")
    print("| | requests | one after the other | MB | of | s | s on disk | |\n|---|---|---|---|---|---|---|---|")
    for words, *pair in (
        ("one layout, equal", "rows", "again"),
        ("one layout, one step of one rank differs", "rows", "late"),
        ("two layouts, equal to the bit", "rows", "columns"),
    ):
        size = sum(file.stat().st_size for name in pair for file in (given.folder / name).rglob("*") if file.is_file())
        pieces.KEPT = pieces.Kept(64 << 20)
        Counted.requests = Counted.together = Counted.fetched = 0
        clock = time.perf_counter()
        said = scale.WORK["compare"](*(f"{given.url}/{name}" for name in pair))
        took, clock = time.perf_counter() - clock, time.perf_counter()
        assert said == scale.WORK["compare"](*(str(given.folder / name) for name in pair))
        print(
            f"| {words} | {Counted.requests} | {Counted.together} | {Counted.fetched / 1e6:.1f} | {size / 1e6:.0f} "
            f"| {took:.1f} | {time.perf_counter() - clock:.1f} | {said} |"
        )


if __name__ == "__main__":
    main()

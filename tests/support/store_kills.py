"""Kills writing processes at chosen and at random instants, and looks at what is left.

With the package installed, `python tests/support/store_kills.py COUNT [SEED]` prints how many kills there were and
what went wrong; the tests run it with a small count, the survival benchmark with a large one.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import sys
import tempfile
import time
from pathlib import Path

from synthetic import batch, row

from introspect_cli.store import files
from introspect_cli.store.run import RunState, open_run
from introspect_cli.store.run_writer import StoreWriter
from introspect_cli.store.verify import verify_run

BIG = 400  # records a step for random kills, so that many land inside a write


def rows(step, count):
    """Records that tell of which step they are; every step has a site of its own."""
    return [row("forward", "output", f"A.{n}", float(step * 1000 + n)) for n in range(count - 1)] + [
        row("forward", "output", f"new.{step}", float(step))
    ]


def write_forever(path, report, count, steps=10**9):
    store = StoreWriter.create(path)
    store.write_settings("env", {"A": 1})
    writer = store.rank(0)
    for step in range(steps):
        writer.append(step, batch(writer, rows(step, count)))
        os.write(report, struct.pack("<i", step))
    store.write_manifest({"status": "complete"})
    store.close()


def last_reported(report):
    """The last step whose end the writer reached, as it said itself; -1 for none."""
    data = b""
    while piece := os.read(report, 1 << 16):
        data += piece
    return struct.unpack("<i", data[-4:])[0] if data else -1


def problems(path, reported, count):
    """What is wrong with what a killed writer left; [] if nothing."""
    if not (path / "manifest.json").exists():
        return [] if reported < 0 else ["the manifest is gone"]
    with open_run(path) as run:
        if run.state is RunState.RUNNING:
            return ["the run is said to go on"]
        last = run.last_step if run.last_step is not None else -1
        out = [] if last in (reported, reported + 1) else [f"step {reported} was written, {last} is the last read"]
        if run.ranks:
            reader = run.rank(0)
            if [entry.step for entry in reader.steps] != list(range(last + 1)):
                out.append("steps are missing in the middle")
            for step in {0, last - 1, last} & set(range(last + 1)):
                names = [(r.site.fqn, r.summary.text) for r in reader.records(step)]
                if names != [(each.fqn, repr(value)) for each, _, value in rows(step, count)]:
                    out.append(f"step {step} is not as it was written")
    out += verify_run(path).findings
    return out


def trial(path, count, child):
    """Fork a process that runs `child(report)`; what is wrong afterwards."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read_end)
            child(write_end)
        finally:
            os._exit(0)
    os.close(write_end)
    return pid, read_end


def kill_at_random(folder, count, seed):
    """Kill at `count` random instants; problems found."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        path = folder / f"random{number}"
        pid, report = trial(path, BIG, lambda report, path=path: write_forever(path, report, BIG))
        time.sleep(rng.expovariate(1 / 0.03))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        reported = last_reported(report)
        os.close(report)
        found += [f"random {number}: {problem}" for problem in problems(path, reported, BIG)]
    return found


def kill_inside_writes(folder):
    """Kill before, in the middle of and after each write of a short run; problems found, and the number of kills."""
    found, kills, number, finished = [], 0, 0, False
    while not finished:
        for part in (0.0, 0.1, 0.3, 0.6, 0.9, 1.0):
            path = folder / f"write{number}-{part}"
            pid, report = trial(path, 4, lambda report, n=number, p=part, path=path: _dying(path, report, n, p))
            _, status = os.waitpid(pid, 0)
            reported = last_reported(report)
            os.close(report)
            finished = os.WIFEXITED(status)
            kills += not finished
            found += [f"write {number}, {part}: {problem}" for problem in problems(path, reported, 4)]
        number += 1
    return found, kills


def _dying(path, report, fatal, part):
    """Write a run of three steps, and die in the `fatal`-th write after `part` of its bytes."""
    calls = iter(range(10**9))

    def dying(real):  # whole documents, and frames of the log
        def write(fd, data, *offset):
            if fd != report and next(calls) == fatal:
                cut = b"".join(data) if isinstance(data, list) else bytes(data)
                cut = cut[: int(len(cut) * part)]
                real(fd, [cut] if isinstance(data, list) else cut, *offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(fd, data, *offset)

        return write

    for name in ("write", "pwritev"):
        setattr(files.os, name, dying(getattr(os, name)))
    write_forever(path, report, 4, steps=3)


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with tempfile.TemporaryDirectory() as folder:
        found, kills = kill_inside_writes(Path(folder))
        found += kill_at_random(Path(folder), count, seed)
    lines = [f"{kills} kills inside writes, {count} at random instants: {len(found)} problems", *found]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

"""Measure what comparing a run while it goes on costs, and what it saves.

Training: blocks of steps of one run, in turn with a comparison that is at work and looked at, and with one that is
stopped and not looked at, so that a busy machine is busy for both. `--keep-around`, which copies every tensor, is a run
beside it. Bisection: 30 commits of a script of 200 steps, whose fault shows at step 3, with every run to its end and as
it is.

    python benchmarks/live.py [--steps 200] [--pause 0.02]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from introspect_cli.capture.options.parse import options_of
from introspect_cli.capture.session import Session
from introspect_cli.script.ending import Ending

_BLOCKS, _OF = 20, 15
_BEGINS = 5.0  # seconds that a comparison may take to begin
SCRIPT = """\
import sys, time, torch, model
steps, pause = int(sys.argv[1]), float(sys.argv[2])
torch.manual_seed(0)
net = model.Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(steps):
    loss = net(torch.randn(4, 3), step).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(pause)
"""
MODEL = """\
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
    def forward(self, x, step):
        return self.b(torch.relu(self.a(x))) * {scale}
"""
COMMITS, FIRST_BAD = 30, 21


def training(folder: Path) -> list[tuple[str, list[float]]]:
    """What is captured; its median step in ms and the ratio to plain capture, of this process and on the wall."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(12)))
    batch = torch.randn(64, 256)
    began = {name: value.clone() for name, value in model.state_dict().items()}

    def steps(name: str, more: dict[str, object], times: dict[bool, list[tuple[float, float]]]) -> None:
        """A run of blocks that are compared, and not, in turn; without a reference of one sort."""
        model.load_state_dict(began)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        asked = {
            "output": folder / name,
            "force": True,
            "env": False,
            "packages": False,
            "source": False,
            "quiet": True,
        }
        session = Session(None, options_of({**asked, **more}))
        session.start()
        session.adopt(model)
        against, comparers = session._reference._against, _comparers(folder / name) if "against" in more else []  # noqa: SLF001 - to stop looking
        for number in range(_BLOCKS * _OF):
            on = bool(number // _OF % 2)
            if not number % _OF:
                session._reference._against = against if on else None  # noqa: SLF001 - as above
                for pid in comparers:
                    os.kill(pid, signal.SIGCONT if on else signal.SIGSTOP)
            start = time.process_time(), time.perf_counter()
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if number >= _OF:
                times[on].append((time.process_time() - start[0], time.perf_counter() - start[1]))
        for pid in comparers:
            os.kill(pid, signal.SIGCONT)
        session._reference._against = against  # noqa: SLF001 - as above
        session.finish(Ending(0, "returned"))

    steps("ref", {}, {False: [], True: []})
    reference = {"against": str(folder / "ref")}
    rows, plain = [], [0.0, 0.0]
    for name, more in (("--against", reference), ("--keep-around 2", {"keep_around": 2})):
        times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        steps("run", more, times)
        if "against" in more:
            plain = _medians(times[False])
            rows.append(("capture", [plain[0], 1.0, plain[1], 1.0]))
        here, wall = _medians(times[True])
        rows.append((f"capture {name}", [here, here / plain[0], wall, wall / plain[1]]))
    return rows


def _medians(times: list[tuple[float, float]]) -> list[float]:
    return [1e3 * statistics.median(column) for column in zip(*times, strict=True)]


def _comparers(run: Path) -> list[int]:
    """The processes that compare a run, once they have begun to."""
    time.sleep(_BEGINS)
    processes = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = place.read_bytes()
            if b"introspect_cli.commands.live" in words and str(run).encode() in words:
                processes.append(int(place.parent.name))
    assert processes, "nothing compares"
    return processes


def bisections(folder: Path, steps: int, pause: float) -> list[tuple[str, float, int, int]]:
    """How it is bisected, seconds, runs, and steps of all of them together."""
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    for role in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{role}_NAME": "someone", f"GIT_{role}_EMAIL": "someone@example.invalid"}

    def run(*words: str, code: int = 0) -> None:
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr

    run("git", "init", "-q", "-b", "main")
    (folder / "train.py").write_text(SCRIPT)
    for number in range(1, COMMITS + 1):
        scale = "(1.001 if step >= 3 else 1.0)" if number >= FIRST_BAD else "1.0"
        (folder / "model.py").write_text(MODEL.replace("{scale}", scale))
        (folder / "notes").write_text(str(number))
        run("git", "add", "-A")
        run("git", "commit", "-q", "-m", f"{number}")
    rows = []
    ways = (
        ("every run to its end", ("--until-step", str(steps - 1))),
        ("each up to the first divergence", ()),
    )
    for number, (name, options) in enumerate(ways):
        kept = folder.parent / f"kept{number}"
        words = ("--good", f"HEAD~{COMMITS - 1}", "--max-runs", "0", *options, "-o", str(kept))
        start = time.perf_counter()
        run(sys.executable, "-m", "introspect_cli", "bisect", *words, "train.py", str(steps), str(pause), code=1)
        seconds = time.perf_counter() - start
        runs = [_steps(path) for path in sorted(kept.glob("*/manifest.yaml"))]
        rows.append((name, seconds, len(runs), sum(runs)))
    return rows


def _steps(manifest: Path) -> int:
    return next(int(line.split(":")[1]) for line in manifest.read_text().splitlines() if line.startswith("steps:"))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=200, help="steps of the script that is bisected; 0 to leave it out"
    )
    parser.add_argument("--pause", type=float, default=0.02, help="seconds that each of them sleeps")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        print(f"{'training, ms a step':36}{'this process':>14}{'ratio':>8}{'on the wall':>14}{'ratio':>8}")
        for name, (here, ratio, wall, on_wall) in training(Path(place)):
            print(f"{name:36}{here:14.2f}{ratio:8.3f}{wall:14.2f}{on_wall:8.3f}")
        project = Path(place) / "project"
        project.mkdir()
        if not given.steps:
            return
        print(f"\n{f'bisection over {COMMITS} commits':36}{'seconds':>12}{'runs':>8}{'steps':>8}")
        for name, seconds, runs, steps in bisections(project, given.steps, given.pause):
            print(f"{name:36}{seconds:12.1f}{runs:8}{steps:8}")


if __name__ == "__main__":
    main()

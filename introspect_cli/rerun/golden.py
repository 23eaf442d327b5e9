"""Golden runs: a small run kept in git, and the question whether a script still trains the same.

A whole run is too large for a repository, and a test needs the divergence, not every statistic. So a golden run keeps
checksums and sketches of losses, outputs, gradients and parameters, at the first steps and a few later ones, in one
compressed file. Beside it stand the command to run again and the tolerance, so that a check needs nothing else.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.compare.answer.weights import rounds_differently
from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions, DiffResult, Verdict
from introspect_cli.compare.settings.differences import describe
from introspect_cli.derived import ROUNDING
from introspect_cli.errors import StoreError, UsageError
from introspect_cli.rerun.place import Place
from introspect_cli.rerun.variant import capture
from introspect_cli.store import documents
from introspect_cli.store.files import GOLDEN_RUN, DamageError
from introspect_cli.store.pack import pack
from introspect_cli.store.run import open_run

if TYPE_CHECKING:
    from collections.abc import Sequence


ABOUT, STORE = "golden.json", GOLDEN_RUN
KINDS = "rng,batch,loss,output,grad,param,buffer"
_SMALL = 64
"""Roundings of a value's type that summation order may make; more is another computation."""


@dataclass(frozen=True)
class Golden:
    """The command and tolerance that a golden run is checked with.

    Attributes:
        words: the script and its arguments; empty for one that a test saved.
        options: capture options that were given beside those of `golden`.
        steps: how many steps it has.
        rtol: relative tolerance of the comparison.
        atol: absolute tolerance of the comparison.
    """

    words: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    steps: int = 20
    rtol: float = 0.0
    atol: float = 0.0


def small_run_options(steps: int) -> list[str]:
    """The options of `capture` for a small run that ends after `steps` steps.

    It records few kinds (`KINDS`) at the first four, the middle and the last step (all where there are no more than
    four), without statistics, environment, packages or sources.
    """
    schedule = f"0:4,{steps // 2},{steps - 1}" if steps > 4 else f"0:{steps}"
    small = ["--no-env", "--no-packages", "--no-source"]
    return ["--record", KINDS, "--stats", "none", "--steps", schedule, "--until-step", str(steps - 1), *small]


def save(golden: Golden, path: Path, *, force: bool = False) -> int:
    """Run the script in the current directory and write the golden run at `path`.

    Args:
        golden: what to run, and how it will be compared.
        path: directory of the golden run.
        force: whether to write into a directory that has something in it; other files there are kept.

    Returns:
        the bytes of all files in that directory.

    Raises:
        StoreError: the directory has something in it and `force` is not set, or the script recorded no step.
    """
    if path.exists() and not force and any(path.iterdir()):
        raise StoreError(f"{path} exists already; choose another place with -o, or --force to replace it")
    with tempfile.TemporaryDirectory() as folder:
        return pack_golden(_capture_small(golden, Path(folder) / "run"), golden, path)


def pack_golden(run: Path, golden: Golden, path: Path) -> int:
    """Write the golden run of a run at `path`: `golden.json` and the packed run, in place of those that are there.

    The directory is made. Returns the bytes of all files in it.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / ABOUT).write_bytes(documents.dump(vars(golden)))
    (path / STORE).unlink(missing_ok=True)
    pack(run, path / STORE, sources=False)
    return sum(file.stat().st_size for file in path.iterdir())


def read_golden(path: Path) -> Golden:
    """Read the description of the golden run at `path`.

    Raises:
        StoreError: there is none, or it cannot be read.
    """
    try:
        about = documents.load((path / ABOUT).read_bytes(), str(path / ABOUT))
        words, options = (tuple(map(str, about[name])) for name in ("words", "options"))
        return Golden(words, options, int(about["steps"]), float(about["rtol"]), float(about["atol"]))
    except OSError:
        raise StoreError(f"no golden run at {path}: save one with `introspect golden save -o {path} SCRIPT`") from None
    except (AttributeError, KeyError, TypeError, ValueError, DamageError):
        raise StoreError(f"{path / ABOUT} cannot be read: save it again with --force") from None


def check(path: Path, *, noise: bool = False) -> DiffResult:
    """Run the script of a golden run again, in the current directory, and compare.

    The new runs are temporary.

    Args:
        path: the golden run.
        noise: whether to run it twice: differences as between the two new runs are then accepted.

    Raises:
        StoreError: there is no golden run, or the script recorded nothing.
        UsageError: a test saved it, and only that test can check it.
    """
    golden = read_golden(path)
    if not golden.words:
        raise UsageError(f"a test saved {path}: run that test to check it")
    with tempfile.TemporaryDirectory() as folder:
        runs = [_capture_small(golden, Path(folder) / f"run{number}") for number in range(1 + noise)]
        return compare_golden(path, golden, runs[0], runs[1:])


def compare_golden(path: Path, golden: Golden, run: Path, noise: Sequence[Path] = ()) -> DiffResult:
    """Compare a new run with the golden one, by its tolerance.

    Args:
        path: the golden run.
        golden: its description.
        run: the new run.
        noise: more runs of the same code as `run`. Side a is the golden run without them, and `run` with them, since
            they must be repeats of a.

    Returns:
        the comparison, in which the golden run is named by `path`; UNDECIDED in place of DIVERGED where the first
        difference is as small as rounding and the machines round differently.
    """
    with ExitStack() as stack:
        kept, new, *others = [stack.enter_context(open_run(each)) for each in (path / STORE, run, *noise)]
        a, b = (new, kept) if others else (kept, new)
        answer = compare_runs(a, b, DiffOptions(rtol=golden.rtol, atol=golden.atol), others)
    return _undecided_if_rounding(replace(answer, b=str(path)) if others else replace(answer, a=str(path)))


def _undecided_if_rounding(result: DiffResult) -> DiffResult:
    """The result; UNDECIDED in place of DIVERGED where another machine's rounding may explain the first difference.

    It may where the difference is at most `_SMALL` roundings of its dtype, and a setting says that both machines round
    differently.
    """
    first = result.first
    if result.verdict is not Verdict.DIVERGED or first is None or first.a is None or first.b is None:
        return result
    unit = ROUNDING.get(first.a.layout.dtype)
    small = unit is not None and first.rel_l2 is not None and first.rel_l2 <= _SMALL * unit
    machine = [describe(change) for change in result.settings if rounds_differently(change)]
    if not small or not machine:
        return result
    why = f"the first difference, at step {first.step}, is as small as rounding"
    machines = f"the golden run is of another machine ({'; '.join(machine[:3])})"
    sentence = f"Could not tell: {why}, and {machines}. Give it a tolerance, or save one here."
    unexplained = replace(result, head="", also=(), rests_on=(), explains=(), causes=(), defined_in="")
    return replace(unexplained, verdict=Verdict.UNDECIDED, sentence=sentence)


def _capture_small(golden: Golden, run: Path) -> Path:
    """Run the script in the current directory under a small capture, and return `run`, whatever its exit code.

    Raises:
        StoreError: it recorded no step.
    """
    words = (*small_run_options(golden.steps), *golden.options, *golden.words)
    done = capture(run, Place(Path.cwd(), Path.cwd()), words)
    if done.steps:
        return run
    said = done.last_lines.rpartition(" / ")[2]
    raise StoreError(f"the script recorded nothing and ended with code {done.exit_code}: {said}")

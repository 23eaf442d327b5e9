"""The tool for notebooks and scripts: capture a block, open a run, compare two, or a model with a transformed one.

The command line runs a whole script as its author wrote it. A notebook has no script, only cells, and wants what
comes out as tables and pictures rather than as text. The names here are also had from the package itself
(`introspect_cli.recording`, `introspect_cli.open_run`, `introspect_cli.diff`), fetched when first asked for, so that
`import introspect_cli` stays cheap.

What captures is called `recording` there: `introspect_cli.capture` is the package that does the capturing, and one
name cannot be both without replacing a module by something else. `introspect_cli.api.capture` is the same function.
"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from introspect_cli.compare.result import DiffResult
    from introspect_cli.notebook import Comparison, RunView
    from introspect_cli.records import Site
    from introspect_cli.script.target import Target
    from introspect_cli.store.run_writer import Launch

_active: list[Path] = []
_SHOWN = 6
_LEVELS = ("module", "op")


def capture(model: Any, path: str | Path, **options: Any) -> AbstractContextManager[Path]:
    """Record what runs inside a `with` block.

    Everything that trains in this process meanwhile is recorded, loss modules and other models too; `model` is the
    one that gets its class's name (a second of the same class becomes `Net#2`).

    Args:
        model: the `nn.Module`; None where none exists yet.
        path: directory of the run to be made.
        options: those of `introspect capture`, by their long names with underscores: `record=["param", "grad"]`,
            `stats="mean,std"`, `steps="0:10,100::100"`, `save_tensors=["*.head"]`, `level="op"`, `force=True`. Nothing
            is said on stderr unless `quiet=False`.

    Returns:
        what a `with` takes; it gives the run's directory, and raises the errors below.

    Raises:
        UsageError: a name is unknown or for the command line alone, or a capture is already running.
        StoreError: the directory exists and `force` is not given, or cannot be made.
    """
    return capturing(model, path, options)


@contextmanager
def capturing(
    model: Any, path: str | Path, given: Mapping[str, Any], target: Target | None = None, launch: Launch | None = None
) -> Iterator[Path]:
    """Capture a block as `capture` does, with the options as a mapping; for callbacks of frameworks.

    An exception of the block is noted in the manifest, and comes out.

    Args:
        model: the `nn.Module`; None where none exists yet.
        path: directory of the run to be made.
        given: options of `introspect capture` by their long names, except output, compile, deterministic, seed and
            children.
        target: the script that this runs in, for the settings; None for a notebook, or a block of one.
        launch: this process's part in a distributed run; None to ask the environment.

    Raises:
        UsageError: an option is unknown or one of those excepted, or a capture is already running.
        StoreError: the directory exists and `force` is not given, or cannot be made.
    """
    from introspect_cli.capture.options import options_of
    from introspect_cli.capture.session import Session
    from introspect_cli.inspect.runs import chosen

    if _active:
        raise UsageError(f"a capture into {_active[0]} is already running: end it before you start another")
    for name in ("output", "compile", "deterministic", "seed", "children"):
        if name in given:
            raise UsageError(f"{name} is for `introspect capture`, which is there before the script")
    if given.get("against"):
        given = {**given, "against": chosen(given["against"])}
    session = Session(target, options_of({"quiet": True, **given, "output": Path(path)}), launch)
    _active.append(session.path)
    try:
        with session:
            session.start()
            session.adopt(model)
            yield session.path
    finally:
        _active.clear()
        session.print_last_words()


recording = capture
"""`capture` under the name that `introspect_cli` exports."""


def open_run(path: str | Path) -> RunView:
    """Open a run (a directory, pack or URL), or a checkpoint as one, to look at it as tables; `close` closes it.

    Raises:
        StoreError: there is none, it is damaged, or newer than this reader.
    """
    from introspect_cli.exchange.checkpoints import open_any
    from introspect_cli.notebook import RunView

    return RunView(open_any(path))


def diff(a: str | Path, b: str | Path, **options: Any) -> Comparison:
    """Compare two runs, two checkpoints, or a run with a checkpoint.

    Without a `limit` among the options, the text groups what follows from the first divergence.

    Args:
        a: path of the first.
        b: path of the second.
        options: fields of `introspect_cli.compare.result.DiffOptions` by name, and `noise`, paths of
            repeated runs.

    Raises:
        UsageError: an option is unknown or cannot be read, or selects nothing in either run.
        StoreError: a run cannot be read.
    """
    from introspect_cli.compare.checkpoints import as_moments
    from introspect_cli.compare.diff import compare_runs
    from introspect_cli.compare.result import DiffOptions
    from introspect_cli.exchange.checkpoints import opened, written
    from introspect_cli.notebook import Comparison
    from introspect_cli.selection import read_selection

    noise = options.pop("noise", ())
    names = {field.name for field in fields(DiffOptions)}
    for name in options:
        if name not in names:
            hint = did_you_mean(name, names) or f"; choose from {', '.join(sorted(names | {'noise'}))}"
            raise UsageError(f"diff takes no option {name!r}{hint}")
    given = {name: options.pop(name) for name in ("steps", "kinds", "modules", "ranks") if name in options}
    options |= vars(read_selection(**given))
    grouped = "limit" not in options
    with opened(a, b, *noise) as (run_a, run_b, *others):
        one, two = as_moments(run_a, run_b, written)
        options.setdefault("whole_step", grouped)
        return Comparison(compare_runs(one, two, DiffOptions(**options), others), grouped=grouped)


def compare_transformed(
    model: Any,
    transformed: Any,
    *inputs: Any,
    kwargs: dict[str, Any] | None = None,
    loss: Callable[[Any], Any] | None = None,
    backward: bool = True,
    level: str = "module",
    **options: Any,
) -> DiffResult:
    """Run a model and its transformed self on the same inputs and find where they first diverge.

    Each runs once, or twice where the transformed model hides some of the values. Both get copies of the inputs and
    the same random state; gradients, buffers and random states are left as they were.
    What only one of the two has is left out, and a note says so. A transformation that leaves no modules is compared at
    its boundary, unless `introspect_cli.capture.regions.attach.attach` was called on the model before.

    Args:
        model: the reference, a module.
        transformed: a module or callable that takes the same inputs.
        inputs: positional inputs of both.
        kwargs: keyword inputs of both.
        loss: makes a scalar of what a model gives; the sum over all floating point outputs where None.
        backward: whether gradients are compared, too.
        level: `module`, or `op` for every operator's results as well.
        options: fields of `introspect_cli.compare.result.DiffOptions` by name, such as `rtol`, `atol` and
            `limit`.

    Returns:
        what `introspect_cli.diff` gives for two runs: `verdict`, `sentence`, `first`, `divergences`, ...

    Raises:
        UsageError: the level is unknown, or nothing can be called.
        Exception: whatever either model raises.
    """
    if level not in _LEVELS:
        raise UsageError(f'unknown level "{level}": give one of {", ".join(_LEVELS)}')
    for what in (model, transformed):
        if not callable(what):
            raise UsageError(f"a {type(what).__name__} cannot be called: give a module or a function")
    from introspect_cli.capture.options import CaptureOptions
    from introspect_cli.capture.run_once import run_once
    from introspect_cli.compare.diff import compare_runs
    from introspect_cli.compare.result import DiffOptions
    from introspect_cli.compare.say import some
    from introspect_cli.records import Kind, Status
    from introspect_cli.store.run import open_run as opened

    counted = DiffOptions(**options)
    record = CaptureOptions().record

    def run(what: Any, path: Path, only: frozenset[Site] | None = None) -> frozenset[Site]:
        """Capture one pass of a model into a new run at `path`; returns the sites that were observed in step 0.

        Args:
            what: the model or function to run.
            path: directory of the run to be made.
            only: the sites to record; None for all.
        """
        asked = CaptureOptions(
            output=path,
            record=record | {Kind.OP_OUTPUT} if level == "op" else record,
            level=level,
            compile="keep",
            eval=True,
            env=False,
            packages=False,
            source=False,
            quiet=True,
        )
        run_once(what, name, inputs, kwargs or {}, asked, loss, backward=backward, only=only)
        with opened(path) as run:
            records = list(run.rank(0).records(0)) if 0 in run.rank(0) else []
        return frozenset(record.site for record in records if record.summary.status is not Status.NOT_OBSERVED)

    name = str(getattr(model, "original_name", None) or type(model).__name__)
    with tempfile.TemporaryDirectory(prefix="introspect-") as place:
        one, two = Path(place) / "model", Path(place) / "transformed"
        all_sites = run(model, one)
        sites = run(transformed, two, all_sites)
        lost = all_sites - sites
        if lost:
            # What the first run could not know: which sites the other has. Both again, with those alone.
            one, two = Path(place) / "model again", Path(place) / "transformed again"
            run(model, one, sites)
            run(transformed, two, sites)
        with opened(one) as a, opened(two) as b:
            result = compare_runs(a, b, counted)
    hidden = f"{len(lost)} values of {some(sorted({site.fqn for site in lost}), _SHOWN)}"
    notes = [f"Not compared, because the transformed model hides them: {hidden}."] if lost else []
    return replace(result, a="model", b="transformed", notes=(*result.notes, *notes))

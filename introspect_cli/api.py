"""The tool for notebooks and scripts: capture a block, open a run, compare two.

The command line runs a whole script as its author wrote it. A notebook has no script, only cells, and wants what
comes out as tables and pictures rather than as text. The names here are also had from the package itself
(`introspect_cli.recording`, `introspect_cli.open_run`, `introspect_cli.diff`), fetched when first asked for, so that
`import introspect_cli` stays cheap.

What captures is called `recording` there: `introspect_cli.capture` is the package that does the capturing, and one
name cannot be both without replacing a module by something else. `introspect_cli.api.capture` is the same function.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from introspect_cli.notebook import Comparison, RunView

_active: list[Path] = []


@contextmanager
def capture(
    model: Any,
    path: str | Path,
    *,
    record: Iterable[str] = ("default",),
    stats: Iterable[str] = ("default",),
    steps: str | None = None,
    modules: Iterable[str] = (),
    exclude: Iterable[str] = (),
    save_tensors: Iterable[str] = (),
    sketch: bool = True,
    force: bool = False,
    quiet: bool = True,
) -> Iterator[Path]:
    """Record what runs inside a `with` block.

    Everything that trains in this process meanwhile is recorded, loss modules and other models too; `model` is the
    one that gets its class's name (a second of the same class becomes `Net#2`).

    Args:
        model: the `nn.Module`; None where none exists yet.
        path: directory of the run to be made.
        record: kinds to record, as `--record` takes them.
        stats: statistics to keep, as `--stats` takes them.
        steps: schedule of steps, as `--steps` takes it; all where None.
        modules: globs over FQNs to record; all where empty.
        exclude: globs over FQNs not to record.
        save_tensors: globs over FQNs whose values are kept whole.
        sketch: whether to keep a sketch of each tensor.
        force: replace a run that is there.
        quiet: say nothing on stderr.

    Yields:
        the run's directory.

    Raises:
        UsageError: a name is unknown, or a capture is under way already.
        StoreError: the directory exists, or cannot be made.
    """
    from introspect_cli.capture.options import CaptureOptions, parse_kinds, parse_stats
    from introspect_cli.capture.session import Session
    from introspect_cli.script import Ending
    from introspect_cli.selection import Schedule

    if _active:
        raise UsageError(f"a capture is under way already, into {_active[0]}: end it before the next")
    options = CaptureOptions(
        output=Path(path),
        force=force,
        record=parse_kinds(record),
        stats=parse_stats(stats),
        sketch=sketch,
        modules=tuple(modules),
        exclude=tuple(exclude),
        schedule=Schedule() if steps is None else Schedule.parse(steps),
        save_tensors=tuple(save_tensors),
        quiet=quiet,
    )
    session = Session(None, options)
    _active.append(session.path)
    ending = Ending(0, "returned")
    try:
        session.start()
        session.adopt(model)
        yield session.path
    except BaseException as error:
        ending = Ending(1, "exception", f"{type(error).__name__}: {error}")
        raise
    finally:
        _active.clear()
        session.finish(ending)
        session.last_word()


recording = capture
"""The same function, under the name that the package itself has for it."""


def open_run(path: str | Path) -> RunView:
    """Open a run to look at it as tables.

    Raises:
        StoreError: there is none, it is damaged, or newer than this reader.
    """
    from introspect_cli.notebook import RunView
    from introspect_cli.store.reader import open_run as opened

    return RunView(opened(path))


def diff(a: str | Path, b: str | Path, **options: Any) -> Comparison:
    """Compare two runs.

    Args:
        a: path of the first run.
        b: path of the second run.
        options: fields of `introspect_cli.compare.options.DiffOptions` by name, and `noise`, paths of repeated runs.

    Raises:
        UsageError: an option is unknown.
        StoreError: a run cannot be read.
    """
    from introspect_cli.notebook import compare

    return compare(a, b, options)

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
    from collections.abc import Iterator, Mapping

    from introspect_cli.notebook import Comparison, RunView
    from introspect_cli.script import Target
    from introspect_cli.store.launch import Launch

_active: list[Path] = []


@contextmanager
def capture(model: Any, path: str | Path, **options: Any) -> Iterator[Path]:
    """Record what runs inside a `with` block.

    Everything that trains in this process meanwhile is recorded, loss modules and other models too; `model` is the
    one that gets its class's name (a second of the same class becomes `Net#2`).

    Args:
        model: the `nn.Module`; None where none exists yet.
        path: directory of the run to be made.
        options: those of `introspect capture`, by their long names with underscores: `record=["param", "grad"]`,
            `stats="mean,std"`, `steps="0:10,100::100"`, `save_tensors=["*.head"]`, `level="op"`, `force=True`. Nothing
            is said on stderr unless `quiet=False`.

    Yields:
        the run's directory.

    Raises:
        UsageError: a name is unknown, or a capture is under way already.
        StoreError: the directory exists, or cannot be made.
    """
    with capturing(model, path, options) as place:
        yield place


@contextmanager
def capturing(
    model: Any, path: str | Path, given: Mapping[str, Any], target: Target | None = None, launch: Launch | None = None
) -> Iterator[Path]:
    """The same, for callbacks.

    Args:
        model: as above.
        path: as above.
        given: the options.
        target: the script that this runs in, for the settings; None for a notebook, or a block of one.
        launch: this process's part in a distributed run; None to ask the environment.
    """
    from introspect_cli.capture.parse_options import options_of
    from introspect_cli.capture.session import Session
    from introspect_cli.script import Ending

    if _active:
        raise UsageError(f"a capture is under way already, into {_active[0]}: end it before the next")
    for name in ("output", "compile", "deterministic", "seed", "children"):
        if name in given:
            raise UsageError(f"{name} is for `introspect capture`, which is there before the script")
    session = Session(target, options_of({"quiet": True, **given, "output": Path(path)}), launch)
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

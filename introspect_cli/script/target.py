"""What is to be run: a script or a module, found before anything runs, and made ready to be `__main__`."""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

from introspect_cli.errors import UsageError
from introspect_cli.script.processes import described

COMPILED: dict[str, bytes] = {}
"""Bytes of each script as compiled: it may be a pipe, or be edited while it runs."""


@dataclass(frozen=True)
class Target:
    """What to run: a script (a file, directory or zip file) or a module, and its arguments.

    Attributes:
        script: the script; None for a module.
        module: the module.
        args: its arguments.
        launcher: the command that started it, after `-m` where that is a module; empty where none was followed.
        launched_in: the directory where that command ran.
    """

    script: str | None = None
    module: str | None = None
    args: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    launched_in: str = ""


def check(target: Target) -> None:
    """Check that the script or module exists and can be run, without running anything; of a module, its top package.

    Raises:
        UsageError: no such script or module, a directory without `__main__.py`, or a file that cannot be read.
    """
    if target.module is not None:
        _check_module(target.module)
        return
    script = target.script
    if not script:
        raise UsageError("nothing to run: give a script, or a module after -m")
    path = Path(script)
    if not os.path.exists(script):  # noqa: PTH110 - pathlib raises an error for a name that is too long
        raise UsageError(f"no such script: {script!r}; put introspect's options before the script")
    if path.is_dir() and not is_container(script):
        raise UsageError(f"{script!r} is a directory without __main__.py: name the script in it")
    if not os.access(script, os.R_OK):
        raise UsageError(f"{script!r} cannot be read: permission denied")


def is_container(script: str) -> bool:
    """Whether a path is a directory or zip file that python can run: one with a `__main__` in it."""
    if not (os.path.isdir(script) or os.path.isfile(script)):  # noqa: PTH112, PTH113 - a script of its own name
        return False
    import pkgutil

    finder = pkgutil.get_importer(_absolute(script))
    return finder is not None and finder.find_spec("__main__") is not None


def _check_module(module: str) -> None:
    """Check that the top-level package of a module can be found; nothing is imported.

    Raises:
        UsageError: it is not found.
    """
    import importlib.util

    top = module.partition(".")[0]  # finding a submodule would run its package
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        here = [] if _has_safe_path() else [os.getcwd()]  # noqa: PTH109 - an entry of sys.path is text
        spec = importlib.machinery.PathFinder.find_spec(top, [*here, *sys.path]) or importlib.util.find_spec(top)
    if spec is None or not top:
        raise UsageError(f"no module named {module!r}: -m looks in this directory and among installed packages")


def _has_safe_path() -> bool:
    """Whether python was told not to put the script's directory on `sys.path` (`-P`, `-I`)."""
    return bool(getattr(sys.flags, "safe_path", sys.flags.isolated))


def _absolute(script: str) -> str:
    """The working directory and a path joined, not normalised, as python does it; an absolute path as it is."""
    return os.path.join(os.getcwd(), script)  # noqa: PTH109, PTH118 - python does not normalise either


def fresh_main() -> ModuleType:
    """A new `__main__` module as the interpreter makes it, its names in the same order; it is not installed."""
    main = ModuleType("__main__")
    main.__loader__ = None
    if sys.version_info < (3, 14):
        vars(main)["__annotations__"] = {}
    vars(main)["__builtins__"] = builtins
    return main


def prepare(target: Target, *, contained: bool) -> None:
    """Set `sys.argv`, `sys.orig_argv` and `sys.path[0]` as python has them for the script or module.

    Where python was told not to put a directory there (`-P`), `sys.path` stays, but for a directory or zip file that is
    run. Modules that introspect has imported, and that `sys.path[0]` has a file for, are dropped from `sys.modules`.

    Args:
        target: what is to be run.
        contained: whether it is a script in a directory or zip file (`is_container`).
    """
    interpreter = described(sys.orig_argv).interpreter
    if target.module is not None:
        sys.argv = ["-m", *target.args]
        sys.orig_argv = [*interpreter, "-m", target.module, *target.args]
        first = os.getcwd()  # noqa: PTH109 - an entry of sys.path is text
    else:
        script = str(target.script)
        sys.argv = [script, *target.args]
        sys.orig_argv = [*interpreter, *sys.argv]
        first = _absolute(script) if contained else os.path.dirname(os.path.realpath(script))  # noqa: PTH120 - as above
    if not _has_safe_path():
        sys.path[0] = first
    elif contained:
        sys.path.insert(0, first)
    if sys.path[0] == first:
        _drop_shadowed_modules(first)


def _drop_shadowed_modules(first: str) -> None:
    """Drop modules from `sys.modules` that introspect imported and the script's directory has a file or package for.

    Their submodules are dropped, too. Python alone would import the script's. Code that has imported a dropped module
    goes on with it.

    Args:
        first: the directory, which is `sys.path[0]`.
    """
    names = list(sys.modules)
    ours = names.index(__name__.partition(".")[0])  # in the order in which they were imported
    before = {name.partition(".")[0] for name in names[: ours + 1]}
    for top in {name.partition(".")[0] for name in names[ours:]} - before - {"__main__"}:
        loaded = getattr(sys.modules.get(top), "__spec__", None)
        if loaded is None or not loaded.has_location:  # python looks at no path for what is built in
            continue
        beside = importlib.machinery.PathFinder.find_spec(top, [first])
        if beside is not None and beside.has_location and beside.origin != loaded.origin:
            for name in names[ours:]:
                if name.partition(".")[0] == top:
                    del sys.modules[name]


def load(script: str, main: ModuleType) -> CodeType:
    """Read and compile the script, and set `__loader__`, `__file__` and `__cached__` of `main`.

    The bytes of a source file are kept in `COMPILED`.

    Raises:
        Exception: whatever reading or compiling raises, such as OSError or SyntaxError.
    """
    path = _absolute(script)
    if path.endswith(".pyc"):
        sourceless = importlib.machinery.SourcelessFileLoader("__main__", path)
        main.__loader__ = sourceless
        code = sourceless.get_code("__main__")
        assert code is not None
    else:
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
        COMPILED[script] = data = Path(path).read_bytes()
        code = compile(data, path, "exec", dont_inherit=True)
    vars(main)["__file__"] = path
    vars(main)["__cached__"] = None
    return code

"""What python imports first in each process below a capture that follows: begin, and hand over to the project's own."""

from __future__ import annotations

import os
import sys


def _begin() -> None:
    """Take this directory off `sys.path`, import the project's own `sitecustomize` if there is one, call `child.begin`.

    Where introspect is not installed, the call is left out.
    """
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - as sys.path has it; pathlib costs its import
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != here]  # noqa: PTH100 - as above
    module = sys.modules.pop(__name__, None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401 - the project's own, which ours stood before
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if module is not None:
            sys.modules.setdefault(__name__, module)
    try:
        from introspect_cli.capture.follow.child import begin
    except ImportError:
        return  # another environment, without us; whoever started this tells
    begin()


_begin()

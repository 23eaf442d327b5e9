"""States of the generators that live in the interpreter, as bytes; nothing is drawn and torch is not needed."""

from __future__ import annotations

import random
import sys
from array import array


def python_state() -> bytes:
    """State of python's global generator."""
    version, words, gauss = random.getstate()
    return array("Q", words).tobytes() + repr((version, gauss)).encode()


def numpy_state() -> bytes | None:
    """State of numpy's global generator, None while the script has not loaded it."""
    if "numpy" not in sys.modules:
        return None
    import numpy.random as numpy_random

    state = numpy_random.get_state(legacy=False)  # noqa: NPY002 - the global generator is what scripts seed
    inner = state["state"]
    rest = (state["bit_generator"], inner.get("pos"), state.get("has_gauss"), state.get("gauss"))
    return bytes(inner["key"].tobytes()) + repr(rest).encode()

"""Random generators and determinism: what a process starts from, and what the user asks to be changed about it.

The states of the generators that live in the interpreter are had as bytes; nothing is drawn and torch is not needed.
`--seed` and `--deterministic` are applied to each library when it has just been imported, so that the script may still
override them.
"""

from __future__ import annotations

import os
import random
import sys
from array import array

_getstate = random.getstate  # a script may put its own generator in the place of python's, with code of its own
PYTHON: object = getattr(_getstate, "__self__", None)
"""Python's global generator."""


def python_state() -> bytes:
    """State of python's global generator."""
    version, words, gauss = _getstate()
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


def numpy_owner() -> object:
    """Numpy's global generator, None while the script has not loaded it or where it has put in something else."""
    return getattr(getattr(sys.modules.get("numpy.random"), "get_state", None), "__self__", None)


def seed_python(seed: int) -> None:
    """Seed python's generator."""
    random.seed(seed)


def seed_numpy(seed: int) -> None:
    """Seed numpy's generator, which takes 32 bits."""
    sys.modules["numpy"].random.seed(seed % 2**32)


def seed_torch(seed: int) -> None:
    """Seed torch's generators; DataLoader workers and generators draw their seeds from them."""
    import torch

    torch.manual_seed(seed)


def environment() -> None:
    """Ask cuBLAS for a workspace that makes its results repeatable; it reads this when it starts."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def torch_flags() -> None:
    """Deterministic algorithms, no autotuning, no TF32."""
    import torch

    # Warn instead of raising: an operator without a deterministic form should not end the run.
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False

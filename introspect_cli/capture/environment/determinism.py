"""`--seed` and `--deterministic`: what the user asks to be changed about the run, and nothing else.

Each part is applied when the library it concerns has just been imported, so that the script may still override it.
"""

from __future__ import annotations

import os
import random
import sys


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

"""Generators that a script makes itself, as they are when the first step begins: by variable, seed and state.

Nobody can see what draws from them without slowing every draw. But what they hold in the end tells whether two runs
seeded them alike and drew equally often.
"""

from __future__ import annotations

import random
import sys
from hashlib import blake2b
from typing import Any

import torch

from introspect_cli.capture.variables import held, script_frames
from introspect_cli.tensors.views import unobserved
from introspect_cli.texts import clean

_MOST = 100


def script_generators() -> list[str]:
    """A line of words for each: `torch.Generator 11 d46858fc895baa5f g`, its class, seed, state and variable."""
    numpy: Any = sys.modules.get("numpy.random")
    kinds = (torch.Generator, random.Random, *((numpy.Generator, numpy.RandomState) if numpy is not None else ()))
    found: dict[int, str] = {}
    for name, value in held(kinds, script_frames()):
        if id(value) in found or len(found) >= _MOST or value is torch.default_generator:
            continue
        seed, state = _seed_and_state(value)
        if state:
            label = "torch.Generator" if isinstance(value, torch.Generator) else _label(value)
            found[id(value)] = f"{label} {seed} {state} {clean(name, 80).replace(' ', '_')}"
    return list(found.values())


def state_of(generator: object) -> int:
    """The state of a generator of torch's on the CPU, in 64 bits; 0 of any other."""
    return int(_seed_and_state(generator)[1] or "0", 16) if isinstance(generator, torch.Generator) else 0


def _label(value: object) -> str:
    home = type(value).__module__.partition(".")[0]
    return f"{'numpy.random' if home == 'numpy' else 'random'}.{type(value).__name__}"


def _seed_and_state(value: Any) -> tuple[str, str]:
    """The seed, `-` where it does not tell, and a digest of the state, "" where that costs or runs code of others."""
    if isinstance(value, torch.Generator):
        if value.device.type != "cpu":
            return "-", ""
        with unobserved():
            return str(value.initial_seed()), _digest(value.get_state().numpy().tobytes())
    if type(value) is random.Random:
        return "-", _digest(repr(value.getstate()).encode())
    if type(value).__module__.startswith("numpy."):
        kept = value.bit_generator.state if hasattr(value, "bit_generator") else value.get_state(legacy=False)
        return "-", _digest(repr(kept).encode())
    return "-", ""


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()

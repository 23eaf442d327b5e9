"""Whether the default random generators have moved, looked at where they lie.

Who draws random numbers, and in which state the generator is then, tells a module that was given other numbers from one
that computes differently. Asking for a state copies five kilobytes, too much for every call of a module. The generators
of the CPU are Mersenne twisters: 624 words and a position. So their place in memory is found once, by looking for the
words that the generator itself tells, and the compiled kernels read it there. One that is not found is not watched.
"""

from __future__ import annotations

import ctypes
import random
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from introspect_cli.tensors import kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_WORDS = 624
_BYTES = 4 * _WORDS
_BEFORE, _BEHIND = 20, 32  # bytes of a generator of torch's beside its words: seed and position, numbers to spare
_HEADER = 512  # bytes of an object before its words, at most

NEVER: Callable[[], object] = [].copy
"""Says of no generator that it has moved: false, without a frame of Python."""


class Place(NamedTuple):
    """Addresses of a Mersenne twister's words, position, spare normal number and the spare's flag; 0 for none."""

    words: int
    position: int
    spare: int = 0
    flag: int = 0


class Generators:
    """Default generators that can be watched, with 64-bit states.

    Attributes:
        names: of those that are watched.
    """

    def __init__(self) -> None:
        """Find where torch's and python's generators lie in memory; nothing is watched before `watch`."""
        self.names: list[str] = []
        self._states: list[int] = []
        self._devices: dict[str, torch.Generator] = {}
        self._device_states: dict[str, tuple[int, int]] = {}
        self._compiled = kernels.KERNELS
        self.unwatched: list[str] = []
        self.moved = NEVER
        # Found before the script runs: inside its function transforms, no state can be read.
        self._places = {"torch": _find_torch(), "python": _find_python()}

    def watch(self, devices: Sequence[tuple[str, torch.Generator]]) -> None:
        """Read the states of all generators, which later ones are compared with, and watch those that appeared since.

        Sets `moved` to the function that says whether any has moved after this. Those whose memory is not found are
        added to `unwatched`.

        Args:
            devices: names and default generators of accelerators in use.
        """
        for name in ("torch", "numpy", "python"):
            if name not in self.names and name not in self.unwatched and (name != "numpy" or "numpy" in sys.modules):
                place = _find_numpy() if name == "numpy" else self._places[name]
                if place is None:
                    self.unwatched.append(name)
                    continue
                self._compiled.watch_generator(len(self.names), *place)
                self.names.append(name)
                self._states.append(0)
        self._states = list(map(self._compiled.generator_state, range(len(self.names))))
        if devices or self._devices:
            self._devices = {name: generator for name, generator in devices if hasattr(generator, "get_offset")}
            self.unwatched += [name for name, _ in devices if name not in self._devices and name not in self.unwatched]
            self._device_states = {
                name: state for name in self._devices if (state := self._device_state(name)) is not None
            }
        self.moved = self._has_any_moved if self._devices else self._compiled.generators_moved

    @property
    def is_complete(self) -> bool:
        """Whether any generator is watched, and no default generator in use was left unwatched."""
        return bool(self.names) and not self.unwatched

    @property
    def states(self) -> dict[str, int]:
        """State of each by name, accelerators left out, as they were when they were last read."""
        return dict(zip(self.names, self._states, strict=True))

    def take_moved(self) -> list[tuple[str, int]]:
        """Name and 64-bit state before the draw of each generator that has moved since it was last read.

        In the order of `names`, then accelerators, whose 64 bits are a hash of seed and offset. Reads their present
        states, so that a second call returns [].
        """
        moved = []
        mask = self._compiled.generators_moved()
        for number, name in enumerate(self.names):
            if mask >> number & 1:
                known, self._states[number] = self._states[number], self._compiled.generator_state(number)
                moved.append((name, known))
        for name in self._devices:
            now = self._device_state(name)
            before = self._device_states.get(name)
            if now is not None and now != before:
                self._device_states[name] = now
                if before is not None:
                    moved.append((name, hash(before) & (1 << 64) - 1))
        return moved

    def _has_any_moved(self) -> bool:
        """Whether any watched generator has moved since it was last read, accelerators included."""
        if self._compiled.generators_moved():
            return True
        states = {name: self._device_state(name) for name in self._devices}
        return any(state is not None and state != self._device_states.get(name) for name, state in states.items())

    def _device_state(self, name: str) -> tuple[int, int] | None:
        """Seed and offset of an accelerator's generator; None where torch refuses, as while a graph is captured."""
        generator: Any = self._devices[name]
        try:
            return generator.initial_seed(), generator.get_offset()
        except RuntimeError:
            return None


def _find_torch() -> Place | None:
    """Place of torch's default CPU generator; None if it is not found.

    It is searched for in the memory of another generator, made for this, by the words of that one's state; the default
    one is not drawn from. Spare and flag are 0 where only they are not found.
    """
    sample: Any = torch.Generator()
    sample.manual_seed(1)
    address = getattr(sample, "_cdata", 0)
    default = getattr(torch.default_generator, "_cdata", 0)
    state = sample.get_state().numpy()
    words = state[24 : 24 + 8 * _WORDS].view("u8").astype("u4")
    if not address or not default or type(sample) is not type(torch.default_generator):
        return None
    start = ctypes.string_at(address, _HEADER).find(words[:8].tobytes())
    if start < _BEFORE or ctypes.string_at(address + start, _BYTES) != words.tobytes():
        return None
    position = start - 12
    tail = start + _BYTES
    before = ctypes.string_at(address + tail, _BEHIND)
    if _read_u4(address + position) != 1:
        return None
    torch.randn(1, generator=sample, dtype=torch.float64, device="cpu")
    after = ctypes.string_at(address + tail, _BEHIND)
    if not 1 <= _read_u4(address + position) < _WORDS:
        return None
    # The second normal number, as a double, and behind it whether it is there.
    flags = [at for at in range(8, 32) if (before[at], after[at]) == (0, 1) and any(after[at - 8 : at])]
    spare, flag = (default + tail + flags[-1] - 8, default + tail + flags[-1]) if flags else (0, 0)
    return Place(default + start, default + position, spare, flag)


def _find_numpy() -> Place | None:
    """Place of numpy's global generator, without its spare; None if it is no MT19937, or memory and state disagree."""
    import numpy as np

    asked: Any = getattr(np.random, "get_bit_generator", None)  # numpy 1.24
    generator: Any = asked() if asked is not None else None
    if type(generator).__name__ != "MT19937":
        return None
    state = generator.state["state"]
    address = int(generator.ctypes.state_address)
    agrees = ctypes.string_at(address, _BYTES) == state["key"].astype("u4").tobytes()
    return Place(address, address + _BYTES) if agrees and _read_u4(address + _BYTES) == state["pos"] else None


def _find_python() -> Place | None:
    """Place of python's global generator, without its spare; None if the script replaced it, or it is not found."""
    watched = getattr(random, "_inst", None)
    if type(watched) is not random.Random:
        return None
    size = random.Random.__basicsize__
    *words, position = watched.getstate()[1]
    words_in_memory = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    start = ctypes.string_at(id(watched), size).find(words_in_memory)
    return (
        Place(id(watched) + start, id(watched) + start - 4)
        if start >= 4 and _read_u4(id(watched) + start - 4) == position
        else None
    )


def _read_u4(address: int) -> int:
    """Read the 32-bit unsigned integer at an address."""
    return ctypes.c_uint32.from_address(address).value

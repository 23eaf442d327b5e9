"""Whole tensors of the last steps, held in memory and written only when something happens.

A run of days cannot store every tensor, and nobody repeats it to see the elements of one. So each step's tensors are
copied as they are recorded, the last steps' copies are held, and a divergence from a reference or a NaN writes them
beside the records that name them. A comparison may answer some steps late: a step whose digest is not the reference's
has its tensors, and those of the steps before it, set aside until the answer comes.

What it takes is bounded before training begins. The bound is shared out among the steps that may be there at once, so
what does not fit is the same in every step.
"""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch

from introspect_cli.capture.recording.step_block import save_tensor
from introspect_cli.errors import belongs_to_script, scarcity
from introspect_cli.machine import free_memory
from introspect_cli.tensors.special import PLAIN, is_wrapped
from introspect_cli.tensors.views import in_memory
from introspect_cli.texts import count, human_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from introspect_cli.capture.options.capture_options import CaptureOptions
    from introspect_cli.records import Site
    from introspect_cli.store.run_writer import Launch, StoreWriter

_MADE = {"divergence": "a divergence", "nan": "a NaN or an infinity"}


class WholeStep(NamedTuple):
    """Whole tensors of a step by checksum."""

    step: int
    tensors: Mapping[int, torch.Tensor]


class BlackBox:
    """Holds the whole tensors of the last steps; the recorder's lock is held around every call.

    Attributes:
        open: whether anything can still make it write what it holds.
        written: what it wrote, for the manifest.
        stored: checksums of that, by step.
    """

    def __init__(
        self,
        options: CaptureOptions,
        launch: Launch | None,
        store: StoreWriter,
        digests: Mapping[int, bytes] | None,
        say: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        """Start with no tensor held; rank 0 says how much memory it may take.

        Args:
            options: of the capture, with `keep_around`.
            launch: this process's part in a distributed run; the ranks of a machine share a quarter of its free memory.
            store: where tensors go.
            digests: of the reference's steps, {} where they cannot be read; None without a reference, and then only a
                NaN has tensors written.
            say: prints a sentence.
            note: keeps a sentence for the manifest, too.
        """
        assert options.keep_around is not None
        steps, local = options.keep_around, os.environ.get("LOCAL_WORLD_SIZE", "")
        ranks = int(local) if local.isdecimal() and int(local) else 1 if launch is None else launch.world_size
        room = free_memory() // 4 // ranks
        if launch is None or not launch.rank:
            held = f"whole tensors of the last {count(steps, 'step')} are held"
            say(f"{held}, in {human_size(room)} of memory at most (a quarter of what is free)")
        self.open = True
        self.written: list[dict[str, object]] = []
        self.stored: dict[int, frozenset[int]] = {}
        self._steps: deque[WholeStep] = deque(maxlen=steps)
        self._aside: list[WholeStep] = []
        # Held, set aside, under way, and ended while a device computes.
        self._share = room // (2 * steps + 2 if digests else steps + 2)
        self._store = store
        self._digests = digests or {}
        self._waits = {"nan"} if digests is None else {"nan", "divergence"}
        self._say, self._note = say, note
        self._taken = 0
        self._left: Site | None = None

    def reserve(self, site: Site, value: torch.Tensor) -> bool:
        """Whether a value is to be copied; if so its size is taken from the step's share of memory.

        False once closed and for tensors that are not plain and strided; also where the share is too small for it or
        the tensor vastly expanded: of these two cases the first site in the run is noted.
        """
        if not self.open or type(value) not in PLAIN or is_wrapped(value):
            return False
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            return False
        size = _size(value)
        if in_memory(value.shape, value.stride()) is None and self._taken + size <= self._share:
            self._taken += size
            return True
        if self._left is None:
            self._left = site
            self._note(
                f"{site.kind.value} of {site.fqn}, and maybe more, is not held whole: there are "
                f"{human_size(self._share)} for a step"
            )
        return False

    def give_up(self, error: Exception) -> None:
        """Drop all that is held and hold nothing more, with a note, after an error in a copy or a write.

        Raises:
            Exception: `error` itself, with nothing dropped, where it is the script's own.
        """
        if belongs_to_script(error):
            raise error
        self._close()
        self._note(f"whole tensors are no longer held (--keep-around): {scarcity(error) or error}")

    def begin_step(self) -> None:
        """Give the next step its full share of memory."""
        self._taken = 0

    def clear(self) -> None:
        """Drop all tensors that are held or set aside."""
        self._steps.clear()
        self._aside = []
        self._taken = 0

    def add(self, step: int, tensors: Mapping[int, torch.Tensor], digest: bytes, *, not_finite: bool) -> None:
        """Hold the copies of a step that was written, and drop the oldest step's if there are more than `keep_around`.

        The first step that is not finite has all held steps written. A step whose digest is not the reference's has all
        held steps set aside, unless some are already, until the comparison answers. Nothing once closed.

        Args:
            step: its number.
            tensors: copies by checksum.
            digest: of the step's records.
            not_finite: whether it has a NaN, or a loss or parameter with an infinity.
        """
        if not self.open:
            return
        before = {checksum: tensor for held in self._steps for checksum, tensor in held.tensors.items()}
        tensors = {checksum: before.get(checksum, tensor) for checksum, tensor in tensors.items()}
        self._steps.append(WholeStep(step, tensors))  # what did not change since the step before is held once
        if self._digests.get(step, digest) != digest and not self._aside:
            self._aside = list(self._steps)
        if not_finite and "nan" in self._waits:
            self._write("nan", list(self._steps), f"at step {step}")

    def drop_agreed(self, step: int) -> None:
        """Drop the steps set aside if the runs agree up to the last of these."""
        if self._aside and self._aside[-1].step <= step:
            self._aside = []

    def write_divergence(self, step: int | None) -> None:
        """Write the held tensors because the runs diverge; at the first call alone.

        The steps set aside are written if `step` is among them, else all steps held now.

        Args:
            step: at which they diverge; None where it is not one step's.
        """
        if "divergence" not in self._waits:
            return
        rolling = list(self._steps)
        near = [held for held in (self._aside, rolling) if step in {one.step for one in held}]
        chosen = near[0] if near else rolling
        self._aside, self._digests = [], {}
        self._write("divergence", chosen, "" if step is None else f"at step {step}")

    def _write(self, why: str, steps: list[WholeStep], where: str) -> None:
        """Write steps' tensors, each once, note them in `written` and `stored`, and say so, unless there are none.

        This reason is not waited for any more; when none is left to wait for, the box is closed. An error closes it
        too, with a note.

        Args:
            why: `nan` or `divergence`.
            steps: whose tensors.
            where: for the sentence; "" for no place.
        """
        self._waits.discard(why)
        tensors = {checksum: tensor for held in steps for checksum, tensor in held.tensors.items()}
        try:
            for checksum, tensor in tensors.items():
                save_tensor(self._store, checksum, tensor)
        except Exception as error:  # a disk that is full costs the tensors, and not the run
            self.give_up(error)
            return
        self.stored |= {held.step: frozenset(held.tensors) for held in steps}
        numbers, size = [held.step for held in steps], sum(map(_size, tensors.values()))
        if tensors:
            self.written.append({"why": why, "steps": numbers, "tensors": len(tensors), "bytes": size})
            self._say(
                f"{_MADE[why]} {where}: {count(len(tensors), 'whole tensor')} of "
                f"step{'s' * (len(numbers) > 1)} {' and '.join(map(str, numbers))} written ({human_size(size)})"
            )
        if not self._waits:
            self._close()

    def _close(self) -> None:
        """Drop what is held, and hold nothing more."""
        self.open = False
        self.clear()


def _size(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()

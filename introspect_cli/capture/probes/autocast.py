"""In which dtypes autocast has the script compute: the numbers of a capture without outputs do not say.

A gradient or a parameter in float32 that was computed in bfloat16 is rounded as bfloat16 is. Where outputs are recorded
they tell. Where they are not, what autocast was asked for tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from introspect_cli.capture.probes.base import GuardedProbe

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.capture.context import Context


class AutocastProbe(GuardedProbe):
    """Watches autocast being entered.

    Attributes:
        changed: whether `document` is another than when it was last written.
    """

    name = "autocast"
    lost = "what autocast computes in is"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._entered_with: list[str] = []
        self.changed = True

    def install(self) -> None:
        """Begin to watch."""
        self._patches.watch(torch.autocast, "__enter__", self._guarded, self._entered)
        super().install()

    @property
    def document(self) -> dict[str, str]:
        """What it was on with: `{"autocast": "cpu bfloat16"}`, several separated by commas; `off` for nothing."""
        return {"autocast": ", ".join(self._entered_with) or "off"}

    def _entered(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Callable[[Any], None]:
        return lambda _result: self._look(args[0].device)

    def _look(self, device: str) -> None:
        if torch.is_autocast_enabled(device):
            entered = f"{device} {str(torch.get_autocast_dtype(device)).removeprefix('torch.')}"
            if entered not in self._entered_with:
                self._entered_with.append(entered)
                self.changed = True

"""Where what is tapped goes, while something captures.

Apart from the operators, so that a capture can be ready to take what they see without registering them: most scripts
never meet them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

GRADIENT = "gradient of "
"""How the site of a gradient begins; the rest names the value it is the gradient of."""


class Sink:
    """What takes a tensor and the text of its tap; None while nothing captures."""

    take: Callable[[Tensor, str], None] | None = None

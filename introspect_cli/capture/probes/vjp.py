"""Between any two values of a step: what a gradient at one becomes at the other.

A gradient recorded in the backward pass is that of the loss. To ask how one intermediate depends on another, the
vector-Jacobian product with ones is computed on the script's own graph the moment the later value is there, and the
graph is kept for the script to go on with. The Frobenius norm of the Jacobian follows from random vectors:
E |v^T J|^2 = |J|_F^2 for v with independent entries of mean 0 and variance 1 (Hutchinson's estimator; here signs).
Nothing is accumulated into `.grad`, and signs are drawn from a generator of our own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.records import Kind, Phase, Site, SiteInfo

if TYPE_CHECKING:
    from introspect_cli.capture.context import Context
    from introspect_cli.capture.naming.states import ModuleState
    from introspect_cli.capture.options.parse import Pair
    from introspect_cli.capture.probes.modules import ModuleProbe

_SEED = 20260


class VjpProbe(GuardedProbe):
    """Records vector-Jacobian products and Jacobian norms of pairs of values."""

    name = "vjp"
    lost = "vector-Jacobian products are"

    def __init__(self, context: Context, modules: ModuleProbe, pairs: tuple[Pair, ...], probes: int) -> None:
        super().__init__(context)
        self._modules = modules
        self._pairs = pairs
        self._probes = probes
        self._earlier: dict[Pair, torch.Tensor] = {}

    def install(self) -> None:
        """Listen for values."""
        self._modules.values.listen(self._value)
        super().install()

    def remove(self) -> None:
        """Stop, and drop the step's values."""
        super().remove()
        self._earlier.clear()

    def on_tick(self) -> None:
        """Drop the step's values."""
        self._earlier.clear()

    def _value(self, state: ModuleState, kind: Kind, path: str, value: torch.Tensor) -> None:
        """Pass on a tensor that requires gradients."""
        if self._guarded.on and value.requires_grad and torch.is_grad_enabled():
            with self._guarded:
                self._passing(state, kind, path, value)

    def _passing(self, state: ModuleState, kind: Kind, path: str, value: torch.Tensor) -> None:
        """Keep the earlier value of a pair, and compute the product when the later one comes."""
        for pair in self._pairs:
            if pair.later.fits(state.fqn, kind, path) and pair in self._earlier:
                # The earlier value is let go of at once: held on to, its graph would outlive the step.
                self._between(pair, value, self._earlier.pop(pair), state)
            if pair.earlier.fits(state.fqn, kind, path):
                self._earlier[pair] = value

    def _between(self, pair: Pair, later: torch.Tensor, earlier: torch.Tensor, state: ModuleState) -> None:
        """Record the product or norm between two values; a gap where there is no dependence or no graph."""
        call = self._context.count(self, pair)
        what = "jacobian_norm" if pair.norm else "vjp"

        def site(suffix: str = "") -> int:
            place = Site(Phase.FORWARD, Kind.OP_OUTPUT, state.fqn, call, f"{what}({pair.text}){suffix}")
            return self._recorder.site(place, SiteInfo(state.module_class, what))

        recorder = self._recorder
        recorder.wanted = False  # introspect's hooks on the way are not to record this pass
        try:
            if pair.norm:
                norm, error = self._norm(later, earlier)
            else:
                product = _product(later, earlier, torch.ones_like(later))
        except RuntimeError as error_of_graph:
            recorder.wanted = True
            recorder.gap(site(), f"the graph gives no derivative: {error_of_graph}")
            return
        finally:
            recorder.wanted = True
        if pair.norm:
            recorder.emit(site(), norm)
            recorder.emit(site(" standard error"), error)
        elif product is None:
            recorder.gap(site(), "the output does not depend on the input")
        else:
            recorder.emit(site(), product)

    def _norm(self, later: torch.Tensor, earlier: torch.Tensor) -> tuple[float, float]:
        """Frobenius norm of a Jacobian and its standard error, by random signs.

        With squares s_i = |v_i^T J|^2 the norm is sqrt(mean s), and its standard error, to first order, that of the
        mean over 2 sqrt(mean s).
        """
        generator = torch.Generator().manual_seed(_SEED + self._recorder.step)
        squares = []
        for _ in range(self._probes):
            signs = torch.randint(0, 2, later.shape, generator=generator).mul_(2).sub_(1).to(later)
            product = _product(later, earlier, signs)
            squares.append(0.0 if product is None else float(product.detach().double().square().sum()))
        mean = sum(squares) / len(squares)
        spread = math.sqrt(sum((square - mean) ** 2 for square in squares) / max(len(squares) - 1, 1))
        norm = math.sqrt(mean)
        return norm, spread / math.sqrt(len(squares)) / (2 * norm) if norm else 0.0


def _product(later: torch.Tensor, earlier: torch.Tensor, vector: torch.Tensor) -> torch.Tensor | None:
    """The vector-Jacobian product, None where the output does not depend on the input."""
    gradients: tuple[torch.Tensor | None, ...]
    gradients = torch.autograd.grad(later, earlier, vector, retain_graph=True, allow_unused=True)
    return gradients[0]

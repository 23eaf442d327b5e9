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

from introspect_cli.capture.options import parse_pairs
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.capture.probes.modules import ModuleProbe
from introspect_cli.records import Kind, Phase, Site, SiteInfo

if TYPE_CHECKING:
    from introspect_cli.capture.context import Context
    from introspect_cli.capture.naming import ModuleState
    from introspect_cli.capture.options import Pair

_SEED = 20260


class VjpProbe(GuardedProbe):
    """Records vector-Jacobian products and Jacobian norms of pairs of values."""

    name = "vjp"
    lost = "vector-Jacobian products are"

    def __init__(self, context: Context) -> None:
        """Listen to nothing before `install`."""
        super().__init__(context)
        options = context.options
        self._pairs = parse_pairs(options.vjp, options.jacobian_norm)
        self._probes = options.probes  # random vectors that estimate a norm
        self._earlier: dict[Pair, torch.Tensor] = {}
        self._patches.undo_by(self._earlier.clear)

    def install(self) -> None:
        """Hear of all inputs and outputs of modules."""
        self._context.probe(ModuleProbe).values.listen(self._hear_value)
        super().install()

    def on_tick(self) -> None:
        """As a step ends, drop the values that wait for the later one of their pair."""
        self._earlier.clear()

    def _hear_value(self, state: ModuleState, kind: Kind, path: str, value: torch.Tensor) -> None:
        """Keep a value that is the earlier one of a pair, the last such; at the later one, record the pair and drop it.

        Nothing for a value that requires no gradient, and without gradients.

        Args:
            state: of the module.
            kind: INPUT or OUTPUT.
            path: where among inputs or outputs the value is.
            value: the tensor.
        """
        if not (self._guarded.on and value.requires_grad and torch.is_grad_enabled()):
            return
        with self._guarded:
            for pair in self._pairs:
                if pair.later.fits(state.fqn, kind, path) and pair in self._earlier:
                    # The earlier value is let go of at once: held on to, its graph would outlive the step.
                    self._record_pair(pair, value, self._earlier.pop(pair), state)
                if pair.earlier.fits(state.fqn, kind, path):
                    self._earlier[pair] = value

    def _record_pair(self, pair: Pair, later: torch.Tensor, earlier: torch.Tensor, state: ModuleState) -> None:
        """Record the product of a pair, or the norm with its standard error, under the module of the later value.

        A gap where autograd gives no derivative, or the product where the later value does not depend on the earlier
        one: a norm is 0 then. Nothing else is recorded meanwhile.

        Args:
            pair: that both values belong to.
            later: the value whose Jacobian it is.
            earlier: the value that it is with respect to.
            state: of the module that made the later one.
        """
        call, recorder = self._context.count(self, pair), self._recorder
        what = "jacobian_norm" if pair.norm else "vjp"
        path, info = f"{what}({pair.text})", SiteInfo(state.module_class, what)
        recorder.wanted = False  # introspect's hooks on the way are not to record this pass
        found: list[object] | str = "the output does not depend on the input"
        try:
            if pair.norm:
                found = [*self._norm(later, earlier)]
            elif (product := _product(later, earlier, torch.ones_like(later))) is not None:
                found = [product]
        except RuntimeError as error:
            found = f"the graph gives no derivative: {error}"
        finally:
            recorder.wanted = True
        if isinstance(found, str):
            recorder.gap(recorder.site(Site(Phase.FORWARD, Kind.OP_OUTPUT, state.fqn, call, path), info), found)
        else:
            values = list(zip((path, f"{path} standard error"), found, strict=False))
            self._emit(Phase.FORWARD, Kind.OP_OUTPUT, state.fqn, values, call, info)

    def _norm(self, later: torch.Tensor, earlier: torch.Tensor) -> tuple[float, float]:
        """Frobenius norm of a Jacobian and its standard error, by random signs.

        With squares s_i = |v_i^T J|^2 the norm is sqrt(mean s), and its standard error, to first order, that of the
        mean over 2 sqrt(mean s); 0 for a norm of 0 or a single vector. The signs are the same in each run's same step.
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
    """The vector-Jacobian product `vector^T d(later)/d(earlier)`; None where there is no dependence.

    Keeps the graph.
    """
    gradients: tuple[torch.Tensor | None, ...]
    gradients = torch.autograd.grad(later, earlier, vector, retain_graph=True, allow_unused=True)
    return gradients[0]

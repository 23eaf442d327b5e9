"""An operator's result differs, though nothing recorded before it does: operators, kernels, memory formats."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Final

from introspect_cli.compare.reasons.base import KERNEL_WEIGHTS, Reason
from introspect_cli.compare.settings.differences import unequal
from introspect_cli.compare.terms.names import owner_of
from introspect_cli.compare.terms.sites import KINDS
from introspect_cli.compare.terms.words import although, how_far, what
from introspect_cli.records import Kind, Phase, Status

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.compare.terms.result import Divergence
    from introspect_cli.compare.terms.table import Table

_LISTED: Final = (
    r"^aten\.(index_add_?|index_copy_?|_?index_put(_impl)?_?|put_?|histc|bincount|kthvalue|median|nanmedian"
    r"|scatter_?|scatter_add_?|scatter_reduce_?|cumsum_?|nll_loss2d_(forward|backward)|_?ctc_loss_backward"
    r"|max_unpool[23]d|fractional_max_pool[23]d_backward|_adaptive_avg_pool[23]d_backward"
    r"|adaptive_max_pool[23]d_backward|avg_pool3d_backward|max_pool3d_with_indices_backward"
    r"|upsample_(linear1d|bilinear2d|bicubic2d|trilinear3d)_backward|reflection_pad[123]d_backward"
    r"|replication_pad[123]d_backward|grid_sampler_[23]d_backward|_embedding_bag_backward"
    r"|_embedding_bag_dense_backward|(cudnn_)?convolution(_backward)?)\b"
)
"""What `torch.use_deterministic_algorithms` lists."""
_MOST = 3
_GPU: Final = re.compile(r"^cuda\b")
"""ROCm devices are called so as well."""


class Operator(Reason):
    """An operator whose inputs are equal gives another result."""

    word = "op"
    place = "this operator"
    kinds = frozenset({Kind.OP_OUTPUT})
    weights: ClassVar = KERNEL_WEIGHTS

    def sentence(self, scene: Scene) -> str:
        """Where in the user's code it ran."""
        first = scene.first
        line = f", run at {first.source}," if first.source else ""
        text = f"{what(first.site)}{line} differs{how_far(first)}{although(scene.cause.evidence[:1])}{scene.scaled};"
        after = nondeterministic(first)
        options = argument_changes(scene)
        if options:
            when = "is" if scene.is_first_step else "was first"
            return f"{text} it {when} called with {'; '.join(options)}.{after}"
        if first.site.phase is Phase.BACKWARD:
            return f"{text} it is computed in a different way, or its forward operator has different options.{after}"
        formats = memory_formats(scene)
        kernel = f"; {' and '.join(formats[:2])}, which may choose another kernel" if formats else ""
        return f"{text} it has different options or a different kernel{kernel}.{after}{scene.rounding_words()}"


def argument_changes(scene: Scene) -> list[str]:
    """Arguments of the operator that differ, as both runs noted them where it ran first: `p 0.1 in a and 0.2 in b`."""
    site = scene.site
    key = f"{site.phase.value} {site.fqn} {site.call} {site.path.partition('[')[0]}"
    a, b = (settings.document("operators").get(key) for settings in scene.documents)
    if not (isinstance(a, Mapping) and isinstance(b, Mapping)):
        return []
    names = [name for name, _, _ in unequal(a, b)][:_MOST]
    return [f"{name} {a.get(name, 'left out')} in a and {b.get(name, 'left out')} in b" for name in names]


def nondeterministic(divergence: Divergence) -> str:
    """A sentence if the diverging operator is listed and ran on a GPU in both runs; "" otherwise.

    Listed are operators that add up with atomics, whose order is nobody's choice, or let a library choose among
    kernels. Reading a run needs no torch, so its list is kept here by operator names.
    """
    a, b = divergence.a, divergence.b
    if a is None or b is None or not (_GPU.match(a.layout.device) and _GPU.match(b.layout.device)):
        return ""
    if not re.match(_LISTED, divergence.site.path):
        return ""
    return " On a GPU its result may differ each time: torch.use_deterministic_algorithms lists this operator."


_BACK_ENDS: Final = {
    r"aten\._scaled_dot_product_flash_attention": "flash attention",
    r"aten\._scaled_dot_product_efficient_attention": "memory-efficient attention",
    r"aten\._scaled_dot_product_cudnn_attention": "cuDNN",
    r"aten\._scaled_dot_product_fused_attention_overrideable": "a back end of the device's own",
    r"aten\._safe_softmax\b": "plain operators (math)",
}


def attention_back_ends(scene: Scene) -> str:
    """A sentence where the diverging operator's module uses other back ends in a than in b; "" otherwise."""
    one, two = (_used(scene, side) for side in ("a", "b"))
    if not one or not two or one == two:
        return ""
    return f" Scaled dot-product attention there is computed by {' and '.join(one)} in a, by {' and '.join(two)} in b."


def _used(scene: Scene, side: str) -> list[str]:
    results = scene.step.of(Kind.OP_OUTPUT, frozenset({scene.site.phase}), scene.site.fqn)
    paths = [scene.step.alignment.path[union] for union in scene.recorded(side, results)]
    return [name for pattern, name in _BACK_ENDS.items() if any(re.match(pattern, path) for path in paths)]


_SEEN = frozenset({Status.OBSERVED, Status.PARTIAL})


def memory_formats(scene: Scene) -> list[str]:
    """Clauses such as `its input [0] is contiguous in a and channels_last in b`, those of inputs first."""
    clauses = []
    tables = [table for table in (scene.table, scene.step.before) if table is not None]
    for union in _went_in(scene):
        for table in [table for table in tables if all(union in table.rows_of(side) for side in "ab")][:1]:
            one, two = (_strides(scene, table, union, side) for side in "ab")
            if one and two and one != two:
                clauses.append(f"{_name(scene, union)} is {one} in a and {two} in b")
    return clauses


def _went_in(scene: Scene) -> Iterator[int]:
    """Union numbers of what went into a module's call, or in run a into an operator, as far as that is on record."""
    step, site = scene.step, scene.site
    if site.kind is Kind.OP_OUTPUT:
        row, given = scene.table.rows_of("a").get(scene.union), scene.table.a.given
        operands = given.row(row) if row is not None and given is not None else None
        # the sites of run a have the first union numbers
        yield from (int(number) for number in ([] if operands is None else operands.inputs) if number >= 0)
        return
    yield from step.of_call(site.phase, Kind.INPUT, site.fqn, site.call)
    for fqn in sorted(step.comparison.tensors_in(site.fqn)):
        unions = (int(union) for union in step.alignment.by_fqn[fqn])
        yield from [u for u in unions if KINDS[step.alignment.kind[u]] in {Kind.PARAM, Kind.BUFFER}][-1:]


def _strides(scene: Scene, table: Table, union: int, side: str) -> str:
    """How a tensor lies in memory; "" for what is no tensor, or was not seen."""
    comparison = scene.step.comparison
    batch, reader = (table.a, comparison.a) if side == "a" else (table.b, comparison.b)
    row = table.rows_of(side)[union]
    if Status(int(batch.status[row])) not in _SEEN:
        return ""
    return reader.layouts[int(batch.layout[row])].strides


def _name(scene: Scene, union: int) -> str:
    site = scene.step.alignment.site(union)
    if site.kind is Kind.INPUT:
        return f"its input {site.path}".rstrip()
    if site.kind is Kind.OP_OUTPUT:
        return f"the result of {site.path}"
    return f"its {site.fqn[len(owner_of(site.fqn)) + 1 :]}"

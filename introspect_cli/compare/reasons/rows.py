"""All reasons, one row each: the records it is about, when it applies, its findings, and remaining causes.

The reason of a divergence is the first of them that applies and lacks no needed evidence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from introspect_cli.compare.evidence import Cause, Known, Thing, with_state
from introspect_cli.compare.ledger import TENSORS
from introspect_cli.compare.reasons import back, draws, forward, ranks, split, start, structure, update
from introspect_cli.compare.reasons.base import KERNEL_WEIGHTS, Reason, cause
from introspect_cli.compare.result import Role
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.compare.reasons.view import View
    from introspect_cli.compare.step import Step


def _left_in_gap(at: View) -> Iterator[str]:
    """Codes of the remaining causes of the reason in `cause.instead`; last `steps-between` of what was not recorded."""
    if at.cause.instead:
        yield from (*reason_named(at.cause.instead).remaining(at), "not-recorded")
    if at.step.begins.gap:
        yield "steps-between"


_TENSORS = frozenset(TENSORS)
_OUTSIDE = frozenset({Kind.RNG, Kind.BATCH})
"""What no step before computes."""
_DRAWN = {"command": 0.9, "seeds": 1.0, "options": 0.95}

ROWS: Final = (
    Reason(
        "split",
        "A batch is cut into microbatches in another way: their losses are added up, or uneven means count alike.",
        frozenset({Kind.LOSS, Kind.GRAD, Kind.OUTPUT, Kind.INPUT, Kind.BATCH}),
        applies=split.split_cause,
        names="accum|micro|batch|loss|reduc|clip|sync",
    ),
    Reason("collective", "Ranks sent or received something else.", frozenset({Kind.COLLECTIVE}), left=("sent",)),
    Reason(
        "parts",
        "The ranks of a run do not hold each element of a tensor exactly once.",
        frozenset({Kind.PARAM, Kind.BUFFER, Kind.GRAD, Kind.OPTIMIZER_STATE}),
        applies=ranks.parts_cause,
    ),
    Reason(
        "outside",
        "A parameter or buffer changed between two steps, and not by an optimizer step.",
        _TENSORS,
        applies=start.start_cause,
        left=start.left_outside,
        weights={"checkpoints": 0.97},
    ),
    Reason(
        "product",
        "A file that the script saves, or a copy that it keeps, differs although what it is computed from is equal.",
        frozenset({Kind.PRODUCT}),
        left=("saving",),
        names="ema|average|swa|momentum|decay|save|checkpoint|half|precision",
    ),
    Reason(
        "gap",
        "Not everything that went in was recorded: it is listed what is missing and which causes remain.",
        frozenset({*_TENSORS, Kind.OPTIMIZER_STATE}),
        applies=start.start_cause,
        left=_left_in_gap,
        weights={"scalers": 0.6},
    ),
    Reason(
        "structure",
        "Only one run has this value: the runs differ in modules, calls or names.",
        applies=structure.one_side_cause,
        names="layer|depth|head|accum|freeze|tie|batch|step|block|width|bias",
    ),
    Reason(
        "script",
        "The code between the data loader and the model, or around `functional_call`, gives the model other values.",
        frozenset({Kind.INPUT, Kind.PARAM}),
        applies=forward.call_cause,
        left=forward.left_in_script,
    ),
    Reason(
        "value",
        "A value that the script gave to `introspect_cli.record` differs.",
        frozenset({Kind.VALUE}),
        left=("code-of-value", "not-recorded"),
    ),
    Reason(
        "module",
        "A module whose inputs, parameters and buffers are equal computes a different output.",
        frozenset({Kind.OUTPUT}),
        applies=forward.call_cause,
        left=forward.left_in_module,
        weights=KERNEL_WEIGHTS,
        names="drop|eps|bias|act|attn|sdpa|flash|dtype|amp|[bf]p?16|compile|determin|thread|tf32",
    ),
    Reason(
        "own_code",
        "A module's own forward code, between the modules inside it or after them, computes something else.",
        frozenset({Kind.INPUT, Kind.PARAM}),
        applies=forward.call_cause,
        left=lambda at: ("forward-code", *["buffers-after"] * bool(at.cause.rests_on(Thing.BUFFERS_AT_START))),
        weights={"runtime": 0.7},
        names="_sdp$",  # back ends of attention draw dropout in different ways
    ),
    Reason(
        "plain",
        "The loss or a gradient differs in a script that calls no module, so no place inside the model can be named.",
        frozenset({Kind.LOSS, Kind.GRAD}),
        applies=forward.plain_cause,
        left=lambda at: ("operations", "gradient-by-hand" if at.site.kind is Kind.GRAD else "data"),
    ),
    Reason(
        "backward",
        "The backward pass of a module gives another gradient although what went into it is equal.",
        frozenset({Kind.GRAD_INPUT, Kind.GRAD_OUTPUT}),
        applies=back.backward_cause,
        left=lambda at: ("backward-through",) if at.site.kind is Kind.GRAD_INPUT else ("backward-of-user", "loss-code"),
        weights=KERNEL_WEIGHTS,
    ),
    Reason(
        "batch",
        "The data loader gave another batch.",
        frozenset({Kind.BATCH}),
        applies=forward.batch_cause,
        left=lambda at: ("batch-size",) if at.reshaped else ("samples",),
        weights={"command": 0.9, "seeds": 0.95},
        names="seed|worker|batch|shuffle|data|block|seq|sampler|augment",
    ),
    Reason(
        "buffer",
        "A buffer differs at the end of the step: how its module updates it.",
        frozenset({Kind.BUFFER}),
        applies=update.buffer_cause,
        left=("updates", "by-hand"),
        names="momentum|ema|stat|norm",
    ),
    Reason(
        "by_hand",
        "A tensor changed within a step, and not by an optimizer: in the forward pass, or without a gradient.",
        _TENSORS,
        applies=update.by_hand_cause,
        left=("by-hand",),
    ),
    Reason(
        "gradient",
        "A parameter's gradient differs when the optimizer sees it, although the backward pass agrees.",
        frozenset({Kind.GRAD}),
        applies=back.gradient_cause,
        left=back.left_in_gradient,
        weights={"hyperparameter": 0.3, "optimizers": 0.3, "scalers": 0.96},
        names="clip|accum|scale|zero|norm|amp|micro",
    ),
    Reason(
        "initial",
        "A parameter or buffer differs before any training: its initialisation, or the checkpoint that it came from.",
        _TENSORS,
        applies=start.start_cause,
        left=start.left_in_initial,
        weights=_DRAWN | {"checkpoints": 0.97},
        names="seed|init|hidden|embd|layer|head|width|depth|pretrained|checkpoint|resume",
    ),
    Reason(
        "loss",
        "The loss differs although the model's outputs are equal: the loss code, or the targets.",
        frozenset({Kind.LOSS}),
        upstream=frozenset({Phase.DATA, Phase.FORWARD, Phase.EVAL}),
        left=lambda at: ("loss-code", *["targets"] * (at.known(Thing.BATCHES) not in {Known.EQUAL, Known.WITHIN})),
        weights={"scalers": 0.96},
        names="loss|smooth|reduc|label|ignore|pad|accum|scale",
    ),
    Reason(
        "op",
        "An operator whose inputs are equal gives another result.",
        frozenset({Kind.OP_OUTPUT}),
        left=("kernel",),
        weights=KERNEL_WEIGHTS,
    ),
    Reason(
        "optimizer",
        "A parameter or its state differs after the step although its gradient and what was before are equal.",
        frozenset({Kind.PARAM, Kind.OPTIMIZER_STATE}),
        applies=update.optimizer_cause,
        left=update.left_in_optimizer,
        weights={"hyperparameter": 1.0, "optimizers": 0.98},
        names="lr|learning|beta|momentum|decay|eps|optim|warm|sched|fused|foreach|amsgrad",
    ),
    Reason(
        "rng",
        "A random generator is in another state when the step begins, or before something draws from it.",
        frozenset({Kind.RNG}),
        applies=draws.random_state_cause,
        left=draws.left_in_state,
        weights=_DRAWN | {"sources": 0.7},
        names="seed|worker|shuffle",
    ),
    Reason(
        "resumed",
        "A run that continues from a checkpoint began with values that the checkpoint did not restore.",
        applies=lambda step, _: cause("resumed", role=Role.PROPAGATED) if step.begins.resumed else None,
    ),
    Reason(
        "propagated",
        "Something that went into this record differs already. The cause lies further up.",
        applies=lambda *_: cause("propagated", role=Role.PROPAGATED),
        left=("elsewhere",),
    ),
)


# --- which of them a divergence has


_BY_WORD = {reason.word: reason for reason in ROWS}


def reason_named(word: str) -> Reason:
    """The reason with this word; KeyError where there is none."""
    return _BY_WORD[word]


def judge(step: Step, position: int) -> Cause:
    """The cause of one divergence: the first one, in the order of the rows, whose evidence does not differ.

    Where evidence that is needed for an origin was not observed, the cause is `gap` instead, propagated, with that
    reason in `instead`; only `resumed` comes before it. What both runs have follows, but for `_OUTSIDE`, once anything
    has diverged in a step before.

    Args:
        step: the step.
        position: index of the divergence in `step.sites`.
    """
    if step.begins.diverged and not step.alone[position] and step.sites[position].kind not in _OUTSIDE:
        return cause("propagated", role=Role.PROPAGATED)
    gap: Cause | None = None
    site = step.sites[position]
    for reason in ROWS:
        if (reason.kinds and site.kind not in reason.kinds) or (gap is not None and reason.word != "resumed"):
            continue
        made = reason.cause_of(step, position)
        if made is None or with_state(made.evidence, Known.DIFFERS):
            continue
        if made.role is not Role.ORIGIN or not any(fact.needed for fact in with_state(made.evidence, Known.UNSEEN)):
            return made
        gap = made._replace(role=Role.PROPAGATED, reason="gap", instead=made.reason)
        if gap.module not in {"", site.fqn}:
            gap = gap._replace(evidence=tuple(fact._replace(inside=gap.module) for fact in gap.evidence))
    assert gap is not None  # `propagated` always applies
    return gap

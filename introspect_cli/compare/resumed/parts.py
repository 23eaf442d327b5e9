"""What a resumed run goes on with: part by part, whether it was restored.

A checkpoint holds more than parameters: buffers, the optimizer's state, the schedule, the scaler, random states, the
place in the data, counters, averaged copies. What is lost of these shows in the loss much later or never. So each part
is held against what the other run had at that step: restored, not restored with the values, or not recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.resumed.goes_on import LOOKED_AT, steps_counted
from introspect_cli.compare.terms.at import tensor_of
from introspect_cli.compare.terms.findings import Part, Restored, Resumption
from introspect_cli.compare.terms.sites import kind_code
from introspect_cli.compare.terms.words import key_of, listed
from introspect_cli.labels import shown
from introspect_cli.records import EVALUATED, SCALER, Kind, Phase, Status
from introspect_cli.texts import count

if TYPE_CHECKING:
    from introspect_cli.compare.resumed.goes_on import Goes
    from introspect_cli.compare.terms.at import At, BatchValues, State, States, Tensor


RATES = "learning rates and schedulers"
_COPIES = ("AveragedModel", "EMA", "ModelEma", "ExponentialMovingAverage")
"""Classes of models that hold a moving average of another."""


def resumption_of(goes: Goes, bits: str, *, is_cut: bool) -> Resumption:
    """What the later run goes on with.

    Args:
        goes: which run goes on from which.
        bits: " in bits" where values count as equal that are not, else "".
        is_cut: whether the runs cut batches otherwise, so that one's parts are not the other's.
    """
    parts = (
        tensors(goes, Kind.PARAM, bits),
        tensors(goes, Kind.BUFFER, bits),
        optimizer(goes, bits),
        rates(goes),
        scaler(goes),
        *random(goes),
        Part(PLACE, Restored.UNSEEN, "a batch is cut differently") if is_cut else place(goes),
        counters(goes),
        copies(goes),
    )
    return Resumption(goes.late, goes.at, goes.first, goes.sign.value, parts)


# --- tensors


def tensors(goes: Goes, kind: Kind, bits: str) -> Part:
    """Parameters or buffers."""
    name, began, there = kind.several, goes.began, goes.had
    if kind.value not in goes.kinds:
        return Part(name, Restored.UNSEEN)
    if there is None:
        return Part(name, Restored.UNSEEN, f"step {goes.at - 1} of {goes.whole} is not on record")
    code = kind_code(kind)
    both = [tensor for tensor in began if tensor[0] == code and there.get(tensor) and not _is_copy(tensor[1])]
    if not both:
        return Part(name, Restored.UNSEEN, "none on record", matters=False)
    missing = sum(tensor[0] == code and tensor not in began and not _is_copy(tensor[1]) for tensor in there)
    unseen = f"; {missing} more not recorded in {goes.late}" if missing else ""
    differ = sorted(tensor[1] for tensor in both if began[tensor] != there[tensor])
    if not differ:
        return Part(name, Restored.YES, f"all {len(both)}{unseen}" if len(both) > 1 else f"{both[0][1]}{unseen}")
    more = [f"{len(differ) - 2} more"] if len(differ) > 2 else []
    much = f"{len(differ)} of {len(both)} differ{bits}"
    return Part(name, Restored.NO, f"{much}, {listed([*differ[:2], *more])}{unseen}")


def optimizer(goes: Goes, bits: str) -> Part:
    """The optimizer's state."""
    name, code = Kind.OPTIMIZER_STATE.several, kind_code(Kind.OPTIMIZER_STATE)
    if Kind.OPTIMIZER_STATE.value not in goes.kinds:
        return Part(name, Restored.UNSEEN)
    if goes.had is None:
        return Part(name, Restored.UNSEEN, f"step {goes.at - 1} of {goes.whole} is not on record")
    there = {tensor: value for tensor, value in goes.had.items() if tensor[0] == code and value is not None}
    unknown = goes.had.keys() - there.keys()
    began = {tensor: value for tensor, value in goes.began.items() if tensor[0] == code and tensor not in unknown}
    differ = [tensor for tensor in (there | began) if began.get(tensor) != there.get(tensor)]
    if not there and not began:
        return Part(name, Restored.UNSEEN, "none on record", matters=False)
    if not differ:
        return Part(name, Restored.YES, f"all {count(len(there), 'value')}" if len(there) > 1 else "")
    counted = _counted(goes)
    paths = listed(list(dict.fromkeys(key_of(tensor[2]) for tensor in differ)))
    if counted is not None:
        return Part(name, Restored.NO, f"step {goes.change(*counted)}", *goes.ab(*counted))
    if not began:
        if _ends_equal(goes):  # it was there and nobody looked
            return Part(name, Restored.UNSEEN, f"not as {goes.late} begins, equal after its first step")
        return Part(name, Restored.NO, f"{goes.late} begins without {paths}")
    return Part(
        name, Restored.NO, f"{paths} of {count(len({tensor[1] for tensor in differ}), 'parameter')} differ{bits}"
    )


def _ends_equal(goes: Goes) -> bool:
    """Whether the optimizers leave the first step with one state in both runs."""
    left = [
        {tensor: value for tensor, value in tensors.items() if tensor[0] == kind_code(Kind.OPTIMIZER_STATE)}
        for tensors in (side.tensors(Phase.OPTIMIZER) for side in goes.first_steps)
    ]
    return bool(left[0]) and left[0] == left[1]


def _counted(goes: Goes) -> tuple[str, str] | None:
    """How many steps the optimizers have counted after that step, in the later and the whole run; None if equal."""
    late, whole = (steps_counted(side, Phase.OPTIMIZER) for side in goes.first_steps)
    return None if late is None or whole is None or late == whole else (f"{late:g}", f"{whole:g}")


def copies(goes: Goes) -> Part:
    """Averaged copies of a model, as an evaluation first finds them in both runs, or the end of a step."""
    name, trained = "averaged copies", True
    for late, whole in goes.steps():
        mine, theirs = (_of(side, Phase.START, copy=True) | _kept(side) for side in (late, whole))
        held = mine.keys() & theirs.keys()
        differ = [tensor[1] for tensor in held if mine[tensor] != theirs[tensor]]
        if differ and not trained:
            return Part(name, Restored.UNSEEN, "first on record when the parameters differ", matters=False)
        if differ:
            return Part(name, Restored.NO, f"{len(differ)} of {len(held)} differ, {min(differ)}")
        if held:
            return Part(name, Restored.YES, f"all {len(held)}")
        ends = [_of(side, Phase.OPTIMIZER, copy=False) for side in (late, whole)]
        trained = trained and ends[0] == ends[1]
    none = "none on record" if Kind.PRODUCT.value in goes.kinds else ""
    return Part(name, Restored.UNSEEN, none, matters=False)


def _of(side: At, phase: Phase, *, copy: bool) -> dict[Tensor, int]:
    """The tensors of copies, or all others, as a phase of a step has them."""
    return {tensor: value for tensor, value in side.tensors(phase).items() if _is_copy(tensor[1]) is copy}


def _kept(side: At) -> dict[Tensor, int]:
    """Copies of what is trained that nothing runs."""
    rows, batch = side.rows([Kind.PRODUCT], Phase.OPTIMIZER), side.batch
    return {tensor_of(side.sites, number): int(batch.checksum[row]) for row, number in rows}


def _is_copy(fqn: str) -> bool:
    root = fqn.partition(".")[0]
    return EVALUATED in root or root.startswith(_COPIES)


# --- settings and counters


def rates(goes: Goes) -> Part:
    """Learning rates, and the schedule that gives those of the steps after."""
    seen = differ = 0
    changed: tuple[str, tuple[str, str]] | None = None
    at_first = False
    for sides in goes.steps():
        late, whole = (_rates(side) for side in sides)
        places = sorted(late.keys() & whole.keys())
        seen += bool(places)
        other = next((group for group in places if late[group] != whole[group]), None)
        differ += other is not None
        if other is not None and changed is None:
            values = f"{late[other]:.6g}", f"{whole[other]:.6g}"
            group = f" of group {other[1]}" if len(set(late.values())) > 1 else ""
            since = goes.since(*sides)
            at_first = not since
            changed = f"lr{group} {goes.change(*values)}{f' {since}' if since else ''}", values
    if not seen:
        return Part(RATES, Restored.UNSEEN)
    if changed is not None:
        once = " in the first step alone" if differ == 1 and seen > 1 and at_first else ""
        return Part(RATES, Restored.NO, changed[0] + once, *goes.ab(*changed[1]))
    first = list(dict.fromkeys(f"{rate:.6g}" for rate in _rates(goes.first_steps[0]).values()))
    return Part(RATES, Restored.YES, f"lr {listed(first[:3])}, equal in {count(seen, 'step')}" if first else "")


def _rates(side: At) -> dict[tuple[str, str], float]:
    """Learning rates by optimizer and group."""
    return {
        (number.fqn, number.path.partition("]")[0][1:]): number.value
        for number in side.numbers(Kind.HYPERPARAMETER, Phase.OPTIMIZER)
        if number.path.endswith("['lr']") and number.value is not None
    }


def scaler(goes: Goes) -> Part:
    """The scale of a gradient scaler."""
    late, whole = (
        {
            number.path: number.value
            for number in side.numbers(Kind.HYPERPARAMETER, Phase.OPTIMIZER)
            if number.fqn == SCALER and number.value is not None
        }
        for side in goes.first_steps
    )
    shared = sorted(late.keys() & whole.keys())
    if not shared:
        return Part("scaler", Restored.UNSEEN, "none on record", matters=False)
    for path in shared:
        if late[path] != whole[path]:
            values = f"{late[path]:g}", f"{whole[path]:g}"
            return Part("scaler", Restored.NO, f"{key_of(path)} {goes.change(*values)}", *goes.ab(*values))
    return Part("scaler", Restored.YES, ", ".join(f"{key_of(path)} {late[path]:g}" for path in shared))


def counters(goes: Goes) -> Part:
    """What the framework counts."""
    late, whole = (side.reader.labels.get(side.step, {}) for side in goes.first_steps)
    # one step may be so many batches in one run, and fewer in the other
    counted = ("global_step", "epoch", *["batch"] * (late.get("accumulation") == whole.get("accumulation")))
    names = [label for label in counted if label in late and label in whole]
    if not names:
        return Part("counters", Restored.UNSEEN, matters=False)
    differ = [label for label in names if late[label] != whole[label]]
    if differ:
        text = ", ".join(f"{label} {goes.change(shown(late[label]), shown(whole[label]))}" for label in differ)
        return Part("counters", Restored.NO, text, matters=False)
    return Part("counters", Restored.YES, ", ".join(f"{label} {shown(late[label])}" for label in names))


PLACE = "place in the data"


def random(goes: Goes) -> list[Part]:
    """The random state of each generator."""
    if Kind.RNG.value not in goes.kinds:
        return [Part("random states", Restored.UNSEEN)]
    late, whole = (side.random_states() for side in goes.first_steps)
    last = [*goes.steps()][-1:]
    ends = tuple(side.random_states() for side in last[0]) if last and last[0] != goes.first_steps else ({}, {})
    parts = []
    for key in sorted(late.keys() | whole.keys()):
        if key[1] is Phase.START:
            state, text = _restored(goes, key[0], late.get(key), whole.get(key))
            unused = state is Restored.NO and _unused(key[0], (late, ends[0])) and _unused(key[0], (whole, ends[1]))
            text = "nothing drew from it in the steps compared" if unused else text
            name = f"random state of {key[0]}"
            parts.append(Part(name, state, text, matters=not unused, generator=key[0]))
    return parts


def _restored(goes: Goes, generator: str, late: State | None, whole: State | None) -> tuple[Restored, str]:
    """Whether a generator was restored, given its state in either run when the step begins.

    A script restores it after its loader has drawn: then it is in the same state when something first draws from it.
    """
    if late is None or whole is None:
        return Restored.UNSEEN, f"on record in {goes.whole if late is None else goes.late} only"
    (checksum, status), (other, status_other) = late, whole
    if status is not status_other:
        return Restored.UNSEEN, f"nothing had drawn from it in {goes.late if status is Status.VALUE else goes.whole}"
    if checksum == other:
        return Restored.YES, "nothing had drawn from it in either run" if status is Status.VALUE else ""
    later = _later(goes, generator)
    if not later:
        return Restored.UNSEEN, f"another one when {goes.late} begins, and nothing later is on record"
    return (Restored.YES, "within the first step") if all(one == two for one, two in later) else (Restored.NO, "")


def _later(goes: Goes, generator: str) -> list[tuple[State, State]]:
    """A generator's states in both runs when something draws from it in that step; else when a later step begins."""
    start = (generator, Phase.START, generator, 0)
    for place, sides in enumerate(goes.steps()):
        if place > _LATER:
            break
        late, whole = (side.random_states() for side in sides)
        both = late.keys() & whole.keys()
        within = [] if place else [key for key in both if key[0] == generator and key[1] is not Phase.START]
        within += [start] if place and start in both else []
        if within:
            return [(late[key], whole[key]) for key in within]
    return []


_LATER = 8
"""Steps in which a generator is looked for."""


def _unused(generator: str, states: tuple[States, ...]) -> bool:
    """Whether nothing drew from a generator between the first and the last step of a run that are looked at."""
    first, last = states
    start = (generator, Phase.START, generator, 0)
    drawn = any(key[0] == generator and key[1] is not Phase.START for state in states for key in state)
    return not drawn and start in first and first[start] == last.get(start)


# --- data


def place(goes: Goes) -> Part:
    """Which batches the later run goes on with; in its first step it may read others before, to get there."""
    if Kind.BATCH.value not in goes.kinds:
        return _by_inputs(goes)
    seen = 0
    for late, whole in goes.steps():
        mine, theirs = late.batches(), whole.batches()
        begins = late.step == goes.first
        for loader in sorted(mine.keys() | theirs.keys()):
            here, there = mine.get(loader, []), theirs.get(loader, [])
            if begins and here and there and here[-len(there) :] == there:
                seen += 1
                continue
            if begins and (not (here and there) or there[-len(here) :] == here):
                continue  # either run may have read ahead, or thrown the others away: what the models are given tells
            if here != there:
                when = goes.since(late, whole)
                return Part(PLACE, Restored.NO, f"{f'{when} ' if when else ''}{_which(goes, here, loader)}")
            seen += bool(here)
        if begins and not seen:
            return _by_inputs(goes)
    if not seen:
        return Part(PLACE, Restored.UNSEEN)
    return Part(PLACE, Restored.YES, f"{count(seen, 'batch', 'batches')} equal")


def _which(goes: Goes, read: list[BatchValues], loader: str) -> str:
    """Where the whole run read the batch that the later one goes on with."""
    if not read:
        return f"{goes.late} reads no batch"
    for side in map(goes.there.to, goes.there.reader.entries["step"][:LOOKED_AT].tolist()):
        if read[-1] in side.batches().get(loader, []):
            return f"{goes.late} reads the batch of step {side.step} of {goes.whole}"
    return f"{goes.late} reads a batch that no recorded step of {goes.whole} has"


def _by_inputs(goes: Goes) -> Part:
    """By what the models are given, where no batch is on record."""
    if Kind.INPUT.value not in goes.kinds:
        return Part(PLACE, Restored.UNSEEN)
    late, whole = (_inputs(side) for side in goes.first_steps)
    shared = late.keys() & whole.keys()
    if not shared:
        return Part(PLACE, Restored.UNSEEN)
    if all(late[at] == whole[at] for at in shared):
        return Part(PLACE, Restored.YES, "the model's inputs are equal in the first step")
    return Part(PLACE, Restored.NO, "the model's inputs differ")


def _inputs(side: At) -> dict[tuple[str, int, str], int]:
    """Checksums of what root modules are given in a step."""
    sites, inputs = side.sites, {}
    for row, number in side.rows([Kind.INPUT], Phase.FORWARD):
        if "." not in sites.fqn[number] and side.batch.status[row] == Status.OBSERVED:
            inputs[sites.fqn[number], int(sites.call[number]), sites.path[number]] = int(side.batch.checksum[row])
    return inputs

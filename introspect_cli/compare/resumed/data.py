"""Random states and the place in the data that a resumed run goes on with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.join.read_on import Batch, State, batches_of, looked_later, random_states
from introspect_cli.compare.join.sites import picked
from introspect_cli.compare.result import Part, Restored
from introspect_cli.records import Kind, Phase, Status, count

if TYPE_CHECKING:
    from introspect_cli.compare.resumed.beside import Beside, Side

PLACE = "place in the data"
RANDOM = "random state of "


def random(beside: Beside) -> list[Part]:
    """The random state of each generator."""
    if Kind.RNG.value not in beside.kinds:
        return [Part("random states", Restored.UNSEEN)]
    late, whole = (random_states(*side) for side in beside.first)
    last = [*beside.steps()][-1:]
    ends = tuple(random_states(*side) for side in last[0]) if last and last[0] != beside.first else ({}, {})
    parts = []
    for key in sorted(late.keys() | whole.keys()):
        if key[1] is Phase.START:
            state, text = _restored(beside, key[0], late.get(key), whole.get(key))
            unused = state is Restored.NO and _unused(key[0], (late, ends[0])) and _unused(key[0], (whole, ends[1]))
            text = "nothing drew from it in the steps compared" if unused else text
            parts.append(Part(RANDOM + key[0], state, text, matters=not unused))
    return parts


def _restored(beside: Beside, generator: str, late: State | None, whole: State | None) -> tuple[Restored, str]:
    """Whether a generator was restored, given its state in either run when the step begins."""
    goes, read = beside.goes, beside.comparison.read_on
    if late is None or whole is None:
        return Restored.UNSEEN, f"on record in {goes.whole if late is None else goes.late} only"
    (checksum, status), (other, status_other) = late, whole
    if status is not status_other:
        return Restored.UNSEEN, f"nothing had drawn from it in {goes.late if status is Status.VALUE else goes.whole}"
    if checksum == other:
        return Restored.YES, "nothing had drawn from it in either run" if status is Status.VALUE else ""
    if read is not None and generator in read.generators:
        return Restored.YES, "within the first step"
    if not looked_later(goes, generator):
        return Restored.UNSEEN, f"another one when {goes.late} begins, and nothing later is on record"
    return Restored.NO, ""


def _unused(generator: str, states: tuple[dict[tuple[str, Phase, str, int], State], ...]) -> bool:
    """Whether nothing drew from a generator between the first and the last step of a run that are looked at."""
    first, last = states
    start = (generator, Phase.START, generator, 0)
    drawn = any(key[0] == generator and key[1] is not Phase.START for state in states for key in state)
    return not drawn and start in first and first[start] == last.get(start)


# --- data


def place(beside: Beside) -> Part:
    """Which batches the later run goes on with."""
    if Kind.BATCH.value not in beside.kinds:
        return _by_inputs(beside)
    read = beside.comparison.read_on
    thrown, seen = read.batches if read is not None else {}, 0
    for late, whole in beside.steps():
        mine, theirs = batches_of(*late), batches_of(*whole)
        for loader in sorted(mine.keys() | theirs.keys()):
            here, there = mine.get(loader, []), theirs.get(loader, [])
            if late[1] == beside.goes.first:
                here = here[thrown.get(loader, 0) :]
            seen += bool(here) and here == there
            if here and here != there and here == there[-len(here) :] and late[1] == beside.goes.first:
                return _by_inputs(beside)  # those before may have been thrown away by the whole run, too
            if here != there:
                when = beside.since(late, whole)
                text = f"{when} " if when else ""
                return Part(PLACE, Restored.NO, f"{text}{_which(beside, here, loader)}")
        if late[1] == beside.goes.first and not seen and not thrown:
            return _by_inputs(beside)
    if not seen and not thrown:
        return Part(PLACE, Restored.UNSEEN)
    text = f"{count(seen, 'batch', 'batches')} equal"
    if thrown:
        text += f", {count(sum(thrown.values()), 'batch', 'batches')} before read and thrown away"
    return Part(PLACE, Restored.YES, text)


def _which(beside: Beside, read: list[Batch], loader: str) -> str:
    """Where the whole run read the batch that the later one goes on with."""
    goes = beside.goes
    if not read:
        return f"{goes.late} reads no batch"
    for side in beside.whole_steps():
        if read[-1] in batches_of(*side).get(loader, []):
            return f"{goes.late} reads the batch of step {side[1]} of {goes.whole}"
    return f"{goes.late} reads a batch that no recorded step of {goes.whole} has"


def _by_inputs(beside: Beside) -> Part:
    """By what the models are given, where no batch is on record."""
    if Kind.INPUT.value not in beside.kinds:
        return Part(PLACE, Restored.UNSEEN)
    late, whole = (_inputs(side) for side in beside.first)
    shared = late.keys() & whole.keys()
    if not shared:
        return Part(PLACE, Restored.UNSEEN)
    if all(late[at] == whole[at] for at in shared):
        return Part(PLACE, Restored.YES, "the model's inputs are equal in the first step")
    return Part(PLACE, Restored.NO, "the model's inputs differ")


def _inputs(side: Side) -> dict[tuple[str, int, str], int]:
    """Checksums of what root modules are given in a step."""
    reader, step, sites = side
    if step not in reader:
        return {}
    batch, found = reader.read(step), {}
    for row, number in picked(batch, sites, Kind.INPUT, Phase.FORWARD):
        if "." not in sites.fqn[number] and batch.status[row] == Status.OBSERVED:
            found[sites.fqn[number], int(sites.call[number]), sites.path[number]] = int(batch.checksum[row])
    return found

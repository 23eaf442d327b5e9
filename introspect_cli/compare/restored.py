"""What a resumed run goes on with: part by part, whether it was restored.

A checkpoint holds more than parameters: buffers, the optimizer's state, the schedule, the scaler, random states, the place
in the data, counters, averaged copies. What is lost of these shows in the loss much later or never. So each part is held
against what the other run had at that step: restored, not restored with the values, or not recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.carried import values_of
from introspect_cli.compare.join.read_on import batches_of, random_states
from introspect_cli.compare.join.resume import Late, began_with, scalar
from introspect_cli.compare.join.sites import kind_code, phase_code
from introspect_cli.compare.reasons.words import listed
from introspect_cli.compare.result import Part, Restored, Resumption
from introspect_cli.compare.watched import observed_kinds
from introspect_cli.labels import shown
from introspect_cli.records import Kind, Phase, Status, count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.compare.comparison import Comparison
    from introspect_cli.compare.join.carried import Tensor
    from introspect_cli.compare.join.read_on import Batch
    from introspect_cli.compare.join.resume import Goes
    from introspect_cli.compare.join.sites import Columns
    from introspect_cli.labels import Labels
    from introspect_cli.store.whole import Reader

_LOOKED_AT = 200
"""Steps after the first of which learning rates and batches are held against each other."""

_SCALER = "GradScaler"
"""What the records of a gradient scaler are named by."""


def resumption_of(comparison: Comparison) -> Resumption | None:
    """What the later run goes on with; None where neither run is resumed."""
    goes = comparison.goes
    if goes is None:
        return None
    found = _Found(comparison, goes)
    parts = (
        found.tensors(Kind.PARAM),
        found.tensors(Kind.BUFFER),
        found.optimizer(),
        found.rates(),
        found.scaler(),
        *found.random(),
        found.place(),
        found.counters(),
        found.copies(),
    )
    read = comparison.read_on.batches if comparison.read_on is not None else {}
    return Resumption(goes.late, goes.at, goes.first, goes.sign.value, parts, sum(read.values()))


@dataclass(frozen=True)
class _Found:
    """Both runs where one goes on."""

    comparison: Comparison
    goes: Goes

    @cached_property
    def own(self) -> Late:
        return Late.of(self.comparison.sides, self.goes.late)

    @cached_property
    def _kinds(self) -> frozenset[str]:
        """Kinds that both captures watched for; all where a run does not say."""
        sides = self.comparison.sides
        told = [
            observed_kinds(manifest) or {kind.value for kind in Kind}
            for manifest in (sides.manifest_a, sides.manifest_b)
        ]
        return frozenset(told[0] & told[1])

    @cached_property
    def _began(self) -> dict[Tensor, int]:
        return began_with(self.own.late, self.own.sites)

    @cached_property
    def _there(self) -> dict[Tensor, int] | None:
        """What the whole run had when that step began; None where that is not on record."""
        own, at = self.own, self.goes.at
        if at - 1 not in own.whole:
            return None
        again = (own.sites_whole.phase == phase_code(Phase.START)) & (own.sites_whole.call > 0)
        frozen = {} if again.any() else began_with(own.whole, own.sites_whole)
        left = values_of(own.whole, at - 1, own.sites_whole, Phase.OPTIMIZER)
        return {
            tensor: value for tensor, value in frozen.items() if tensor[0] != kind_code(Kind.OPTIMIZER_STATE)
        } | left

    def _steps(self) -> Iterator[tuple[int, int]]:
        """The steps of both from there on, those of the later run first, as far as they are looked at."""
        for step in range(self.goes.first, self.goes.first + _LOOKED_AT):
            at = step - self.goes.first + self.goes.at
            if step in self.own.late and at in self.own.whole:
                yield step, at

    def _ab(self, late: str, whole: str) -> tuple[str, str]:
        """Values of a and of b."""
        return (whole, late) if self.goes.late == "b" else (late, whole)

    def _change(self, late: str, whole: str) -> str:
        return " -> ".join(self._ab(late, whole))

    # --- tensors

    def tensors(self, kind: Kind) -> Part:
        """Parameters or buffers."""
        name = kind.several
        if kind.value not in self._kinds:
            return Part(name, Restored.UNSEEN)
        if self._there is None:
            return Part(name, Restored.UNSEEN, f"step {self.goes.at - 1} of {self.goes.whole} is not on record")
        code, there = kind_code(kind), self._there
        both = [tensor for tensor in self._began if tensor[0] == code and tensor in there]
        missing = [tensor for tensor in there if tensor[0] == code and tensor not in self._began]
        if not both:
            return Part(name, Restored.UNSEEN, "none on record in both runs")
        differ = [tensor[1] for tensor in both if self._began[tensor] != there[tensor]]
        unseen = f"; {len(missing)} more were not recorded in both" if missing else ""
        if not differ:
            return Part(name, Restored.YES, f"all {len(both)}{unseen}" if len(both) > 1 else f"{both[0][1]}{unseen}")
        more = f" and {len(differ) - 2} more" if len(differ) > 2 else ""
        names = listed(differ[:2]) if not more else f"{', '.join(differ[:2])}{more}"
        return Part(name, Restored.NO, f"{len(differ)} of {len(both)}: {names}{unseen}")

    def optimizer(self) -> Part:
        """The optimizer's state."""
        name, code = Kind.OPTIMIZER_STATE.several, kind_code(Kind.OPTIMIZER_STATE)
        if Kind.OPTIMIZER_STATE.value not in self._kinds:
            return Part(name, Restored.UNSEEN)
        if self._there is None:
            return Part(name, Restored.UNSEEN, f"step {self.goes.at - 1} of {self.goes.whole} is not on record")
        there = {tensor: value for tensor, value in self._there.items() if tensor[0] == code}
        began = {tensor: value for tensor, value in self._began.items() if tensor[0] == code}
        if not there and not began:
            return Part(name, Restored.UNSEEN, "the optimizer has none")
        differ = [tensor for tensor in there if began.get(tensor) != there[tensor]]
        differ += [tensor for tensor in began if tensor not in there]
        if not differ:
            return Part(name, Restored.YES, f"all {count(len(there), 'value')}")
        counted = self._counted()
        paths = ", ".join(dict.fromkeys(_key(tensor[2]) for tensor in differ))
        if counted is not None:
            return Part(name, Restored.NO, f"step {self._change(*counted)}", *self._ab(*counted))
        if not began:
            return Part(name, Restored.NO, f"new; {self.goes.whole} has {paths}")
        return Part(name, Restored.NO, f"{paths} of {len({tensor[1] for tensor in differ})} parameters")

    def _counted(self) -> tuple[str, str] | None:
        """How many steps the optimizers have counted after that step, in the later and the whole run, if they differ."""
        counts = []
        for reader, step, sites in self._both_first:
            states = dict(_rows(reader, step, sites, Kind.OPTIMIZER_STATE))
            found = [value for (_, path), value in states.items() if path == "['step']" and value is not None]
            counts.append(max(found, default=None))
        late, whole = counts
        return None if late is None or whole is None or late == whole else (f"{late:g}", f"{whole:g}")

    @property
    def _both_first(self) -> tuple[tuple[Reader, int, Columns], tuple[Reader, int, Columns]]:
        own = self.own
        return (own.late, self.goes.first, own.sites), (own.whole, self.goes.at, own.sites_whole)

    # --- settings of the optimizer

    def rates(self) -> Part:
        """Learning rates, and the schedule that gives those of the steps after."""
        name, seen = "learning rates and schedulers", 0
        for step, at in self._steps():
            late = self._rates(self.own.late, step, self.own.sites)
            whole = self._rates(self.own.whole, at, self.own.sites_whole)
            seen += bool(late.keys() & whole.keys())
            for place in late.keys() & whole.keys():
                if late[place] == whole[place]:
                    continue
                values = f"{late[place]:.6g}", f"{whole[place]:.6g}"
                group = f" of group {place[1]}" if len(late) > 1 and len(set(late.values())) > 1 else ""
                when = "" if step == self.goes.first else f" from step {at if self.goes.late == 'b' else step} on"
                return Part(name, Restored.NO, f"lr{group} {self._change(*values)}{when}", *self._ab(*values))
        if not seen:
            return Part(name, Restored.UNSEEN)
        first = dict.fromkeys(f"{rate:.6g}" for rate in self._rates(*self._both_first[0]).values())
        return Part(name, Restored.YES, f"lr {', '.join(list(first)[:3])}; equal in {count(seen, 'step')}")

    @staticmethod
    def _rates(reader: Reader, step: int, sites: Columns) -> dict[tuple[str, str], float]:
        rows = _rows(reader, step, sites, Kind.HYPERPARAMETER)
        return {
            (fqn, path.partition("]")[0][1:]): value
            for (fqn, path), value in rows
            if path.endswith("['lr']") and value is not None
        }

    def scaler(self) -> Part:
        """The scale of a gradient scaler."""
        name = "scaler"
        late, whole = (
            {path: value for (fqn, path), value in _rows(*side, Kind.HYPERPARAMETER) if fqn.startswith(_SCALER)}
            for side in self._both_first
        )
        shared = late.keys() & whole.keys()
        if not shared:
            return Part(name, Restored.UNSEEN, "none on record")
        for path in sorted(shared):
            if late[path] != whole[path]:
                values = f"{late[path]:g}", f"{whole[path]:g}"
                return Part(name, Restored.NO, f"{_key(path)} {self._change(*values)}", *self._ab(*values))
        return Part(name, Restored.YES, ", ".join(f"{_key(path)} {late[path]:g}" for path in sorted(shared)))

    # --- random states, data

    def random(self) -> list[Part]:
        """The random state of each generator."""
        if Kind.RNG.value not in self._kinds:
            return [Part("random states", Restored.UNSEEN)]
        own = self.own
        late, whole = (random_states(*side) for side in self._both_first)
        later, whole_later = (
            random_states(own.late, self.goes.first + 1, own.sites),
            random_states(own.whole, self.goes.at + 1, own.sites_whole),
        )
        read = self.comparison.read_on
        parts = []
        for key in late.keys() | whole.keys():
            if key[1] is not Phase.START:
                continue
            name = f"random state of {key[0]}"
            if key not in late or key not in whole:
                parts.append(
                    Part(
                        name,
                        Restored.UNSEEN,
                        f"on record in {self.goes.whole if key in whole else self.goes.late} only",
                    )
                )
                continue
            (sum_late, status_late), (sum_whole, status_whole) = late[key], whole[key]
            if status_late is not status_whole:
                untouched = self.goes.late if status_late is Status.VALUE else self.goes.whole
                parts.append(Part(name, Restored.UNSEEN, f"nothing had drawn from it in {untouched}"))
            elif sum_late == sum_whole:
                text = "nothing had drawn from it in either run" if status_late is Status.VALUE else ""
                parts.append(Part(name, Restored.YES, text))
            elif read is not None and key[0] in read.generators:
                parts.append(Part(name, Restored.YES, "within the first step"))
            else:
                still = all(
                    after.get(key, (None,))[0] == first[0]
                    for after, first in ((later, late[key]), (whole_later, whole[key]))
                )
                draws = any(own[0] == key[0] and own[1] is not Phase.START for own in late.keys() | whole.keys())
                text = "nothing drew from it in the first step" if still and not draws else ""
                parts.append(Part(name, Restored.NO, text, matters=not text))
        return sorted(parts, key=lambda part: part.part)

    def place(self) -> Part:
        """Which batches the later run goes on with."""
        name, own = "place in the data", self.own
        read = self.comparison.read_on
        thrown = read.batches if read is not None else {}
        seen = 0
        for step, at in self._steps():
            late, whole = batches_of(own.late, step, own.sites), batches_of(own.whole, at, own.sites_whole)
            for loader in late.keys() | whole.keys():
                there, here = whole.get(loader, []), late.get(loader, [])
                if step == self.goes.first and loader in thrown:
                    here = here[thrown[loader] :]
                seen += bool(here and there and here == there)
                if here != there:
                    when = "" if step == self.goes.first else f"from step {at if self.goes.late == 'b' else step} on "
                    return Part(name, Restored.NO, f"{when}{self._which(here, loader)}")
            if step == self.goes.first and not seen and not thrown:
                return self._by_inputs(name)
        text = f"{count(sum(thrown.values()), 'batch', 'batches')} before it read and thrown away" if thrown else ""
        return Part(name, Restored.YES, text or f"{count(seen, 'batch', 'batches')} equal")

    def _which(self, read: list[Batch], loader: str) -> str:
        """Where the whole run read the batch that the later one goes on with."""
        own = self.own
        if not read:
            return f"{self.goes.late} reads no batch there"
        for row in range(min(len(own.whole), _LOOKED_AT)):
            step = int(own.whole.entries["step"][row])
            if read[-1] in batches_of(own.whole, step, own.sites_whole).get(loader, []):
                return f"{self.goes.late} reads the batch of step {step} of {self.goes.whole}"
        return f"{self.goes.late} reads a batch that is in none of the steps of {self.goes.whole} on record"

    def _by_inputs(self, name: str) -> Part:
        """By what the models are given, where no batch is on record."""
        late, whole = (_roots_inputs(*side) for side in self._both_first)
        shared = late.keys() & whole.keys()
        if not shared:
            return Part(name, Restored.UNSEEN)
        if all(late[place] == whole[place] for place in shared):
            return Part(name, Restored.YES, "the model's inputs are equal")
        return Part(name, Restored.NO, "the model's inputs differ")

    # --- counters, copies

    def counters(self) -> Part:
        """What the framework counts."""
        name, own = "counters", self.own
        late, whole = own.late.labels.get(self.goes.first, {}), own.whole.labels.get(self.goes.at, {})
        names = [label for label in ("global_step", "epoch", "batch") if label in late and label in whole]
        if not names:
            return Part(name, Restored.UNSEEN)
        differ = [label for label in names if late[label] != whole[label]]
        if not differ:
            return Part(name, Restored.YES, _counts(late, names))
        changes = ", ".join(f"{label} {self._change(shown(late[label]), shown(whole[label]))}" for label in differ)
        return Part(name, Restored.NO, changes, matters=False)

    def copies(self) -> Part:
        """Averaged copies of a model, which are evaluated or held beside it."""
        name = "averaged copies"
        if self._there is None:
            return Part(name, Restored.UNSEEN)
        held = {tensor for tensor in self._began if _is_copy(tensor[1])} & self._there.keys()
        if not held:
            return Part(name, Restored.UNSEEN, "none on record")
        differ = [tensor[1] for tensor in held if self._began[tensor] != self._there[tensor]]
        if differ:
            return Part(name, Restored.NO, f"{len(differ)} of {len(held)}: {min(differ)}")
        return Part(name, Restored.YES, f"all {len(held)}")


def _is_copy(fqn: str) -> bool:
    root = fqn.partition(".")[0]
    return "#eval" in root or root.startswith(("AveragedModel", "EMA", "ModelEma", "ExponentialMovingAverage"))


def _key(path: str) -> str:
    """The last key of a path: `exp_avg` of `['exp_avg']`."""
    return path.rpartition("[")[2].strip("]'")


def _counts(labels: Labels, names: list[str]) -> str:
    return ", ".join(f"{name} {shown(labels[name])}" for name in names)


def _rows(reader: Reader, step: int, sites: Columns, kind: Kind) -> Iterator[tuple[tuple[str, str], float | None]]:
    """The records of a kind that an optimizer step leaves: name and path, and the value of a scalar."""
    if step not in reader:
        return
    batch = reader.read(step)
    numbers = np.asarray(batch.site)
    wanted = (sites.kind == kind_code(kind)) & (sites.phase == phase_code(Phase.OPTIMIZER))
    for row in np.flatnonzero(wanted[numbers]).tolist():
        number = int(numbers[row])
        yield (sites.fqn[number], sites.path[number]), scalar(batch, row)


def _roots_inputs(reader: Reader, step: int, sites: Columns) -> dict[tuple[str, int, str], int]:
    """Checksums of what root modules are given in a step."""
    if step not in reader:
        return {}
    batch = reader.read(step)
    numbers = np.asarray(batch.site)
    wanted = (sites.kind == kind_code(Kind.INPUT)) & (sites.phase == phase_code(Phase.FORWARD))
    found = {}
    for row in np.flatnonzero(wanted[numbers]).tolist():
        number = int(numbers[row])
        if "." not in sites.fqn[number]:
            found[sites.fqn[number], int(sites.call[number]), sites.path[number]] = int(batch.checksum[row])
    return found

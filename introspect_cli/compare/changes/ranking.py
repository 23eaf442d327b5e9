"""Changed statements, the one first that most likely made the runs diverge.

The records say where the runs diverge and what was equal before. So the code that computes that place is known by name:
the forward of a module and what it calls, the loss before `backward`, what stands between `backward` and the
optimizer's step, the data set, the seeds. A change in there comes first; then one in what builds it or gives it its
values; then one in what ran between the last thing that agreed and the first that did not. Any other change cannot
matter to that place as far as names tell, and is never called likely.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from introspect_cli.compare.changes.program import Program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from introspect_cli.compare.changes.statements import Change
    from introspect_cli.records import Kind


class Nearness(str, Enum):
    """How near a change is to a divergence."""

    RECORDED = "recorded"
    """The records name its line."""
    COMPUTES = "computes"
    """It is in the code that computes the first value that differs."""
    BUILDS = "builds"
    """It builds that code's objects, or gives them their values."""
    BETWEEN = "between"
    """It ran between the last record that agreed and the first that did not."""
    ELSEWHERE = "elsewhere"


_ORDER = list(Nearness)

_SEEDS = frozenset(
    {"manual_seed", "manual_seed_all", "seed", "seed_everything", "set_seed", "Generator", "default_rng", "RandomState"}
    | {"set_state", "set_rng_state", "setstate", "fork_rng", "initial_seed"}
)
_DRAWS = frozenset(
    {
        "rand",
        "randn",
        "randint",
        "randperm",
        "rand_like",
        "randn_like",
        "normal_",
        "uniform_",
        "bernoulli",
        "multinomial",
    }
    | {"kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_", "trunc_normal_", "orthogonal_"}
    | {
        "random_",
        "exponential_",
        "shuffle",
        "choice",
        "random",
        "normal",
        "uniform",
        "dropout",
        "permutation",
        "sample",
    }
)
_INITIALISES = re.compile(
    r"init|reset_parameters|_weights$|constant_|zeros_|ones_|fill_|copy_|load_state_dict|from_pretrained"
)
_CASTS = frozenset(
    {"to", "half", "bfloat16", "float", "double", "autocast", "type", "set_default_dtype", "cuda", "cpu"}
)
_MODES = frozenset({"train", "eval", "no_grad", "inference_mode", "requires_grad_", "compile", "set_grad_enabled"})
_CUTS = frozenset(
    {"detach", "requires_grad_", "no_grad", "checkpoint", "register_hook", "backward", "apply", "retain_grad"}
)
_AFTER_BACKWARD = frozenset(
    {
        "clip_grad_norm_",
        "clip_grad_value_",
        "unscale_",
        "zero_grad",
        "no_sync",
        "all_reduce",
        "register_hook",
        "backward",
    }
    | {
        "scale",
        "register_post_accumulate_grad_hook",
        "update",
        "register_comm_hook",
        "clip_gradients",
        "manual_backward",
    }
)
_LOADS = frozenset(
    {"load_state_dict", "state_dict", "load", "save", "from_pretrained", "load_checkpoint", "save_pretrained"}
)
_IN_PLACE = re.compile(r"[a-z]\w*_\Z|load_state_dict|update_parameters|vector_to_parameters|set_\Z")
_SCHEDULE = re.compile(r"LR$|Scheduler|scheduler|Schedule|Warm|swa", re.IGNORECASE)
_STEPS = re.compile(r"sched|warm|lr", re.IGNORECASE)
_DATA_CLASS = re.compile(r"Data[Ss]et|Sampler|Loader|DataModule|DataPipe|Collat")
_COLLECTIVES = frozenset(
    {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier", "send", "recv", "scatter"}
)
_IN_EXPRESSION = {tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP}


@dataclass(frozen=True)
class Clues:
    """What is known of a divergence.

    Attributes:
        reason: the word of its reason; of a gap, that which would apply if all had been recorded.
        gap: whether something that it rests on was not recorded.
        classes: of the module it is about and of those around it, the innermost first.
        attributes: what these are called in the module around each.
        after: what the last module that agreed is called in the blamed one; "" for none.
        before: what the first that did not is called; "" for none.
        models: what the script calls its models.
        optimizers: classes of the optimizers that step.
        words: names that differ or are known to matter: hyper-parameters, attributes, what one run only has.
        lines: file and line of the user's code that the records of a and of b themselves name.
        kind: what was observed.
    """

    reason: str
    gap: bool = False
    classes: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    after: str = ""
    before: str = ""
    models: frozenset[str] = frozenset()
    optimizers: tuple[str, ...] = ()
    words: frozenset[str] = frozenset()
    lines: tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]] = ((), ())
    kind: Kind | None = None


@dataclass(frozen=True)
class Ranked:
    """A changed statement and how near to the divergence it is.

    Attributes:
        change: the change.
        nearness: how near.
        depth: statements between it and the code that computes the place, as far as values are followed by name.
        hits: how many of the names that the records point to are in what changed.
        above: the line above it.
    """

    change: Change
    nearness: Nearness
    depth: int = 0
    hits: int = 0
    above: str = ""

    @property
    def likely(self) -> bool:
        """Whether it can matter to the place where the runs diverge."""
        return self.nearness is not Nearness.ELSEWHERE


@dataclass(frozen=True)
class CodeChanges:
    """How the source files of two runs differ.

    Attributes:
        ranked: changed statements, the most likely cause first.
        in_comments: files that differ in comments, formatting or the order of definitions alone.
        unread: files that differ and of which a text is not there, with why: `text` (a run did not keep it), `secret`
            (only what was redacted can differ, or comments), `binary`.
        compared: how many files both runs have digests of.
    """

    ranked: tuple[Ranked, ...] = ()
    in_comments: tuple[str, ...] = ()
    unread: tuple[tuple[str, str], ...] = ()
    compared: int = 0

    @property
    def likely(self) -> tuple[Ranked, ...]:
        """Those that can matter to the place where the runs diverge."""
        return tuple(one for one in self.ranked if one.likely)

    @property
    def files(self) -> int:
        """In how many files statements changed."""
        return len({one.change.file for one in self.ranked})


def ranked(
    changes: Sequence[Change], texts: tuple[Mapping[str, str], Mapping[str, str]], clues: Clues | None
) -> tuple[Ranked, ...]:
    """Changes, the most likely cause first.

    Args:
        changes: of all files.
        texts: both versions of all files, by name.
        clues: what is known of the divergence; None where the runs do not diverge.
    """
    if clues is None or not changes:
        return tuple(Ranked(change, Nearness.ELSEWHERE) for change in changes)
    sides = [_Side(Program(files), clues, lines) for files, lines in zip(texts, clues.lines, strict=True)]
    found = [_nearest(change, sides, clues) for change in changes]
    return tuple(sorted(found, key=lambda one: (_ORDER.index(one.nearness), -one.hits, one.depth)))


def _nearest(change: Change, sides: Sequence[_Side], clues: Clues) -> Ranked:
    words = _changed_words(change)
    hits = len(words & clues.words)
    best = (_ORDER.index(Nearness.ELSEWHERE), 0)
    for side, program in zip((change.a, change.b), sides, strict=True):
        if side is None:
            continue
        numbers = program.program.at(change.file, side.first, side.last)
        if change.unit == "file":
            numbers = {statement.number for statement in program.program.statements if statement.file == change.file}
        best = min([best, *map(program.nearness, numbers)])
    return Ranked(change, _ORDER[best[0]], best[1], hits)


def _changed_words(change: Change) -> set[str]:
    """Names, numbers and texts that one side of a change has and the other has not."""
    counts = [Counter(_words(side.text)) if side is not None else Counter() for side in (change.a, change.b)]
    return set((counts[0] - counts[1]) + (counts[1] - counts[0])) or set(counts[0] + counts[1])


def _words(text: str) -> Iterable[str]:
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in _IN_EXPRESSION:
                yield from re.findall(r"[\w.]+", token.string) if token.type == tokenize.STRING else [token.string]
    except (tokenize.TokenError, IndentationError, SyntaxError):
        yield from re.findall(r"\w+", text)


class _Side:
    """One version, and how near each of its statements is to the divergence."""

    def __init__(self, program: Program, clues: Clues, named: Iterable[tuple[str, int]]) -> None:
        self.program, self.clues = program, clues
        lines = [number for file, line in named for number in program.at(file, line, line)]
        seeds = self._seeds(clues.reason)
        self.depths = program.behind([*seeds, *lines], clues.models)
        self.computes = seeds
        self.recorded = set(lines)
        self.built = self._built()
        self.between = self._between() if clues.gap else set()

    def nearness(self, number: int) -> tuple[int, int]:
        """Place in the order of nearness, and depth."""
        statement = self.program.statements[number]
        if statement.only_tells or isinstance(statement.node, (ast.Import, ast.ImportFrom, ast.Pass)):
            return _ORDER.index(Nearness.ELSEWHERE), 0
        if number in self.recorded:
            return _ORDER.index(Nearness.RECORDED), 0
        if number in self.computes:
            return _ORDER.index(Nearness.COMPUTES), 0
        if number in self.built:
            return _ORDER.index(Nearness.BUILDS), 1
        if number in self.depths:
            return _ORDER.index(Nearness.BUILDS), 1 + self.depths[number]
        if number in self.between:
            return _ORDER.index(Nearness.BETWEEN), 0
        return _ORDER.index(Nearness.ELSEWHERE), 0

    # --- the code that computes a place, by reason

    def _seeds(self, reason: str) -> set[int]:
        return _SEEDS_OF.get(reason, _Side._everything)(self)

    def _forward(self) -> set[int]:
        """The forward of the innermost module that is the user's own, what it calls, and what is named beside it."""
        program, clues = self.program, self.clues
        known = next((name for name in clues.classes if program.methods(name, "forward", "__call__")), "")
        if not known:
            return set()
        if clues.reason == "module" and known != clues.classes[0]:
            return set()  # a module of a library: what builds it is meant, and not what calls it
        places = program.methods(known, "forward", "__call__", "training_step", "backward")
        found = program.within(program.reached(places))
        return self._window(found, places)

    def _window(self, found: set[int], places: set[tuple[str, str]]) -> set[int]:
        """Of a forward, what does not come after the call of the module that differs first."""
        program, before = self.program, self.clues.before
        calls = [
            number
            for number in program.within(places)
            if before and before in program.statements[number].calls and not program.statements[number].around
        ]
        if len(calls) != 1 or len(places) != 1:
            return found
        call = program.statements[calls[0]]
        after = {n for n in program.within(places) if program.statements[n].first > call.last}
        return found - after

    def _backward(self) -> set[int]:
        program = self.program
        cuts = program.calling(_CUTS)
        own = program.within(program.reached(self._methods(("forward", "__call__", "backward"))))
        return own | cuts | self._loss()

    def _methods(self, names: tuple[str, ...]) -> set[tuple[str, str]]:
        return {place for name in self.clues.classes for place in self.program.methods(name, *names)}

    def _loss(self) -> set[int]:
        """What gives `backward` its loss: the statements of the same function, and the functions that these call."""
        program = self.program
        starts = program.calling({"backward", "manual_backward", "scale", "grad"})
        starts |= {
            number
            for place in program.by_place
            if place[1].endswith(("training_step", "compute_loss"))
            for number in program.by_place[place]
        }
        near = program.behind(starts, self.clues.models, most=4)
        return {number for number in near if not self._of_a_module(program.statements[number].scope)}

    def _of_a_module(self, scope: str) -> bool:
        return scope.endswith((".forward", ".__init__"))

    def _script(self) -> set[int]:
        """What is between the loader and the call of the model."""
        program, clues = self.program, self.clues
        calls = program.calling(clues.models)
        near = program.behind(calls, clues.models, most=3)
        return {number for number in near if not self._of_a_module(program.statements[number].scope)} | self._batch()

    def _batch(self) -> set[int]:
        program = self.program
        classes = [
            name
            for name, every in program.classes.items()
            for _, _, bases in every
            if _DATA_CLASS.search(name) or any(map(_DATA_CLASS.search, bases)) or program.methods(name, "__getitem__")
        ]
        places = {
            (file, scope)
            for name in classes
            for file, qualified, _ in program.classes[name]
            for file_of, scope in program.by_place
            if file == file_of and (scope == qualified or scope.startswith(f"{qualified}."))
        }
        loaders = {
            number for name, numbers in program.callers.items() if _DATA_CLASS.search(name) for number in numbers
        }
        handed = {
            place
            for number in loaders
            for _, name in program.statements[number].uses
            for place in program.functions.get(name, ())
        }
        return program.within(program.reached(places | handed)) | loaders

    def _random(self) -> set[int]:
        return self.program.calling(_SEEDS)

    def _initial(self) -> set[int]:
        program, clues = self.program, self.clues
        places = program.reached(self._methods(("__init__", "reset_parameters", "_init_weights", "init_weights")))
        named = {n for name, numbers in program.callers.items() if _INITIALISES.search(name) for n in numbers}
        functions = {place for name, every in program.functions.items() if _INITIALISES.search(name) for place in every}
        del clues
        return program.within(places | functions) | named | program.calling(_SEEDS | _CASTS)

    def _optimizer(self) -> set[int]:
        """Where optimizers and schedules are built and stepped; the step of one that is the user's own."""
        program, clues = self.program, self.clues
        names = {*clues.optimizers, *(name for name in program.callers if _SCHEDULE.search(name))}
        own = program.within(program.reached({p for name in clues.optimizers for p in program.methods(name, "step")}))
        steps = {
            number
            for number in program.calling({"step", "update", "step_update", "get_lr", "add_param_group"})
            if any(_STEPS.search(name) for _, name in program.statements[number].uses)
        }
        groups = {key for key in program.definers if key[0] == "." and key[1] in clues.words}
        return program.calling(names) | own | steps | {n for key in groups for n in program.definers[key]}

    def _gradient(self) -> set[int]:
        """What stands between `backward` and the optimizer's step, and what clears, clips or scales gradients."""
        program = self.program
        found = program.calling(_AFTER_BACKWARD)
        for numbers in program.by_place.values():
            own = [program.statements[number] for number in numbers]
            starts = [s.first for s in own if "backward" in s.calls]
            ends = [s.last for s in own if "step" in s.calls]
            if starts and ends:
                found |= {s.number for s in own if min(starts) <= s.first <= max(ends)}
        inside = program.reached(
            place
            for number in found
            for name in program.statements[number].calls
            for place in program.called(name, program.statements[number].place)
        )
        grads = set(program.definers.get((".", "grad"), ()))
        return found | program.within(inside) | grads

    def _structure(self) -> set[int]:
        program, words = self.program, self.clues.words
        own = program.within(program.reached(self._methods(("__init__", "forward"))))
        named = {n for word in words for n in (*program.callers.get(word, ()), *program.definers.get((".", word), ()))}
        return own | named

    def _outside(self) -> set[int]:
        program = self.program
        calls = {n for name, numbers in program.callers.items() if _IN_PLACE.fullmatch(name) for n in numbers}
        return calls | set(program.definers.get((".", "data"), ())) | self._resumed()

    def _resumed(self) -> set[int]:
        return self.program.calling(_LOADS)

    def _buffer(self) -> set[int]:
        return self._forward() | self._outside()

    def _collective(self) -> set[int]:
        return self._gradient() | self.program.calling(_COLLECTIVES)

    def _everything(self) -> set[int]:
        return set()

    # --- what builds it

    def _built(self) -> set[int]:
        """Where the modules that it is about are built and set up."""
        program, clues = self.program, self.clues
        if clues.reason not in _OF_MODULES:
            return set()
        found: set[int] = set()
        for name, attribute in zip(clues.classes[:2], clues.attributes, strict=False):
            calls = set(program.callers.get(name, ()))
            named = {n for n in program.definers.get((".", attribute), ()) if n in calls}
            found |= named or calls
            found |= program.within(program.reached(program.methods(name, "__init__")))
            found |= {n for place in program.by_place for n in program.by_place[place] if place[1] == name}
            if clues.reason == "module":
                break
        found |= program.calling(_MODES) if clues.words & {"training", "train"} else set()
        found |= program.calling(_CASTS) if "dtype" in clues.words else set()
        return set(program.behind(found, clues.models, most=4))

    def _between(self) -> set[int]:
        """What else a gap leaves open."""
        program = self.program
        found = self._loss() | self._gradient() | self._optimizer()
        for name in program.classes:
            found |= program.within(program.reached(program.methods(name, "forward")))
        return found


_OF_MODULES = frozenset({"module", "own_code", "op", "buffer", "backward", "structure"})
_SEEDS_OF: dict[str, Callable[[_Side], set[int]]] = {
    "module": _Side._forward,  # noqa: SLF001 - a table of the class's own methods
    "own_code": _Side._forward,  # noqa: SLF001
    "op": _Side._forward,  # noqa: SLF001
    "backward": _Side._backward,  # noqa: SLF001
    "loss": _Side._loss,  # noqa: SLF001
    "script": _Side._script,  # noqa: SLF001
    "batch": _Side._batch,  # noqa: SLF001
    "rng": _Side._random,  # noqa: SLF001
    "initial": _Side._initial,  # noqa: SLF001
    "optimizer": _Side._optimizer,  # noqa: SLF001
    "gradient": _Side._gradient,  # noqa: SLF001
    "structure": _Side._structure,  # noqa: SLF001
    "outside": _Side._outside,  # noqa: SLF001
    "resumed": _Side._resumed,  # noqa: SLF001
    "buffer": _Side._buffer,  # noqa: SLF001
    "collective": _Side._collective,  # noqa: SLF001
    "parts": _Side._collective,  # noqa: SLF001
}

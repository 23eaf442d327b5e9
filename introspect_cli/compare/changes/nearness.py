"""How near a statement of a version is to the place where the runs diverge, by names.

The code that computes a place is known by name: the forward of a module and what it calls, the loss before `backward`,
what stands between `backward` and the optimizer's step, the data set, the seeds.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from introspect_cli.compare.changes.clues import ORDER, Clues, Nearness
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from introspect_cli.compare.changes.program import Program


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SEEDS = _words(
    """
    manual_seed manual_seed_all seed seed_everything set_seed Generator default_rng RandomState set_state
    set_rng_state setstate fork_rng initial_seed
    """
)
_DRAWS = _words(
    """
    rand randn randint randperm rand_like randn_like normal_ uniform_ bernoulli multinomial kaiming_uniform_
    kaiming_normal_ xavier_uniform_ xavier_normal_ trunc_normal_ orthogonal_ random_ exponential_ shuffle choice
    random normal uniform dropout permutation sample
    """
)
_INITIALISES = re.compile(
    r"(?<!_)init|_init_|_init\Z|reset_parameters|_weights\Z|constant_|zeros_|ones_|fill_|copy_|load_state_dict|from_pretrained"
    r"|(normal|uniform|orthogonal|sparse|eye|dirac)_\Z"
)
_CASTS = _words("to half bfloat16 float double autocast type set_default_dtype cuda cpu")
_MODES = _words("train eval no_grad inference_mode requires_grad_ compile set_grad_enabled")
_CUTS = _words("detach requires_grad_ no_grad checkpoint register_hook backward apply retain_grad")
_AFTER_BACKWARD = _words(
    """
    clip_grad_norm_ clip_grad_value_ unscale_ zero_grad no_sync all_reduce register_hook backward scale
    register_post_accumulate_grad_hook update register_comm_hook clip_gradients manual_backward
    DDP DistributedDataParallel FSDP FullyShardedDataParallel fully_shard
    """
)
_LOADS = _words("load_state_dict load from_pretrained load_checkpoint")
_SAVES = _words("state_dict save save_file save_pretrained save_checkpoint")
_IN_PLACE = re.compile(r"[a-z]\w*_\Z|load_state_dict|update_parameters|vector_to_parameters|set_\Z")
_SCHEDULE = re.compile(r"LR$|Scheduler|scheduler|Schedule|Warm|swa", re.IGNORECASE)
_STEPS = re.compile(r"sched|warm|lr", re.IGNORECASE)
_DATA_CLASS = re.compile(r"Data[Ss]et|Sampler|Loader|DataModule|DataPipe|Collat")
_LOSS = re.compile(r"loss|entropy|nll", re.IGNORECASE)
_COLLECTIVES = _words("all_reduce all_gather reduce_scatter broadcast barrier send recv scatter")


def _merged(*found: Mapping[int, int]) -> dict[int, int]:
    """Statements of several kinds, each with the least that lies between."""
    least: dict[int, int] = {}
    for numbers in found:
        for number, depth in numbers.items():
            least[number] = min(least.get(number, depth), depth)
    return least


class Version:
    """One version, and how near each of its statements is to the divergence."""

    def __init__(
        self,
        program: Program,
        clues: Clues,
        named: Iterable[tuple[str, int]],
        spans: Iterable[tuple[str, int, int]] = (),
    ) -> None:
        self.program, self.clues = program, clues
        built = [program.statements[number] for number in program.calling(clues.roots)]
        named = [*named]
        self.models = clues.models | {key[1] for one in built for key in one.defines if key[0] not in {".", "="}}
        self.recorded = {number for file, line in named for number in program.at(file, line, line)}
        self.computes = _COMPUTES[clues.reason](self) if clues.reason in _COMPUTES else {}
        seeds = [*self.recorded, *self.computes]
        leading = self._leading() if clues.reason in {"rng", "initial"} else {}
        self.builds = _merged(program.behind([*seeds, *self._built()], self.models), leading)
        self.between = self.program.loop() if clues.reason in _OF_STEPS or clues.gap else set()
        if clues.gap or clues.reason == "propagated":
            self.between |= {*self.loss(), *self.gradient(), *self.optimizer(), *self.program.forwards()}
            self.between |= program.calling(_MODES)
        self.between |= {n for file, first, last in spans for n in program.at(file, first + 1, last)}

    def nearness(self, number: int) -> tuple[int, int]:
        """Place in the order of nearness, and depth."""
        statement = self.program.statements[number]
        if statement.only_tells or isinstance(statement.node, (ast.Import, ast.ImportFrom, ast.Pass)):
            return ORDER.index(Nearness.ELSEWHERE), 0
        if number in self.recorded:
            return ORDER.index(Nearness.RECORDED), 0
        more = self.program.is_conditional(statement.place)
        if number in self.computes:
            return ORDER.index(Nearness.COMPUTES), self.computes[number] + more
        if number in self.builds:
            return ORDER.index(Nearness.BUILDS), self.builds[number] + more
        return ORDER.index(Nearness.BETWEEN if number in self.between else Nearness.ELSEWHERE), 0

    # --- the code that computes a place, by reason: statements by number, with how many calls or values lie between

    def raised(self) -> dict[int, int]:
        """The function whose line raised, and what it calls."""
        return self.program.within({self.program.statements[number].place for number in self.recorded})

    def _calling(self, names: Iterable[str], depth: int = 0) -> dict[int, int]:
        return dict.fromkeys(self.program.calling(names), depth)

    def _methods(self, names: tuple[str, ...], without: int = 0) -> dict[int, int]:
        """Statements of these methods of the modules that it is about, but for so many, the innermost first."""
        every = [self.program.within(self.program.methods(name, *names)) for name in self.clues.classes[without:]]
        return _merged(*({n: depth + more for n, more in found.items()} for depth, found in enumerate(every)))

    def forward(self) -> dict[int, int]:
        """The forward of the innermost module that is the user's own, and what it calls."""
        program, clues = self.program, self.clues
        known = next((name for name in clues.classes if program.methods(name, "forward", "__call__")), "")
        casts = self._calling(_CASTS) if "dtype" in clues.words else {}
        if not known or (clues.reason in {"module", "buffer"} and known != clues.classes[0]):
            return casts  # a module of a library: what builds it is meant, and not what calls it
        places = program.methods(known, "forward", "__call__", "training_step", "backward")
        return _merged(casts, program.up_to(clues.before, places))

    def backward(self) -> dict[int, int]:
        """What a backward pass runs through, and what cuts it."""
        own = self._methods(("forward", "__call__", "backward"))
        return _merged({number: depth + 2 for number, depth in self.loss().items()}, own, self._calling(_CUTS))

    def loss(self) -> dict[int, int]:
        """What gives `backward` its loss, from what the model was given and gave on."""
        program = self.program
        starts = program.calling({"backward", "manual_backward", "scale", "grad"})
        ends = [place for place in program.by_place if place[1].endswith(("training_step", "compute_loss"))]
        starts |= {number for place in ends for number in program.by_place[place]}
        found = self._outside_of_modules(program.behind(starts, self.models | program.given(self.models), most=5))
        made = [n for name, numbers in program.callers.items() if _LOSS.search(name) for n in numbers]
        near = {program.statements[number].place for number in made}
        near -= {program.statements[number].place for number in starts}
        if self.clues.batch_is_equal:
            data = self.batch()
            found = {number: depth for number, depth in found.items() if number not in data}
        found = {n: 0 if program.statements[n].place in near else depth for n, depth in found.items()}
        return _merged(found, self.program.forwards()) if self.clues.gap and self.clues.reason == "loss" else found

    def _outside_of_modules(self, found: dict[int, int]) -> dict[int, int]:
        ends = (".forward", ".__init__")
        return {n: depth for n, depth in found.items() if not self.program.statements[n].scope.endswith(ends)}

    def script(self) -> dict[int, int]:
        """What is between the loader and the call of the model."""
        program, clues = self.program, self.clues
        near = program.behind(program.calling(self.models), self.models, most=4)
        data = {} if clues.batch_is_equal else {number: depth + 3 for number, depth in self.batch().items()}
        return _merged(data, self._outside_of_modules(near))

    def batch(self) -> dict[int, int]:
        """The data set's classes, what a loader is built with, and the functions that are handed to it."""
        program = self.program
        classes = {
            qualified: (file, name)
            for name, every in program.classes.items()
            for file, qualified, bases in every
            if _DATA_CLASS.search(name) or any(map(_DATA_CLASS.search, bases)) or program.methods(name, *_GETS)
        }
        own = {
            place: 0 if place[1].endswith(_GETS) else 2
            for place in program.by_place
            for qualified, (file, _) in classes.items()
            if place[0] == file and (place[1] == qualified or place[1].startswith(f"{qualified}."))
        }
        loaders = {n for name, numbers in program.callers.items() if _DATA_CLASS.search(name) for n in numbers}
        handed = {
            place
            for number in loaders
            for _, name in program.statements[number].uses
            for place in program.functions.get(name, ())
            if not place[1].endswith(".__init__")
        }
        reached = [
            {number: depth + more for number, more in program.within([place]).items()}
            for place, depth in {**own, **dict.fromkeys(handed, 1)}.items()
        ]
        return _merged(dict.fromkeys(loaders, 0), self._calling({"set_epoch"}), *reached)

    def random(self) -> dict[int, int]:
        """Seeds and draws."""
        draws = self.program.calling(_DRAWS)
        in_steps = {} if self.clues.at_start else dict.fromkeys(draws & self.program.loop(), 0)
        modes = {"train", "eval"} if not self.clues.at_start else set()  # an evaluation draws in training mode
        called = self._calling(_MODES | self.models if "train" in self.clues.words else modes, 1)
        return _merged(dict.fromkeys(draws, 1), self._calling(_SEEDS), in_steps, called)

    def initial(self) -> dict[int, int]:
        """What gives parameters their first values."""
        program = self.program
        named = {n for name, numbers in program.callers.items() if _INITIALISES.search(name) for n in numbers}
        initialises = [name for name in program.functions if _INITIALISES.search(name) and not name.startswith("__")]
        functions = [place for name in initialises for place in program.functions[name]]
        named |= {number for place in functions for number in program.callers_of(place)}
        own = self._methods(("__init__", "reset_parameters", "_init_weights", "init_weights"))
        casts = self._calling(_CASTS) if "dtype" in self.clues.words else {}
        more = self._calling(_SEEDS, 2), self._calling({"train", "eval"} & self.clues.words, 1)
        return _merged(dict.fromkeys(named, 1), program.within(functions), own, self._touching(), casts, *more)

    def _touching(self) -> dict[int, int]:
        """What changes a tensor of its name in place, outside of a forward."""
        program = self.program
        found = {
            number
            for number in program.definers.get((".", self.clues.tensor), ())
            if not program.statements[number].scope.endswith(".forward")
        }
        inner = {number for number in found for number in program.statements[number].around}
        return _merged(dict.fromkeys(inner, 1), dict.fromkeys(found, 0))

    def optimizer(self) -> dict[int, int]:
        """Where optimizers and schedules are built and stepped; the step of one that is the user's own."""
        program, clues = self.program, self.clues
        names = {*clues.optimizers, *(name for name in program.callers if _SCHEDULE.search(name))}
        own = program.within({place for name in clues.optimizers for place in program.methods(name, "step")})
        steps = {
            number
            for number in program.calling({"step", "update", "step_update", "get_lr", "add_param_group"})
            if any(_STEPS.search(name) for _, name in program.statements[number].uses)
        }
        groups = [key for key in program.definers if key[0] in {".", "="} and key[1] in clues.words]
        found = {number for key in groups for number in program.definers[key]}
        return _merged(dict.fromkeys(found | steps, 0), own, self._calling(names))

    def gradient(self) -> dict[int, int]:
        """What stands between `backward` and the optimizer's step, and what clears, clips or scales gradients."""
        program = self.program
        found = program.calling(_AFTER_BACKWARD) | set(program.definers.get((".", "grad"), ()))
        for numbers in program.by_place.values():
            own = [program.statements[number] for number in numbers]
            starts = [one.first for one in own if "backward" in one.calls]
            ends = [one.last for one in own if "step" in one.calls]
            if starts and ends:
                found |= {one.number for one in own if min(starts) <= one.first <= max(ends)}
        inside = [
            place
            for number in found
            for name in program.statements[number].calls
            for place in program.called(name, program.statements[number].place)
        ]
        collectives = self._calling(_COLLECTIVES) if self.clues.reason in {"collective", "parts"} else {}
        return _merged(
            {n: depth + 1 for n, depth in program.within(inside).items()}, dict.fromkeys(found, 0), collectives
        )

    def structure(self) -> dict[int, int]:
        """By what one run only has: a gradient is cut, an optimizer lacks a parameter, a module is built or called."""
        program, clues = self.program, self.clues
        if clues.kind in _GRADIENTS:
            cut = dict.fromkeys(program.definers.get((".", "requires_grad"), ()), 0)
            return _merged(dict.fromkeys(self.optimizer(), 1), self.gradient(), self._calling(_CUTS), cut)
        if clues.kind in {Kind.OPTIMIZER_STATE, Kind.HYPERPARAMETER}:
            return _merged(self.optimizer(), self._touching())
        named = {n for word in clues.words for n in program.callers.get(word, ())}
        named |= {n for word in clues.words for n in program.definers.get((".", word), ())}
        if clues.kind in {Kind.PARAM, Kind.BUFFER}:
            return _merged(self._methods(("__init__",)), self._touching(), dict.fromkeys(named, 0), self._assigned())
        calls = self._outside_of_modules(program.behind(program.calling(self.models), self.models, most=2))
        if len(clues.classes) < 2:  # the script calls it
            return _merged(calls, dict.fromkeys(named, 0))
        inside = {number: depth + 2 for number, depth in self._methods(("__init__",), 1).items()}
        return _merged(inside, self._methods(("forward",), 1), calls, dict.fromkeys(named, 0), self._assigned())

    def _assigned(self) -> dict[int, int]:
        """What gives the module that it is about to the one around it: before all else."""
        program, clues = self.program, self.clues
        if len(clues.classes) < 2:
            return {}
        owners = [f"{file}:{name}.self" for file, name, _ in program.classes.get(clues.classes[1], ())]
        return {number: -1 for owner in owners for number in program.definers.get((owner, clues.attributes[0]), ())}

    def outside(self) -> dict[int, int]:
        """What writes to tensors in place."""
        program = self.program
        calls = {n for name, numbers in program.callers.items() if _IN_PLACE.fullmatch(name) for n in numbers}
        written = dict.fromkeys([*calls, *program.definers.get((".", "data"), ())], 1)
        written = {n: depth for n, depth in written.items() if not program.statements[n].scope.endswith(".forward")}
        return _merged(self.resumed(), written, self._touching())

    def resumed(self) -> dict[int, int]:
        """What loads a checkpoint, and what saved it."""
        return _merged(self._calling(_SAVES, 1), self._calling(_LOADS))

    def saved(self) -> dict[int, int]:
        """What is saved, what gives it its values, and calls that are handed it and may change it."""
        program = self.program
        saves = program.calling(_SAVES)
        used = {key for number in saves for key in program.statements[number].uses if key[0] not in {".", "="}}
        names = used & program.definers.keys()  # an import defines nothing
        given = {s.number for s in program.statements if isinstance(s.node, ast.Expr) and s.uses & names}
        return program.behind({*saves, *given} - {n for n in given if program.statements[n].only_tells}, most=4)

    def buffer(self) -> dict[int, int]:
        """What a module computes, and what writes in place."""
        return _merged({number: depth + 1 for number, depth in self.outside().items()}, self.forward())

    # --- what builds it, and what else runs in a step

    def _leading(self) -> dict[int, int]:
        """What calls the functions in which the lines on record stand, or hands them on to be called."""
        program, found = self.program, dict[int, int]()
        edge = {program.statements[number].place for number in self.recorded}
        for depth in range(1, _MOST_CALLS):
            callers = [number for place in edge for number in program.callers_of(place) if number not in found]
            found |= dict.fromkeys(callers, depth)
            edge = {program.statements[number].place for number in callers}
        return found

    def _built(self) -> set[int]:
        """Where the modules that it is about are built and set up."""
        program, clues = self.program, self.clues
        if clues.reason in {"rng", "initial", "structure"}:
            return program.calling(clues.roots) | program.calling(clues.classes)
        if clues.reason == "optimizer":
            return program.calling(_LOADS)
        if clues.reason == "loss":
            return program.calling({name for name in clues.roots if _LOSS.search(name)})
        if clues.reason not in _OF_MODULES:
            return set()
        found: set[int] = set()
        for name, attribute in zip(clues.classes[:2], clues.attributes, strict=False):
            calls = set(program.callers.get(name, ()))
            named = {n for n in program.definers.get((".", attribute), ()) if n in calls}  # `self.drop = nn.Dropout()`
            found |= named or calls
            found |= set(program.within(program.methods(name, "__init__")))
            found |= {n for place in program.by_place for n in program.by_place[place] if place[1] == name}
            if clues.reason == "module":
                break
        return found | (program.calling(_MODES) if clues.words & {"training", "train"} else set())


_MOST_CALLS = 5
_GETS = ("__getitem__", "__iter__", "__getitems__", "__next__")
_GRADIENTS = frozenset({Kind.GRAD_INPUT, Kind.GRAD_OUTPUT, Kind.GRAD})
_OF_MODULES = _words("module own_code op buffer backward")
_OF_STEPS = _words("rng structure outside initial script gradient resumed propagated optimizer")
"""Reasons for which all that a step runs is between the last record that agreed and the first that did not."""
_COMPUTES: dict[str, Callable[[Version], dict[int, int]]] = {
    "module": Version.forward,
    "own_code": Version.forward,
    "op": Version.forward,
    "backward": Version.backward,
    "loss": Version.loss,
    "script": Version.script,
    "batch": Version.batch,
    "rng": Version.random,
    "initial": Version.initial,
    "optimizer": Version.optimizer,
    "gradient": Version.gradient,
    "structure": Version.structure,
    "outside": Version.outside,
    "product": Version.saved,
    "resumed": Version.resumed,
    "buffer": Version.buffer,
    "collective": Version.gradient,
    "raised": Version.raised,
    "parts": Version.gradient,
}

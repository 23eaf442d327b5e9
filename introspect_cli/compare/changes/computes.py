"""The code that computes a place, by the reason why runs diverge there: statements, with what lies between.

It is known by name: the forward of a module and what it calls, the loss before `backward`, what stands between
`backward` and the optimizer's step, the data set, the seeds.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from introspect_cli.compare.changes.clues import Clues
    from introspect_cli.compare.changes.parsed import Statement
    from introspect_cli.compare.changes.program import Depths, Program


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


_SEEDS = words(
    """
    manual_seed manual_seed_all seed seed_everything set_seed Generator default_rng RandomState set_state
    set_rng_state setstate fork_rng initial_seed
    """
)
_DRAWS = words(
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
_CASTS = words("to half bfloat16 float double autocast type set_default_dtype cuda cpu")
MODES = words("train eval no_grad inference_mode requires_grad_ compile set_grad_enabled")
_CUTS = words("detach requires_grad_ no_grad checkpoint register_hook backward apply retain_grad")
_AFTER_BACKWARD = words(
    """
    clip_grad_norm_ clip_grad_value_ unscale_ zero_grad no_sync all_reduce register_hook backward scale
    register_post_accumulate_grad_hook update register_comm_hook clip_gradients manual_backward
    DDP DistributedDataParallel FSDP FullyShardedDataParallel fully_shard
    """
)
LOADS = words("load_state_dict load from_pretrained load_checkpoint")
_SAVES = words("state_dict save save_file save_pretrained save_checkpoint")
_IN_PLACE = re.compile(r"[a-z]\w*_\Z|load_state_dict|update_parameters|vector_to_parameters|apply|set_\Z")
_SCHEDULE = re.compile(r"LR$|Scheduler|scheduler|Schedule|Warm|swa", re.IGNORECASE)
_STEPS = re.compile(r"sched|warm|lr", re.IGNORECASE)
_DATA_CLASS = re.compile(r"Data[Ss]et|Sampler|Loader|DataModule|DataPipe|Collat")
LOSS = re.compile(r"loss|entropy|nll", re.IGNORECASE)
_BACKWARD = words("backward manual_backward")
_COLLECTIVES = words("all_reduce all_gather reduce_scatter broadcast barrier send recv scatter")


def merged(*parts: Depths) -> Depths:
    """Statements of several kinds, each with the least that lies between."""
    least: Depths = {}
    for depths in parts:
        for statement, depth in depths.items():
            least[statement] = min(least.get(statement, depth), depth)
    return least


def farther(depths: Depths, more: int) -> Depths:
    """The same statements with more between."""
    return {statement: depth + more for statement, depth in depths.items()}


def _outside(depths: Depths, *ends: str) -> Depths:
    """Statements but those in methods with such names."""
    return {statement: depth for statement, depth in depths.items() if not statement.scope.endswith(ends)}


@dataclass(frozen=True)
class CodePlace:
    """The place where the runs diverge, in one version.

    Attributes:
        recorded: statements that the records name.
        models: what the script calls its models.
    """

    program: Program
    clues: Clues
    recorded: frozenset[Statement]
    models: frozenset[str]

    def calling(self, names: Iterable[str], depth: int = 0) -> Depths:
        """Statements that call something of one of these names."""
        return dict.fromkeys(self.program.calling(names), depth)

    def defining(self, name: str, depth: int = 0) -> Depths:
        """Statements that give an attribute of a name to anything."""
        return dict.fromkeys(self.program.definers.get((".", name), ()), depth)

    def methods(self, *names: str, without: int = 0) -> Depths:
        """Statements of these methods of the modules that it is about, but for so many, the innermost first."""
        program = self.program
        every = [program.within(program.methods(name, *names)) for name in self.clues.classes[without:]]
        return merged(*(farther(depths, depth) for depth, depths in enumerate(every)))

    def casts(self) -> Depths:
        """What chooses a memory format, and what casts tensors, where the runs have another dtype there."""
        formats = dict.fromkeys(self.program.definers.get(("=", "memory_format"), ()), 2)
        return merged(formats, self.calling(_CASTS) if "dtype" in self.clues.words else {})

    def to_models(self, most: int) -> Depths:
        """What gives the models their values, outside of modules."""
        depths = self.program.behind(self.program.calling(self.models), self.models, most=most)
        return _outside(depths, *_OF_MODULES)


def raised(at: CodePlace) -> Depths:
    """The function whose line raised, and what it calls."""
    return at.program.within({statement.place for statement in at.recorded})


def forward(at: CodePlace) -> Depths:
    """The forward of the innermost module that is the user's own, and what it calls."""
    program, clues = at.program, at.clues
    innermost = next((name for name in clues.classes if program.methods(name, "forward", "__call__")), "")
    if not innermost or (clues.reason in {"module", "buffer"} and innermost != clues.classes[0]):
        return at.casts()  # a module of a library: what builds it is meant, and not what calls it
    places = program.methods(innermost, "forward", "__call__", "training_step", "backward")
    unseen = (program.within(program.methods(name, "forward", "__call__")) for name in clues.inside)
    return merged(at.casts(), program.up_to(clues.before, places), *(farther(depths, 1) for depths in unseen))


def backward(at: CodePlace) -> Depths:
    """What a backward pass runs through, and what cuts it."""
    return merged(farther(loss(at), 2), at.methods("forward", "__call__", "backward"), at.calling(_CUTS))


def loss(at: CodePlace) -> Depths:
    """What gives `backward` its loss, from what the model was given and gave on."""
    program = at.program
    starts = program.calling({*_BACKWARD, "scale", "grad"})
    ends = [place for place in program.by_place if place[1].endswith(("training_step", "compute_loss"))]
    starts |= {statement for place in ends for statement in program.by_place[place]}
    depths = program.behind(starts, at.models | program.given(at.models), most=5)
    near = {statement.place for statement in program.calling_like(LOSS)} - {giver.place for giver in starts}
    data = batch(at) if at.clues.batch_is_equal else {}
    trains = {giver.place for giver in program.calling(_BACKWARD)}  # a forward that trains is none of those left out
    depths = {
        giver: 0 if giver.place in near else depth
        for giver, depth in depths.items()
        if giver not in data and (giver.place in trains or not giver.scope.endswith(_OF_MODULES))
    }
    if not at.clues.gap or at.clues.reason != "loss":
        return depths
    return merged(depths, program.forwards(), {} if data else farther(batch(at), 2))


def script(at: CodePlace) -> Depths:
    """What is between the loader and the call of the model."""
    return merged({} if at.clues.batch_is_equal else farther(batch(at), 3), at.to_models(4))


def batch(at: CodePlace) -> Depths:
    """The data set's classes, what a loader is built with, and the functions that are handed to it."""
    program = at.program
    classes = {
        (file, qualified)
        for name, every in program.classes.items()
        for file, qualified, bases in every
        if any(map(_DATA_CLASS.search, (name, *bases))) or program.methods(name, *_GETS)
    }
    inside = {
        place: 0 if place[1].endswith(_GETS) else 2
        for place in program.by_place
        for file, name in classes
        if place == (file, name) or (place[0] == file and place[1].startswith(f"{name}."))
    }
    loaders = program.calling_like(_DATA_CLASS)
    handed = {
        place
        for statement in loaders
        for _, name in statement.uses
        for place in program.functions.get(name, ())
        if not place[1].endswith(".__init__")
    }
    transforms = {
        place
        for statement in program.behind(loaders, most=3)
        for name in program.classes.keys() & {*statement.calls}
        for place in program.methods(name, "__call__", "forward")
    }
    depths = {**dict.fromkeys(transforms, 1), **inside, **dict.fromkeys(handed, 1)}
    reached = [farther(program.within([place]), depth) for place, depth in depths.items()]
    drawn = random(at) if at.clues.words >= {"train", "eval"} else {}  # other numbers were drawn before the batch
    return merged(dict.fromkeys(loaders, 0), at.calling({"set_epoch"}), drawn, *reached)


def random(at: CodePlace) -> Depths:
    """Seeds and draws."""
    clues = at.clues
    at_start, is_known = clues.at_start, any(clues.lines) and not any(clues.spans)
    draws = set() if at_start and is_known else at.program.calling(_DRAWS)  # else their lines are on record
    in_steps = {} if at_start else dict.fromkeys(draws & at.program.loop(), 0)
    modes = set() if at_start else {"train", "eval"}  # an evaluation draws in training mode
    called = at.calling(MODES | at.models if "train" in clues.words else modes, 1)
    return merged(dict.fromkeys(draws, 1), at.calling(_SEEDS), in_steps, called)


def initial(at: CodePlace) -> Depths:
    """What gives parameters their first values."""
    program = at.program
    initialises = [name for name in program.functions if _INITIALISES.search(name) and not name.startswith("__")]
    functions = [place for name in initialises for place in program.functions[name]]
    named = program.calling_like(_INITIALISES).union(*map(program.callers_of, functions))
    made = at.methods("__init__", "reset_parameters", "_init_weights", "init_weights")
    more = at.calling(_SEEDS, 2), at.calling({"train", "eval"} & at.clues.words, 1)
    return merged(dict.fromkeys(named, 1), program.within(functions), made, _touching(at), at.casts(), *more)


def _touching(at: CodePlace) -> Depths:
    """What changes a tensor of its name in place, outside of a forward."""
    touching = _outside(at.defining(at.clues.tensor), ".forward")
    return merged(dict.fromkeys((head for statement in touching for head in statement.around), 1), touching)


def optimizer(at: CodePlace) -> Depths:
    """Where optimizers and schedules are built and stepped; the step of one that is the user's own."""
    program, clues = at.program, at.clues
    places = {place for name in clues.optimizers for place in program.methods(name, "step")}
    made_here = {every[:2] for of in program.classes.values() for every in of if "Optimizer" in every[2]}
    places |= {place for place in program.by_place if (place[0], place[1].rpartition(".")[0]) in made_here}
    steps = program.calling({"step", "update", "step_update", "get_lr", "add_param_group"})
    steps = {statement for statement in steps if any(_STEPS.search(name) for _, name in statement.uses)}
    groups = [key for key in program.definers if key[0] in {".", "="} and key[1] in clues.words]
    options = {statement for key in groups for statement in program.definers[key]}
    setting = {caller for statement in options for caller in program.callers_of(statement.place)}
    made = program.calling(clues.optimizers) | program.calling_like(_SCHEDULE)
    return merged(dict.fromkeys(setting, 1), dict.fromkeys(options | steps | made, 0), program.within(places))


def gradient(at: CodePlace) -> Depths:
    """What stands between `backward` and the optimizer's step, and what clears, clips or scales gradients."""
    program = at.program
    handling = program.calling(_AFTER_BACKWARD) | {*at.defining("grad")}
    for statements in program.by_place.values():
        starts = [statement.first for statement in statements if "backward" in statement.calls]
        ends = [statement.last for statement in statements if "step" in statement.calls]
        if starts and ends:
            handling |= {statement for statement in statements if min(starts) <= statement.first <= max(ends)}
    inside = [
        place for statement in handling for name in statement.calls for place in program.called(name, statement.place)
    ]
    collectives = at.calling(_COLLECTIVES) if at.clues.reason in {"collective", "parts"} else {}
    used = farther(at.methods("forward", "__call__"), 2)
    return merged(farther(program.within(inside), 1), dict.fromkeys(handling, 0), used, collectives)


def structure(at: CodePlace) -> Depths:
    """By what one run only has: a gradient is cut, an optimizer lacks a parameter, a module is built or called."""
    clues = at.clues
    if clues.kind in _GRADIENTS:
        cut = at.defining("requires_grad")
        return merged(dict.fromkeys(optimizer(at), 1), gradient(at), at.calling(_CUTS), cut)
    if clues.kind in {Kind.OPTIMIZER_STATE, Kind.HYPERPARAMETER}:
        return merged(optimizer(at), _touching(at))
    named = merged(at.calling(clues.words), *map(at.defining, clues.words))
    if clues.kind in {Kind.PARAM, Kind.BUFFER}:
        return merged(at.methods("__init__"), _touching(at), named, _assigned(at))
    calls = at.to_models(2)
    if len(clues.classes) < 2:  # the script calls it
        return merged(calls, named)
    inside = farther(at.methods("__init__", without=1), 2)
    return merged(inside, at.methods("forward", without=1), calls, named, _assigned(at))


def _assigned(at: CodePlace) -> Depths:
    """What gives the module that it is about to the one around it: before all else."""
    program, clues = at.program, at.clues
    if len(clues.classes) < 2:
        return {}
    owners = [f"{file}:{name}.self" for file, name, _ in program.classes.get(clues.classes[1], ())]
    return {statement: -1 for owner in owners for statement in program.definers.get((owner, clues.attributes[0]), ())}


def outside(at: CodePlace) -> Depths:
    """What writes to tensors in place; where a forward names the one that it changes, what it does with that."""
    inside = at.methods("forward", "__call__") if at.clues.reason == "by_hand" else {}
    if named := {statement: depth for statement, depth in inside.items() if statement.changes(at.clues.tensor)}:
        return named
    program = at.program
    written = at.calling(filter(_IN_PLACE.fullmatch, program.callers), 1) | at.defining("data", 1)
    written |= at.calling(MODES, 1) if at.clues.kind is Kind.BUFFER else {}  # a forward in train mode updates it
    hand = [each for each in program.statements if isinstance(each.node, ast.AugAssign) and each.around]
    handed = {each for each in hand if any("no_grad" in head.calls for head in each.around)}  # `p += eps * d`
    written |= program.behind(handed, at.models, most=3)
    return merged(resumed(at), _outside(written, ".forward"), _touching(at))


def resumed(at: CodePlace) -> Depths:
    """What loads a checkpoint, and what saved it."""
    return merged(at.calling(_SAVES, 1), at.calling(LOADS))


def saved(at: CodePlace) -> Depths:
    """What is saved, what gives it its values, and calls that are handed it and may change it."""
    program = at.program
    saves = program.calling(_SAVES)
    used = {key for statement in saves for key in statement.uses if key[0] not in {".", "="}}
    names = used & program.definers.keys()  # an import defines nothing
    given = {each for each in program.statements if isinstance(each.node, ast.Expr) and each.uses & names}
    return program.behind({*saves, *given} - {statement for statement in given if statement.only_tells}, most=4)


def buffer(at: CodePlace) -> Depths:
    """What a module computes, what writes in place, and calls that are handed the model and may change how it does."""
    program = at.program
    handed = {taker for name in at.models for taker in program.takers.get(name, ()) if isinstance(taker.node, ast.Expr)}
    return merged(farther(outside(at), 1), forward(at), dict.fromkeys(handed, 2))


_GETS = ("__getitem__", "__iter__", "__getitems__", "__next__")
_GRADIENTS = frozenset({Kind.GRAD_INPUT, Kind.GRAD_OUTPUT, Kind.GRAD})
_LOSSES = frozenset({Kind.LOSS, Kind.GRAD})
_OF_MODULES = (".forward", ".__init__")
COMPUTES: dict[str, Callable[[CodePlace], Depths]] = {
    **dict.fromkeys(("module", "own_code", "op"), forward),
    **dict.fromkeys(("gradient", "collective", "parts"), gradient),
    "backward": backward,
    "loss": loss,
    "script": script,
    "batch": batch,
    "rng": random,
    "initial": initial,
    "optimizer": optimizer,
    "structure": structure,
    **dict.fromkeys(("outside", "by_hand"), outside),
    "product": saved,
    "split": lambda at: merged(gradient(at), farther(loss(at), 1)) if at.clues.kind in _LOSSES else batch(at),
    "resumed": resumed,
    "buffer": buffer,
    "raised": raised,
}
"""The code that computes a place, by reason."""

"""Everything of python's and torch's that a capture watches, replaces or hooks: one table, and what puts it in place.

Where torch offers a hook, it is used. Where it does not, or where the hook changes what runs (global module hooks
switch torch.compile to another path and print a warning), a function is replaced on its class or module for as long as
the capture lasts. The dispatcher calls the method of the probe inside the probe's guard, with the arguments unchanged,
and calls nothing of it once the probe is switched off.
"""

from __future__ import annotations

import functools
import sys
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from introspect_cli.capture.guard import uncounted
from introspect_cli.capture.start import ImportWatch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from introspect_cli.capture.guard import Guarded

    Handler = Callable[["Call"], Callable[[Any], None] | None]


_WATCH, _AFTER, _REPLACE, _HOOK = "watch", "after", "replace", "hook"
"""What is done to an attribute:
- watch: it is called between two guarded sections: the method is given the call, what that returns the result.
- after: as `watch`, but the method is given call and result together, afterwards.
- replace: it is replaced by what the method makes of it.
- hook: it registers hooks; the method is one, guarded."""


class Event(NamedTuple):
    """One row of the table: attributes of one class or module, and the method that hears of their calls.

    Attributes:
        section: which rows are put in place together: the name of a probe, or of a part of one.
        homes: modules, each with a class after a colon; one that is not there is waited for, a class is passed over.
        names: the attributes, of any of them; with a star at its end, all that begin so.
        method: of the probe, by a dotted path.
        treatment: what is done, `_WATCH` and so on.
        group: rows of one group hear only of calls that are not made inside another of the group; "" for none.
        raised: whether what the method returned is given `RAISED` where the original raised.
    """

    section: str
    homes: str
    names: str
    method: str
    treatment: str = _WATCH
    group: str = ""
    raised: bool = False


class Call(NamedTuple):
    """A call of a watched function.

    Attributes:
        function: its module and name, such as `torch.autograd.backward`.
        args: its positional arguments.
        kwargs: its keyword arguments.
        frame: the caller's.
    """

    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    frame: FrameType

    @property
    def name(self) -> str:
        """Name of the function without its module and class, such as `backward`."""
        return self.function.rpartition(".")[2]

    @property
    def first(self) -> Any:
        """The first positional argument, else the first keyword's; None without any."""
        return next(iter((*self.args, *self.kwargs.values())), None)

    def given(self, position: int, name: str) -> Any:
        """The argument at a position, from 0, else the one of that name; None where neither was given."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name)


RAISED = object()
"""Result of a function that raised."""
DRAWS = "draws"
"""Group of the functions that seed generators and draw from them."""
_MISSING = object()
_INITIALISERS = (
    "uniform_ normal_ trunc_normal_ xavier_uniform_ xavier_normal_ kaiming_uniform_ kaiming_normal_ orthogonal_ sparse_"
)
_DRAWING = "uniform_ normal_ random_ bernoulli_ exponential_ cauchy_ log_normal_ geometric_"
"""Methods of tensors that draw."""
FUNCTIONAL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
"""Beginnings of torch's functional collectives, whose endings differ between versions."""
FUNCTIONALS = "functional collectives"
"""Group of the functions that end in operators, inside of which these are not recorded again."""
_OPTIMIZER, _MODULE, _DATA, _SCHEDULER = (
    "torch.optim.optimizer", "torch.nn.modules.module", "torch.utils.data", "torch.optim.lr_scheduler",
)  # fmt: skip

_BUILT = (
    f"{_DATA}:DataLoader {_SCHEDULER}:LRScheduler {_SCHEDULER}:ReduceLROnPlateau {_SCHEDULER}:SequentialLR "
    f"{_SCHEDULER}:ChainedScheduler torch.amp:GradScaler"
)

EVENTS = (
    # without them the script sees our frames in what it prints
    Event("interpreter", "traceback", "walk_tb _walk_tb_with_full_positions", "walker_of_tracebacks", _REPLACE),
    Event("interpreter", "traceback", "walk_stack", "walker_of_stacks", _REPLACE),
    # ... a handler raises in a capture's code, and the script sees our handlers
    Event("interpreter", "signal", "signal getsignal", "of_handlers", _REPLACE),
    # files that the script reads, and those that libraries open in C
    Event("files", "builtins io", "open", "opener", _REPLACE),
    Event("files", "pyarrow safetensors.torch", "memory_map load_file", "watch_library_read"),
    Event("files", "pyarrow.parquet:ParquetFile pyarrow.parquet:ParquetDataset h5py:File", "__init__",
          "watch_library_read"),
    # children that train unseen, and those that are ranks of one run
    Event("children", "multiprocessing.process:BaseProcess", "start", "_watch_start"),
    Event("spawned", "torch.multiprocessing.spawn torch.multiprocessing", "start_processes", "_watch_spawn",
          raised=True),
    # that a run goes on from a checkpoint
    Event("beginning", "torch", "load", "_note_read_file"),
    # which parameter is initialised otherwise, and at which line something else has drawn
    Event("early draws", "torch.nn.init", _INITIALISERS, "_watch_fill", group=DRAWS, raised=True),
    Event("early draws", "torch:Tensor", _DRAWING, "_watch_fill", group=DRAWS, raised=True),
    Event("early draws", _MODULE, "register_module_parameter_registration_hook", "_note_registration", _HOOK),
    # seeds of the script's own generators
    Event("early draws", "random:Random", "seed", "_note_new_generator", _AFTER, group=DRAWS),
    Event("early draws", "numpy.random", "default_rng", "_note_new_generator", _AFTER, group=DRAWS),
    # that a state was set, not drawn from
    Event("seedings", "torch torch.random torch.cuda", "manual_seed manual_seed_all set_rng_state", "_watch_setting",
          group=DRAWS, raised=True),
    Event("seedings", "random numpy.random", "seed setstate set_state", "_watch_setting", group=DRAWS, raised=True),
    # with which parameters a model runs
    Event("state", "torch.nn.utils.stateless", "_functional_call", "_watch_swap", raised=True),
    # what loaders, schedulers and scalers are made of, and where; in which dtypes autocast computes
    Event("built", _BUILT, "__init__", "_note_object", _AFTER),
    Event("built", "torch:autocast", "__enter__", "_note_autocast", _AFTER),
    # batches, and which loader one is of
    Event("data", f"{_DATA}:DataLoader", "__iter__", "_note_iterator", _AFTER),
    Event("batches", f"{_DATA}.dataloader:_BaseDataLoaderIter", "__next__", "_watch_next"),
    # losses, and that something is trained
    Event("loss", "torch.autograd", "backward grad", "_watch_backward"),
    # what the script saves
    Event("products", "torch torch.serialization", "save", "_record_saved", _AFTER, group="saves"),
    Event("products", "safetensors.torch", "save_file", "_record_saved", _AFTER, group="saves"),
    # gradients, and that steps end with optimizers'
    Event("optimizers", _OPTIMIZER, "register_optimizer_step_pre_hook", "_before_step", _HOOK),
    Event("optimizers", _OPTIMIZER, "register_optimizer_step_post_hook", "_after_step", _HOOK),
    Event("optimizers", f"{_OPTIMIZER}:Optimizer", "__init__", "_note_new_optimizer", _AFTER),
    # steps that are skipped for infinities, and groups which step in turn that are one step
    Event("optimizers", "torch.amp:GradScaler", "step", "_watch_scaler_step"),
    Event("optimizers", "deepspeed:DeepSpeedEngine", "step", "_watch_engine_step", raised=True),
    # that operators of an optimizer's step, which are not recorded, cost nothing
    Event("operators", _OPTIMIZER, "register_optimizer_step_pre_hook", "_leave_for_optimizer", _HOOK),
    Event("operators", _OPTIMIZER, "register_optimizer_step_post_hook", "_return_after_optimizer", _HOOK),
    # what a compiled region runs
    Event("compile", "torch", "compile", "stand_in_for_compile", _REPLACE),
    # inputs and outputs of modules, and those that are called past `nn.Module.__call__`
    Event("modules", "torch.nn:Module", "__call__", "stand_in_for_call", _REPLACE),
    Event("modules", "torch.nn:Module", "__init_subclass__", "subclassing", _REPLACE),
    # names by path, and of parameters whose model was not called
    Event("modules", _MODULE, "register_module_module_registration_hook", "_names.note_child", _HOOK),
    Event("modules", _MODULE, "register_module_parameter_registration_hook", "_names.note_parameter", _HOOK),
    # collectives of DTensor
    Event("collectives", "torch.distributed._functional_collectives", " ".join(f"{word}*" for word in FUNCTIONAL),
          "_watch_functional", group=FUNCTIONALS, raised=True),
)  # fmt: skip
"""What is watched from when to when; above each row, what is lost without it. Kernels of collectives and taps are put
in place by their probes: they are as many as torch has operators and the script has compiled modules."""


class Patches:
    """Attributes that are replaced, hooks that are registered, and whatever else is to be taken out again."""

    def __init__(self) -> None:
        """Start with nothing put in place."""
        self._undo: list[Callable[[], object]] = []

    @property
    def are_put(self) -> bool:
        """Whether anything is in place now."""
        return bool(self._undo)

    def undo_by(self, *undo: Callable[[], object]) -> None:
        """Have functions called by `remove`, each once or, where it was interrupted, twice."""
        self._undo += undo

    def put(self, section: str, probe: Any, guarded: Guarded) -> None:
        """Put all rows of a section in place, those of a module that is not there when the script imports it.

        A missing class or attribute is passed over, and so is an `__init__` that a class only inherits.

        Args:
            section: which rows of `EVENTS`.
            probe: has the methods that rows name.
            guarded: around them; where it is off, watched functions and hooks do only what the original does.
        """
        rows = [event for event in EVENTS if event.section == section]
        for event, home in ((row, home) for row in rows for home in row.homes.split()):
            module, put = home.partition(":")[0], functools.partial(self._put, event, home, probe, guarded)
            if module not in sys.modules:
                watch = ImportWatch({module: put})
                self.undo_by(watch.remove)
                watch.install()
            else:
                put()

    def _put(self, event: Event, home: str, probe: Any, guarded: Guarded) -> None:
        """Replace, hook or watch the attributes of one row in one of its homes as it says."""
        module, _, kind = home.partition(":")
        with guarded:
            owner: Any = sys.modules[module]
            owner = getattr(owner, kind, None) if kind else owner
            names = () if owner is None else (name for glob in event.names.split() for name in _names(owner, glob))
            for name in names:
                if not (name in vars(owner) if name == "__init__" else hasattr(owner, name)):
                    continue
                method, original = attrgetter(event.method)(probe), getattr(owner, name)
                if event.treatment == _REPLACE:
                    self.replace(owner, name, method(original))
                elif event.treatment == _HOOK:
                    self.undo_by(original(_hook(method, guarded)).remove)
                else:
                    handler = functools.partial(functools.partial, method) if event.treatment == _AFTER else method
                    called = f"{home.replace(':', '.')}.{name}"
                    self.replace(owner, name, _watched(original, called, guarded, handler, event))

    def replace(self, owner: Any, name: str, replacement: object) -> None:
        """Set an attribute until `remove`; `warnings` do not count frames of a function that is put there."""
        if isinstance(replacement, FunctionType):
            uncounted(replacement)
        self.undo_by(functools.partial(_restore, owner, name, replacement, vars(owner).get(name, _MISSING)))
        setattr(owner, name, replacement)

    def remove(self) -> None:
        """Take out all that was put in place, the last first."""
        while self._undo:
            self._undo[-1]()
            self._undo.pop()  # after it: whatever comes in between, none is left behind


def _watched(original: Any, function: str, guarded: Guarded, handler: Handler, event: Event) -> Callable[..., Any]:
    """A replacement of a function that calls it between two guarded sections, with the same arguments.

    Only the original runs while the probe is off, while a call of the same group is under way, and while a compiler
    traces the call.

    Args:
        original: the function.
        function: what the handler is told that it is called.
        guarded: of the probe.
        handler: is given the call; what it returns, if not None, is called with the result, or with `RAISED` where
            the original raised and the event asks for that.
        event: of which `group` and `raised` are asked.
    """
    group, inside = event.group, guarded.inside
    is_traced = _tracing()

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        """Call the handler, the original, and what the handler returned; returns the original's result."""
        leaving: Callable[[Any], None] | None = None
        if not is_traced() and guarded.on and group not in inside:
            with guarded:
                leaving = handler(Call(function, args, kwargs, sys._getframe(1)))  # noqa: SLF001 - as python documents it
        if leaving is None:
            return original(*args, **kwargs)
        if group:
            inside.add(group)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            inside.discard(group)
            if event.raised and guarded.on:
                with guarded:
                    leaving(RAISED)
            raise
        inside.discard(group)
        if guarded.on:
            with guarded:
                leaving(result)
        return result

    return watched


def _restore(owner: Any, name: str, replacement: object, original: object) -> None:
    """Put an attribute back.

    One that the script has replaced since stays: its replacement may call introspect's function, which does only what
    the original does once its probe is off.
    """
    if vars(owner).get(name) is replacement and original is _MISSING:
        delattr(owner, name)
    elif vars(owner).get(name) is replacement:
        setattr(owner, name, original)


def _names(owner: Any, glob: str) -> list[str]:
    """Attributes that a name of the table stands for: itself, or, with a star, all of its owner's that begin so."""
    return [name for name in vars(owner) if name.startswith(glob[:-1])] if glob.endswith("*") else [glob]


def _tracing() -> Callable[[], bool]:
    """Function that tells whether a compiler traces what calls it; before torch is imported, none does."""
    return sys.modules["torch"].compiler.is_compiling if "torch" in sys.modules else bool


def _hook(method: Callable[..., Any], guarded: Guarded) -> Callable[..., Any]:
    """A hook that calls `method` inside the guard and returns its result; while the probe is off it only returns None.

    Nothing is called either while a compiler traces the hook.
    """
    is_traced = _tracing()

    def hooked(*given: Any) -> Any:
        """Call the method inside the guard.

        None, with nothing called, where a compiler traces this or the probe is off.
        """
        if not is_traced() and guarded.on:
            with guarded:
                return method(*given)
        return None

    return hooked

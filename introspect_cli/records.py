"""The words of the tool as types: phases, kinds, sites, layouts, summaries, records.

Capture writes these, the store keeps them, compare reads them; the three meet nowhere else. Nothing here
imports another module of the package, nor torch, nor numpy.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from enum import Enum
from json.encoder import encode_basestring_ascii as _quoted
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self


SKETCH_SIZE = 16
"""float32 values in a sketch."""


class Phase(str, Enum):
    """Where in a step something was recorded."""

    __hash__ = str.__hash__  # enum's own is written in python, and sites are looked up thousands of times a step

    START = "start"
    DATA = "data"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    RECOMPUTE = "recompute"
    EVAL = "eval"


class Kind(str, Enum):
    """What was observed.

    Attributes:
        value: its name on the command line and in stores.
        one: one of them in a sentence.
        several: all of them in a list; two kinds may share it.
        phase: where in a step it is recorded, of a tensor that names no phase; None where that does not follow.
    """

    __hash__ = str.__hash__  # as above

    _value_: str
    one: str
    several: str
    phase: Phase | None

    BATCH = "batch", "the batch", "batches", Phase.DATA
    RNG = "rng", "the random state", "random states"
    INPUT = "input", "the input", "inputs and outputs", Phase.FORWARD
    OUTPUT = "output", "the output", "inputs and outputs", Phase.FORWARD
    GRAD_INPUT = "grad_input", "the gradient of the input", "activation gradients", Phase.BACKWARD
    GRAD_OUTPUT = "grad_output", "the gradient of the output", "activation gradients", Phase.BACKWARD
    LOSS = "loss", "the loss", "losses", Phase.LOSS
    PARAM = "param", "the parameter", "parameters", Phase.START
    BUFFER = "buffer", "the buffer", "buffers", Phase.START
    GRAD = "grad", "the gradient", "parameter gradients", Phase.OPTIMIZER
    OPTIMIZER_STATE = "optimizer_state", "the optimizer state", "optimizer state", Phase.OPTIMIZER
    HYPERPARAMETER = "hyperparameter", "the hyper-parameter", "hyper-parameters"
    OP_OUTPUT = "op_output", "the operator", "results of operators"
    VALUE = "value", "the recorded value", "values that the script records"
    COLLECTIVE = "collective", "the collective", "collectives"
    PRODUCT = "product", "the saved tensor", "what the script saves or keeps"

    def __new__(cls, value: str, one: str = "", several: str = "", phase: Phase | None = None) -> Self:
        """Make a member of its row in the table above; a str whose value is the first column."""
        kind = str.__new__(cls, value)
        kind._value_, kind.one, kind.several, kind.phase = value, one, several, phase
        return kind


KIND_CODES = {kind.value: code for code, kind in enumerate(Kind)}
"""The small integer that stands for each kind in arrays."""

GRADIENT_OF = {Kind.INPUT: Kind.GRAD_INPUT, Kind.OUTPUT: Kind.GRAD_OUTPUT}
"""Kind of the gradient, by kind of the value."""

SETTING_KINDS = frozenset({Kind.HYPERPARAMETER})
"""Kinds that explain a divergence and never are one; digests leave them out."""

SCALER = "GradScaler"
"""Name under which a gradient scaler's scale is recorded, as a hyper-parameter."""

USUAL_PHASES = {kind: kind.phase for kind in Kind if kind.phase is not None}
"""The kinds of tensors that have one."""


EXPANDED_TEXT = "expanded"
"""Prefix of the text of a record of a tensor's memory only, since its shape would take hours to read."""
UNPLACED = "unplaced"
"""Strides of a shard whose place in the whole is not known."""


class Status(int, Enum):
    """How much of a value was seen."""

    OBSERVED = 0
    NOT_OBSERVED = 1
    PARTIAL = 2
    VALUE = 3


class Joined(int, Enum):
    """How the records of several ranks became one."""

    AS_RECORDED = 0
    """One rank's record, or one of equal copies."""
    PARTS = 1
    """Parts, added up."""
    GATHERED = 2
    """Different values together: no tensor has its shape."""
    OWED = 3
    """Sums or means that the ranks have not reduced yet, added up."""
    COPIES = 4
    """Copies that ought to be equal and are not."""
    ALIKE = 5
    """Equal values of several ranks: copies, or parts that happen to be equal."""
    INCOMPLETE = 6
    """Parts that leave some of the whole out, or overlap, though all ranks were recorded."""


@dataclass(frozen=True, order=True, slots=True)
class Site:
    """What two runs are aligned by, within one step of one rank.

    Attributes:
        phase: where in the step.
        kind: what was observed.
        fqn: fully qualified name, the root named by its class, wrappers removed.
        call: which call of the module (or backward, batch, optimizer step) within the step, from 0.
        path: where the value sits inside nested inputs or outputs, as a pytree key string; "" for the value.
    """

    phase: Phase
    kind: Kind
    fqn: str
    call: int = 0
    path: str = ""

    @property
    def evaluates(self) -> bool:
        """Whether it is of evaluation: its phase is `eval`, or the name of its root ends with `#eval` (`EVALUATED`)."""
        return self.phase is Phase.EVAL or EVALUATED in self.fqn.partition(".")[0]

    def key(self) -> int:
        """An unsigned 64-bit hash of all fields of the site, which is the same in every process."""
        # As JSON, put together here, and `value` is computed: thousands of modules have a hundred thousand sites.
        words = f'"{self.phase._value_}", "{self.kind._value_}", {_quoted(self.fqn)}'
        text = f"[{words}, {int(self.call)}, {_quoted(self.path)}]"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


GIVEN = "(given)"
"""The path of a parameter with which `functional_call` runs a module inside another, and of the module's own after."""

DRAWN_BEFORE = " before"
"""End of the path of an `rng` record within a step whose draws came before what it is named after, not from it."""

EVALUATED = "#eval"
"""Suffix of the name of a root module that is a copy and only evaluated."""


@dataclass(frozen=True, slots=True)
class SiteInfo:
    """What is known of a site beside its name; two runs are not aligned by it.

    Attributes:
        module_class: class of the module (or optimizer, loader) the site belongs to.
        op: operator name with overload, for `op_output`.
        source: `file:line` of the user's code that ran it when it was first met: of an operator, of what goes into and
            comes out of a module the line that calls it, of a loss the one that calls `backward`, of what an optimizer
            changes its step, of a batch the one that takes it; "" for another, and where it is unknown.
    """

    module_class: str = ""
    op: str = ""
    source: str = ""


@dataclass(frozen=True)
class Part:
    """Which part of a whole tensor a rank holds.

    Attributes:
        ranges: for each dimension the ranges of indices held, each its first index and how many, in the order in which
            the local tensor has them. For a part that is cut out of the flattened tensor, the ranges of that alone.
        reduction: by what the ranks' values still have to be reduced to give the whole (`sum`, `avg`, ...); "" by none.
        reduced_over: how many ranks.
        source: how the place is known: `dtensor`, `flat` (one rank's stretch of a flattened parameter), `tag` (a plain
            tensor that a DTensor's `to_local` gave), `style` (one that a parallel style takes for a share).
    """

    ranges: tuple[tuple[tuple[int, int], ...], ...]
    reduction: str = ""
    reduced_over: int = 1
    source: str = "dtensor"

    @property
    def numel(self) -> int:
        """Number of elements of the part; 1 without dimensions."""
        return math.prod(sum(length for _, length in ranges) for ranges in self.ranges)


@dataclass(frozen=True)
class Layout:
    """What a tensor is, apart from its values.

    Attributes:
        shape: sizes, of the whole where a rank holds a part.
        dtype: torch's name without the prefix (`float32`), or `python.int` and so on for a plain value.
        device: `cpu`, `cuda:0`, ...; "" for a plain value.
        strides: `contiguous`, `strided`, `expanded`, `sparse_coo`, `UNPLACED`, ...; "" for a plain value.
        part: which part of it a rank holds; None for all of it, and where that is not known.
    """

    shape: tuple[int, ...]
    dtype: str
    device: str = ""
    strides: str = ""
    part: Part | None = None

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def is_sparse(self) -> bool:
        """Whether the layout is one of torch's sparse ones, as `strides` says."""
        return self.strides.startswith("sparse")


@dataclass(frozen=True)
class Summary:
    """What is kept of a value.

    Attributes:
        status: how much was seen.
        layout: shape, dtype, device, strides.
        checksum: 64 bits over the value's bits, dtype and shape; 0 where not observed.
        stats: statistics by name, stored and derived; a name is missing where the statistic is absent.
        sketch: count-sketch values, empty where none was kept.
        text: a plain value's repr, or why something was not observed.
        joined: how several ranks' records became this one.
        ranks: how many ranks have this one value, where it is `ALIKE`.
    """

    status: Status
    layout: Layout
    checksum: int
    stats: dict[str, float] = field(default_factory=dict)
    sketch: tuple[float, ...] = ()
    text: str = ""
    joined: Joined = Joined.AS_RECORDED
    ranks: int = 0


class Given(NamedTuple):
    """What an operator was given, and what it belongs to.

    Attributes:
        inputs: floating point inputs, each once, in the order of the arguments: the number of the site that wrote it
            last (a parameter's own in phase `start`), -1 where no recorded operator did.
        forward: for an operator of the backward pass, the number of the first site of the forward operator whose
            gradient it computes; -1 where that has none.
        node: the name of that operator, or of the autograd node, where it has no site; "" otherwise.
    """

    inputs: tuple[int, ...] = ()
    forward: int = -1
    node: str = ""


@dataclass(frozen=True)
class Record:
    """A site and its summary, at one step of one rank.

    Attributes:
        step: number of the step.
        rank: number of the rank.
        sequence: position in the order in which the rank recorded things.
        site: what is aligned between runs.
        info: what is known of the site beside its name.
        summary: what is kept of the value.
        given: inputs of an operator; None where nothing is known of them.
    """

    step: int
    rank: int
    sequence: int
    site: Site
    info: SiteInfo
    summary: Summary
    given: Given | None = None


@dataclass(frozen=True)
class ModuleInfo:
    """One module of the tree.

    Attributes:
        fqn: fully qualified name, the root named by its class.
        module_class: class name.
        source: `file:line` of the class, relative to the project; "" where unknown.
        parameters: names of its own parameters.
        buffers: names of its own buffers.
        aliases: other FQNs of this module or `name=other.fqn.name` of tied parameters.
        attributes: its plain attributes, each a name and the `repr` of its value.
        step: the step from which this holds; a module that changes has another row with the same name.
        variable: of a root, what the script called it when it was first called; "" where that is not known.
    """

    fqn: str
    module_class: str
    source: str = ""
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    attributes: tuple[tuple[str, str], ...] = ()
    step: int = 0
    variable: str = ""

    @property
    def tied(self) -> dict[str, str]:
        """FQN by which each tied parameter is recorded, by its name in this module; {} without any."""
        parts = (alias.partition("=") for alias in self.aliases)
        return {name: target for name, equals, target in parts if equals}


def perturbed_by(manifest: Mapping[str, object]) -> int | None:
    """Seed of a run's `--perturb`, by its manifest; None without it, or where it says that no element was moved."""
    options, done = manifest.get("options"), manifest.get("perturbed")
    seed = options.get("perturb") if isinstance(options, dict) else None
    moved = not isinstance(done, dict) or done.get("elements") != 0
    return seed if isinstance(seed, int) and not isinstance(seed, bool) and moved else None

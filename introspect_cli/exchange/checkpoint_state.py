"""What the contents of a checkpoint are: the model's tensors, an optimizer's state, random states, settings.

State dicts say little of themselves. What has `state` and `param_groups` is an optimizer's; tensors below a key that
speaks of random numbers are a generator's; all other tensors are the model's, and plain values are settings. Parameters
and buffers look alike in a file; only those of a BatchNorm are told by their names.

An optimizer's state is numbered. Its parameters have names where the file gives them, or where the model's tensors,
in their order, fit the state's shapes in one way only. Else they stay numbers, and a note says so.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from introspect_cli.errors import StoreError
from introspect_cli.records import Kind, Phase, Site
from introspect_cli.store.tensorfile import widened
from introspect_cli.tensors.arrays import Pieces
from introspect_cli.texts import shallow

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

NUMBERED = "the file does not name the optimizer's parameters: its state is by number"

_MODEL = frozenset({"model", "module", "state_dict", "model_state_dict", "net", "network", "weights", "params", ""})
"""Keys under which a model's state dict stands, which are no part of a tensor's name."""
_RANDOM = re.compile(r"(^|[^a-z])(rng|random|generator|cuda_rng)", re.IGNORECASE)
_GENERATORS = {"cpu": "torch", "torch": "torch", "torch_rng_state": "torch", "python": "python", "numpy": "numpy"}
_BATCHNORM = ("running_mean", "running_var", "num_batches_tracked")
_MOST_SETTINGS = 2000
_PLAIN = (bool, int, float, str, type(None))


@dataclass
class State:
    """A checkpoint's contents as sites and settings.

    Attributes:
        rows: its tensors, and plain values among them, by site, in the file's order.
        settings: documents by name.
        notes: what could not be known.
    """

    rows: dict[Site, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def put(self, kind: Kind, name: str, value: Any, path: str = "") -> None:
        """Add a tensor or plain value, of phase `start`; a second one at the same site gets the next call number."""
        site = Site(Phase.START, kind, name, 0, path)
        while site in self.rows:
            site = replace(site, call=site.call + 1)
        self.rows[site] = value


def state_of(tree: Mapping[Any, Any], order_counts: bool) -> State:
    """Sort a checkpoint's nested data into models, optimizers, random states and settings.

    An optimizer is recognised by its content; a list of optimizers gives one for each. Random states are recognised by
    the entry's name. Any other entry with tensors is a model; tensors at the top are one model together, named "". All
    others are plain: the first `_MOST_SETTINGS` leaves are kept. A model of single numbers alone is plain where another
    model has arrays. With several models each tensor's name begins with its model's key.

    Args:
        tree: the data, tensors as `Pieces`.
        order_counts: whether tensors are in the model's order, so that optimizer states can be named by it.

    Raises:
        StoreError: it has no tensor.
    """
    state = State()
    optimizers: list[tuple[str, Mapping[Any, Any]]] = []
    models: dict[str, dict[str, Any]] = defaultdict(dict)
    plain: dict[str, Any] = {}
    for key, part in {"optimizer": tree}.items() if _is_optimizer(tree) else tree.items():
        name = str(key)
        if _is_optimizer(part):
            optimizers.append((_optimizer_name(name), part))
        elif _RANDOM.search(name) and isinstance(part, (dict, list, Pieces)):
            _put_random_states(name, part, state)
        elif isinstance(part, Pieces):
            models[""][name] = part
        elif isinstance(part, list) and part and all(map(_is_optimizer, part)):
            names = [f"{_optimizer_name(name)}{number if len(part) > 1 else ''}" for number in range(len(part))]
            optimizers += zip(names, part, strict=True)
        elif tensors := {leaf: value for leaf, value in _dotted_leaves(part) if isinstance(value, Pieces)}:
            models[name] = tensors
        else:
            plain[name] = part
    if any(map(_has_arrays, models.values())):
        for name in [name for name, tensors in models.items() if not _has_arrays(tensors)]:
            plain[name] = {leaf: _single_number(value) for leaf, value in models.pop(name).items()}
    for part, tensors in models.items():
        head = f"{part}." if part and (len(models) > 1 or part not in _MODEL) else ""
        for name, value in tensors.items():
            state.put(Kind.BUFFER if _is_buffer(name) else Kind.PARAM, f"{head}{name}", value)
    _put_optimizers(optimizers, _parameter_shapes(models) if order_counts else None, state)
    if plain:
        leaves = [(name, value) for name, value in _dotted_leaves(plain) if isinstance(value, _PLAIN)]
        state.settings["checkpoint"] = dict(leaves[:_MOST_SETTINGS])
    if not any(isinstance(value, Pieces) for value in state.rows.values()):
        raise StoreError("it holds no tensor")
    return state


def _has_arrays(tensors: Mapping[str, Any]) -> bool:
    """Whether any tensor has more than one element; single numbers alone are settings, not a model."""
    return any(math.prod(value.shape) > 1 for value in tensors.values())


def _single_number(value: Any) -> Any:
    """The number in a tensor of one element; None for anything else."""
    if not isinstance(value, Pieces) or value.unread:
        return None
    pieces = [widened(bits, value.dtype).tolist() for bits in value.read()]
    return pieces[0][0] if pieces and len(pieces[0]) == 1 and isinstance(pieces[0][0], (bool, int, float)) else None


def _optimizer_name(name: str) -> str:
    """The name of an optimizer by its key in the checkpoint: the key, but `optimizer` for the usual ones.

    Those are `optimizer_states`, `optimizer_state_dict`, `optimizers` and `optim`.
    """
    return "optimizer" if name in ("optimizer_states", "optimizer_state_dict", "optimizers", "optim") else name


def _is_optimizer(part: Any) -> bool:
    """Whether it is an optimizer's state dict: it has `state`, a dict, and `param_groups`."""
    return isinstance(part, dict) and isinstance(part.get("state"), dict) and "param_groups" in part


def _dotted_leaves(part: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of each leaf of nested dicts and lists; of a plain value alone (`name`, the value)."""
    if isinstance(part, (dict, list)):
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            yield from _dotted_leaves(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, part


# --- the model


def _is_buffer(name: str) -> bool:
    """Whether a tensor is called as a buffer of a batch norm is."""
    return name.rpartition(".")[2] in _BATCHNORM


def _parameter_shapes(models: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, tuple[int, ...]]] | None:
    """(name, shape) of the model's tensors without batch norms' buffers, in order; None unless there is one model."""
    if len(models) != 1:
        return None
    (tensors,) = models.values()
    return [(name, value.shape) for name, value in tensors.items() if not _is_buffer(name)]


# --- optimizers


def _put_optimizers(
    optimizers: Sequence[tuple[str, Mapping[Any, Any]]],
    candidates: Sequence[tuple[str, tuple[int, ...]]] | None,
    state: State,
) -> None:
    """Put the optimizers' states and settings into `state`, under parameter names where these can be known.

    Names are those in the file, else found by the order of shapes, else the optimizer's name and a number, with a note.
    The settings, under `optimizers`, are set only where there is an optimizer.

    Args:
        optimizers: name and state dict of each.
        candidates: name and shape of the model's parameters in order; None where the order is not the model's.
        state: what they are put into.
    """
    documents = []
    for optimizer, held in optimizers:
        groups = _parameter_groups(held["param_groups"])
        names = _given_names(groups, held["state"])
        if names is None and candidates is not None:
            names = _names_by_order(groups, held["state"], candidates)
        if names is None and held["state"]:
            state.notes.append(NUMBERED)
        names = names or {}
        for key, values in held["state"].items():
            for leaf, value in _dotted_leaves(values):
                path = shallow("".join(f"[{word!r}]" for word in leaf.split(".") if word))
                state.put(Kind.OPTIMIZER_STATE, names.get(key, f"{optimizer}.{key}"), value, path)
        listed = []
        for group in groups:
            plain = {key: _plain_setting(group[key]) for key in group if key not in ("params", "param_names")}
            listed.append({**plain, "params": [names.get(key, f"{optimizer}.{key}") for key in group["params"]]})
        documents.append({"name": optimizer, "class": "", "groups": listed})
    if documents:
        state.settings["optimizers"] = documents


def _parameter_groups(stored: Any) -> list[dict[str, Any]]:
    """Parameter groups in order, from a list or a dict by number; what is no dict is left out.

    `params` is set in the groups themselves to a list of those of its keys that are numbers or texts.
    """
    listed = list(stored.values()) if isinstance(stored, dict) else stored if isinstance(stored, list) else []
    groups = [group for group in listed if isinstance(group, dict)]
    for group in groups:
        members = group.get("params")
        members = list(members.values()) if isinstance(members, dict) else members
        group["params"] = [key for key in members if isinstance(key, (int, str))] if isinstance(members, list) else []
    return groups


def _plain_setting(value: Any) -> Any:
    """A group's value as plain data; a tensor as `a tensor of [shape]`, a dict as the list of its values."""
    if isinstance(value, Pieces):
        return f"a tensor of {list(value.shape)}"
    if isinstance(value, dict):
        return [_plain_setting(item) for item in value.values()]
    return [_plain_setting(item) for item in value] if isinstance(value, list) else value


def _given_names(groups: Sequence[Mapping[str, Any]], held: Mapping[Any, Any]) -> dict[Any, str] | None:
    """Parameter names by state key, from the keys where all are texts other than numbers, else from `param_names`.

    None where any group has another number of `param_names` than of parameters, or where there is no parameter.

    Args:
        groups: the parameter groups, from `_parameter_groups`.
        held: the optimizer's state by key.
    """
    if held and all(isinstance(key, str) and not key.isdecimal() for key in held):
        return {key: str(key) for key in held}
    names: dict[Any, str] = {}
    for group in groups:
        given = group.get("param_names")
        if not isinstance(given, list) or len(given) != len(group["params"]):
            return None
        names |= zip(group["params"], map(str, given), strict=True)
    return names or None


def _names_by_order(
    groups: Sequence[Mapping[str, Any]], held: Mapping[Any, Any], candidates: Sequence[tuple[str, tuple[int, ...]]]
) -> dict[Any, str] | None:
    """Parameter names by state key, where shapes in order match the model's tensors in exactly one way; else None.

    Each group is matched by itself; None also where two parameters come to the same tensor. A parameter without a state
    of several elements fits any tensor.

    Args:
        groups: the parameter groups, from `_parameter_groups`.
        held: the optimizer's state by key.
        candidates: name and shape of the model's parameters, in order.
    """
    names: dict[Any, str] = {}
    for group in groups:
        shapes = [_shape_of(held.get(key)) for key in group["params"]]
        first = _first_fit(shapes, candidates)
        last = _first_fit(shapes[::-1], candidates[::-1])
        if first is None or last is None or first != last[::-1]:
            return None
        names |= dict(zip(group["params"], first, strict=True))
    return names if all(times == 1 for times in Counter(names.values()).values()) else None


def _shape_of(values: Any) -> tuple[int, ...] | None:
    """The most common shape among a state's tensors of several elements: its parameter's; None without any."""
    tensors = (value for _, value in _dotted_leaves(values) if isinstance(value, Pieces))
    shapes = Counter(tensor.shape for tensor in tensors if math.prod(tensor.shape) > 1)
    return shapes.most_common(1)[0][0] if shapes else None


def _first_fit(
    shapes: Sequence[tuple[int, ...] | None], candidates: Sequence[tuple[str, tuple[int, ...]]]
) -> list[str] | None:
    """Names of candidates, in order, of which each is the next with the shape (None: any); None where one has none."""
    rest = iter(candidates)
    fits = (next((name for name, size in rest if shape is None or size == shape), None) for shape in shapes)
    names = [name for name in fits if name is not None]
    return names if len(names) == len(shapes) else None


# --- random states


def _put_random_states(name: str, part: Any, state: State) -> None:
    """Put the random states in `part` into `state`: each tensor, and of each generator all plain values as one tuple.

    Generators are the first words of dotted names in `part`: `torch`, `python` and `numpy` where that is known.
    """
    inner: dict[str, dict[str, Any]] = {}
    for leaf, value in _dotted_leaves(part):
        head, _, rest = leaf.partition(".")
        inner.setdefault(head, {})[rest] = value
    for head, values in inner.items():
        generator = _GENERATORS.get(head or name, head or "torch" if _is_cpu(values) else f"{name}.{head}".rstrip("."))
        tensors = {rest: value for rest, value in values.items() if isinstance(value, Pieces)}
        for rest, value in tensors.items():
            state.put(Kind.RNG, generator, value, "".join(f"[{word}]" for word in rest.split(".") if word))
        numbers = [value for value in values.values() if not isinstance(value, Pieces)]
        if numbers:
            state.put(Kind.RNG, generator, tuple(numbers), "['numbers']" if tensors else "")


def _is_cpu(values: Mapping[str, Any]) -> bool:
    """Whether the only tensor has shape (5056,), that of torch's CPU generator state."""
    return [value.shape for value in values.values() if isinstance(value, Pieces)] == [(5056,)]


def in_usual_order(rows: Mapping[Site, Any]) -> Iterator[tuple[Site, Any]]:
    """The rows in three groups: random states, parameters and buffers, all others; within each in the given order."""
    ranks = {Kind.RNG: 0, Kind.PARAM: 1, Kind.BUFFER: 1}
    yield from sorted(rows.items(), key=lambda row: ranks.get(row[0].kind, 2))

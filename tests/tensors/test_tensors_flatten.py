"""Nested values as paths and leaves."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils import rnn

from introspect_cli.tensors.flatten import MAX_DEPTH, flatten

A, B, C = torch.zeros(1), torch.ones(2), torch.ones(3)


@dataclasses.dataclass
class Result:
    logits: Any
    hidden: Any = None


class Output(collections.OrderedDict):
    """As the model outputs of a well-known library: an ordered dict with attributes."""


class Pair(NamedTuple):
    left: Any
    right: Any


class Layer:
    def __init__(self, keys, values):
        self.keys, self.values = keys, values


class Cache:
    """As a cache of attention keys: an object of objects."""

    def __init__(self):
        self.layers = [Layer(A, B), Layer(C, A)]
        self.name = "cache"


CASES = {
    "a tensor": (A, [("", A)]),
    "a number": (3, [("", 3)]),
    "nothing": (None, [("", None)]),
    "a string": ("abc", [("", "abc")]),
    "tuple": ((A, B), [("[0]", A), ("[1]", B)]),
    "list": ([A, B], [("[0]", A), ("[1]", B)]),
    "dict": ({"x": A, 3: B}, [("['x']", A), ("[3]", B)]),
    "mixed": ((A, 2, None), [("[0]", A), ("[1]", 2), ("[2]", None)]),
    "nested": ([{"hidden": (A, [B])}, C], [("[0]['hidden'][0]", A), ("[0]['hidden'][1][0]", B), ("[1]", C)]),
    "namedtuple": (Pair(A, {"z": B}), [(".left", A), (".right['z']", B)]),
    "dataclass": (Result(A, (B, C)), [(".logits", A), (".hidden[0]", B), (".hidden[1]", C)]),
    "dataclass with a gap": ([Result(A)], [("[0].logits", A)]),
    "model output": (Output(logits=A, past=(B,)), [("['logits']", A), ("['past'][0]", B)]),
    "default dict": (collections.defaultdict(list, a=[A]), [("['a'][0]", A)]),
    "an object of objects": (
        Cache(),
        [(".layers[0].keys", A), (".layers[0].values", B), (".layers[1].keys", C), (".layers[1].values", A)],
    ),
    "a return type of torch": (torch.return_types.max((A, B)), [("[0]", A), ("[1]", B)]),
    "empty": ((), []),
    "an empty dict inside": ([{}, A], [("[1]", A)]),
    "a parameter": ([torch.nn.Parameter(B)], [("[0]", B)]),
    "a deque": (collections.deque([A, B]), [("[0]", A), ("[1]", B)]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_nested_value_has_these_paths_and_leaves(case):
    value, wanted = CASES[case]
    found = flatten(value)
    assert [path for path, _ in found] == [path for path, _ in wanted]
    for (_, leaf), (_, expected) in zip(found, wanted, strict=True):
        assert leaf is expected or bool((torch.as_tensor(leaf) == torch.as_tensor(expected)).all())


def test_paths_are_those_of_pytree():
    value = ({"a": [A, {"b": B}]}, (C, Pair(A, B)))
    leaves, _ = torch.utils._pytree.tree_flatten_with_path(value)
    assert [path for path, _ in flatten(value)] == [torch.utils._pytree.keystr(path) for path, _ in leaves]


def test_packed_sequences_are_taken_apart():
    packed = rnn.pack_sequence([torch.randn(4, 2), torch.randn(2, 2)])
    found = dict(flatten({"packed": packed}))
    assert found["['packed'].data"] is packed.data
    assert found["['packed'].batch_sizes"] is packed.batch_sizes


def test_a_value_that_holds_itself_ends():
    value: list[Any] = [A]
    value.append(value)
    value.append({"again": value, "b": B})
    assert [path for path, _ in flatten(value)] == ["[0]", "[2]['b']"]


def test_depth_is_bounded():
    value: Any = A
    for _ in range(MAX_DEPTH + 50):
        value = [value]
    assert flatten(value) == []


def test_code_of_the_script_that_raises_makes_a_leaf():
    class Odd:
        def __getattr__(self, name):
            raise RuntimeError(name)

    odd = Odd()
    assert flatten([odd])[0][1] is odd

"""What modules hold, and whether their attributes are what they were."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from introspect_cli.capture.naming.contents import holders_in, tensors_in
from introspect_cli.capture.probes.attributes import HeldBefore
from introspect_cli.records import Kind

BOTH = frozenset({Kind.PARAM, Kind.BUFFER})


def model():
    """Shared modules and parameters, a place without a child, a buffer, a module that holds itself."""
    shared = nn.Linear(2, 2)
    root = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(shared, nn.Tanh()), shared, nn.Linear(2, 2, bias=False))
    root[3].weight = shared.weight
    root.register_module("nothing", None)
    root.register_parameter("own", nn.Parameter(torch.ones(1)))
    root[1].__dict__["_modules"]["back"] = root
    return root


def test_modules_and_tensors_come_once_and_another_name_is_noticed():
    root = model()
    found = holders_in(root)
    assert list(map(id, found)) == list(map(id, (root, root[0], root[2], root[3])))
    references = list(map(weakref.ref, found))
    kinds, tensors, stand = tensors_in(references, BOTH)
    named = {id(tensor) for tensor in [*root[0].parameters(), *root[0].buffers(), *root[2].parameters(), root.own]}
    assert {*map(id, tensors)} == named
    assert len(tensors) == len(named)
    assert [kind is Kind.BUFFER for kind in kinds] == [not isinstance(each, nn.Parameter) for each in tensors]
    assert tensors_in(references, frozenset({Kind.BUFFER}))[0] == [Kind.BUFFER] * 3
    assert tensors_in(references, frozenset()) == ([], [], [])
    assert tensors_in(references, BOTH)[2] == stand
    root[0]._buffers["renamed"] = root[0]._buffers.pop("num_batches_tracked")  # the last: the same tensors, as many
    renamed = tensors_in(references, BOTH)
    assert list(map(id, renamed[1])) == list(map(id, tensors))
    assert renamed[2] != stand
    del root, found, tensors, renamed
    gc.collect()
    assert tensors_in(references, BOTH) == ([], [], [])


def change_value(module):
    module.eps = 0.5


def change_nothing(module):
    module.eps = module.eps


def add_attribute(module):
    module.other = 1


def remove_attribute(module):
    del module.eps


def add_hook(module):
    module.register_forward_hook(lambda *_: None)


def add_child(module):
    module.child = nn.Tanh()


@pytest.mark.parametrize("change", [change_value, change_nothing, add_attribute, remove_attribute, add_hook, add_child])
def test_a_changed_attribute_is_noticed(change):
    module = nn.LayerNorm(2)
    held = vars(module)
    sizes = {"_forward_hooks": len(held["_forward_hooks"]), "_modules": len(held["_modules"])}
    standing = HeldBefore(weakref.ref(module), len(held), {"eps": held["eps"], "training": True}, sizes)
    assert standing.holds()
    change(module)
    assert standing.holds() is (change is change_nothing)
    del module, held
    gc.collect()
    assert not standing.holds()

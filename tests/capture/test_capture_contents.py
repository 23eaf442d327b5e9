"""What modules hold, and whether their attributes are what they were."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from introspect_cli.capture.naming.contents import holders_in, tensors_in
from introspect_cli.capture.probes.state import Holders
from introspect_cli.records import Kind
from introspect_cli.tensors.kernels import KERNELS

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


compiled = pytest.mark.skipif(KERNELS is None, reason="without compiled kernels, modules are looked at in each step")


@compiled
@pytest.mark.parametrize("change", [change_value, change_nothing, add_attribute, remove_attribute, add_hook, add_child])
def test_a_changed_attribute_is_noticed(change):
    module, other = nn.LayerNorm(2), nn.LayerNorm(2)
    standing = KERNELS.standing()
    for one in (other, module):
        standing.add(weakref.ref(one), len(vars(one)), ("eps", "training"), ("_forward_hooks", "_modules"), ())
    assert standing.holds()
    change(module)
    assert standing.holds() is (change is change_nothing)


@compiled
def test_a_module_that_is_gone_is_noticed():
    standing, module = KERNELS.standing(), nn.LayerNorm(2)
    standing.add(weakref.ref(module), len(vars(module)), (), (), ())
    assert standing.holds()
    del module
    assert not standing.holds()


def hold_another(root):
    root[0].weight = nn.Parameter(torch.zeros(2))


def write_to_a_buffer_s_place(root):
    root[0].running_mean = torch.zeros(2)


def untie(root):
    root[3].weight = nn.Parameter(torch.zeros(2, 2))


def put_in_a_module(root):
    root[1].append(nn.Linear(1, 1))


def take_out_a_buffer(root):
    del root[0]._buffers["running_var"]


@pytest.mark.parametrize(
    "change", [hold_another, write_to_a_buffer_s_place, untie, put_in_a_module, take_out_a_buffer, id]
)
def test_tensors_are_found_again_where_a_module_holds_another(change):
    """Also those of a model that holds itself, and is looked at three times before: what is compared is compiled."""
    root = model()
    holders = Holders(root)
    for kinds in (BOTH, frozenset({Kind.BUFFER}), BOTH, BOTH):
        assert holders.tensors(kinds) == tensors_in(list(map(weakref.ref, holders_in(root))), kinds)
    assert holders.are_current() is (KERNELS is not None)
    change(root)
    assert holders.are_current() is (KERNELS is not None and change is id)
    if not holders.are_current():
        holders = Holders(root)
    of, tensors, stand = tensors_in(list(map(weakref.ref, holders_in(root))), BOTH)
    found = holders.tensors(BOTH)
    assert (found[0], list(map(id, found[1])), found[2]) == (of, list(map(id, tensors)), stand)

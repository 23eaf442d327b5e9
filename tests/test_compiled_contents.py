"""The compiled walks over what modules hold find what the walks in Python find."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from introspect_cli.capture.contents import modules_in
from introspect_cli.capture.probes import attributes
from introspect_cli.capture.probes.attributes import _Watched
from introspect_cli.records import Kind
from introspect_cli.tensors.kernels import KERNELS

pytestmark = pytest.mark.skipif(KERNELS is None, reason="no compiled kernels, so no compiled walks")


def model():
    """Shared modules and parameters, a place without a child, a buffer, a module that holds itself."""
    shared = nn.Linear(2, 2)
    root = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(shared, nn.Tanh()), shared, nn.Linear(2, 2, bias=False))
    root[3].weight = shared.weight
    root.register_module("nothing", None)
    root.register_parameter("own", nn.Parameter(torch.ones(1)))
    root[1].__dict__["_modules"]["back"] = root
    return root


@pytest.mark.skipif(type(nn.Module()._parameters) is not dict, reason="modules of this torch are walked in python")
def test_the_same_modules_and_tensors_in_the_same_order():
    root = model()
    holding = [module for module in modules_in(root) if module._parameters or module._buffers]
    found = KERNELS.holders(root)
    assert list(map(id, found)) == list(map(id, holding))
    assert len(found) == 4  # the root, the norm, the shared layer once, the last
    references = list(map(weakref.ref, found))
    kinds, tensors, stand = KERNELS.tensors_of(references, Kind.PARAM, Kind.BUFFER)
    named = {id(tensor) for tensor in [*root[0].parameters(), *root[0].buffers(), *root[2].parameters(), root.own]}
    assert {*map(id, tensors)} == named
    assert len(tensors) == len(named)
    assert [kind is Kind.BUFFER for kind in kinds] == [not isinstance(own, nn.Parameter) for own in tensors]
    assert KERNELS.tensors_of(references, None, Kind.BUFFER)[0] == [Kind.BUFFER] * 3
    assert KERNELS.tensors_of(references, None, None)[:2] == ([], [])
    assert KERNELS.tensors_of(references, Kind.PARAM, Kind.BUFFER) == (kinds, tensors, stand)
    root[0]._buffers["renamed"] = root[0]._buffers.pop("num_batches_tracked")  # the last: the same tensors, as many
    renamed = KERNELS.tensors_of(references, Kind.PARAM, Kind.BUFFER)
    assert list(map(id, renamed[1])) == list(map(id, tensors))
    assert renamed[2] != stand
    del root, holding, found, tensors, renamed
    gc.collect()
    assert KERNELS.tensors_of(references, Kind.PARAM, Kind.BUFFER) == ([], [], 0)


def test_what_is_kept_in_no_dictionary_is_left_to_python():
    scripted = torch.jit.script(nn.Linear(2, 2))
    assert KERNELS.holders(scripted) is None
    assert KERNELS.tensors_of([weakref.ref(scripted)], Kind.PARAM, None) is None
    with pytest.raises(TypeError):
        KERNELS.tensors_of([], Kind.PARAM)


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
def test_a_changed_attribute_is_noticed_as_in_python(change, monkeypatch):
    module, other = nn.LayerNorm(2), nn.LayerNorm(2)
    watched = _Watched()
    for own in (other, module):
        watched.add(own, {"eps": own.eps, "training": own.training}, ["_forward_hooks", "_modules"])
    assert watched.is_current()
    change(module)
    compiled = watched.is_current()
    monkeypatch.setattr(attributes, "KERNELS", None)
    assert compiled is watched.is_current() is (change is change_nothing)


def test_a_module_that_is_gone_is_noticed():
    watched, module = _Watched(), nn.LayerNorm(2)
    watched.add(module, {}, [])
    assert watched.is_current()
    del module
    assert not watched.is_current()

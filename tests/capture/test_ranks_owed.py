"""A gradient that ranks have not added up yet is not the equal of one that they have."""

from __future__ import annotations

import pytest
from artefacts import launched
from launches import DISTRIBUTED, needs

import introspect_cli
from introspect_cli.compare.terms.findings import Certainty

pytestmark = [pytest.mark.launch, DISTRIBUTED]

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))

class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.ones(8), mesh, [Replicate()]))

    def forward(self, x):
        return nn.functional.layer_norm(x, (8,), self.weight.to_local(grad_placements=[Partial()]))

class Local(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.to_local().add_(parameter.grad.to_local(), alpha=-0.1)

torch.manual_seed(0)
net = Norm()
optimizer = Local(net.parameters())
half = torch.randn(4, 8).chunk(2)[dist.get_rank()]
(net(half) * torch.arange(8.0)).sum().backward()
if sys.argv[1] == "reduced":
    net.weight.grad = net.weight.grad.redistribute(mesh, [Replicate()])
optimizer.step()
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    needs("tp")
    runs = {name: (2, name) for name in ("reduced", "owed")}
    return launched(tmp_path_factory.mktemp("owed"), runs, script=SCRIPT)


@pytest.mark.parametrize(("names", "side"), [(("reduced", "owed"), "b"), (("owed", "reduced"), "a")])
def test_a_sum_that_is_still_owed_is_named_and_not_the_optimizer(runs, names, side):
    result = introspect_cli.diff(*(runs / name for name in names)).result
    assert "and the sum of its gradient over the ranks is within tolerance" in result.sentence
    found = {one.code: one for one in result.explains}
    assert found["owed"].fields == {"side": side}
    assert found["owed"].certainty is Certainty.PROVED
    assert "amplified" not in found

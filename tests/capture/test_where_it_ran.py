"""Each record's site has the line of the user's code that ran it."""

from __future__ import annotations

from introspect_cli.records import Kind, Phase
from introspect_cli.store.read.run import open_run

SCRIPT = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        h = torch.relu(self.a(x))
        return self.b(
            h
        ) if len(x) else self.a(x)


net = Net()
optimizer = torch.optim.Adam(net.parameters())
for x in torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4):
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


LINES = {
    (Phase.DATA, Kind.BATCH, "DataLoader"): "train.py:19",
    (Phase.FORWARD, Kind.INPUT, "Net"): "train.py:20",
    (Phase.FORWARD, Kind.OUTPUT, "Net.a"): "train.py:11",
    (Phase.FORWARD, Kind.INPUT, "Net.b"): "train.py:12",
    (Phase.LOSS, Kind.LOSS, "loss"): "train.py:21",
    (Phase.BACKWARD, Kind.GRAD_OUTPUT, "Net.a"): "",
    (Phase.OPTIMIZER, Kind.GRAD, "Net.a.weight"): "train.py:22",
    (Phase.OPTIMIZER, Kind.PARAM, "Net.a.weight"): "train.py:22",
    (Phase.START, Kind.PARAM, "Net.a.weight"): "",
}


def test_a_site_has_the_line_that_ran_it(introspect, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    assert introspect("capture", "-q", "-o", "run", "train.py").returncode == 0
    with open_run(tmp_path / "run") as run:
        sites = run.rank(0).sites
        found = [sites[number] for number in range(len(sites))]
    said = {}
    for site, info in found:
        said.setdefault((site.phase, site.kind, site.fqn), set()).add(info.source)
    assert {place: said[place] for place in LINES} == {place: {line} for place, line in LINES.items()}

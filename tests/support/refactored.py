"""A small model, the ways in which people rewrite it, and a training loop: each a function to be captured."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 6
WIDE = 16


class Block(nn.Module):
    def __init__(self, name="body"):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.add_module(name, nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)))
        self.name = name

    def forward(self, x):
        h = self.norm(x)
        return x + getattr(self, self.name)(torch.sigmoid(self.q(h)) * self.k(h))


class Net(nn.Module):
    def __init__(self, block=Block, depth=2):
        super().__init__()
        self.inp = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Renamed(Block):
    def __init__(self):
        super().__init__("mlp")


def merged(q, k):
    """Two linear layers as one, with the numbers that they have; no random number is drawn."""
    one = nn.Linear(q.in_features, 2 * q.out_features, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        one.weight.copy_(torch.cat([q.weight, k.weight]))
        one.bias.copy_(torch.cat([q.bias, k.bias]))
    return one


class Merged(Block):
    """q and k as one linear layer, with the numbers that they would have had."""

    def __init__(self):
        super().__init__()
        self.qk = merged(self.q, self.k)
        del self.q, self.k

    def forward(self, x):
        q, k = self.qk(self.norm(x)).chunk(2, -1)
        return x + self.body(torch.sigmoid(q) * k)


class Exchanged(Block):
    """k initialised before q."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            for a, b in zip(self.q.parameters(), self.k.parameters(), strict=True):
                kept = a.clone()
                a.copy_(b)
                b.copy_(kept)


def fit(build, *, steps=3, rate=0.05, around=lambda: None, each=lambda net: None, loss=F.cross_entropy):
    """A training run, seeded; `around` runs before the model is built, `each` in every step."""

    def work():
        torch.manual_seed(0)
        around()
        net = build()
        optimizer = torch.optim.Adam(net.parameters(), lr=rate)
        source = torch.Generator().manual_seed(1)
        for _ in range(steps):
            x, y = torch.randn(5, 4, generator=source), torch.randint(3, (5,), generator=source)
            each(net)
            value = loss(net(x), y)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()

    return work


class Task(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return self.net(x)


class Called(Net):
    """The blocks are a Sequential, and called as one."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*self.blocks)

    def forward(self, x):
        return self.head(self.blocks(self.inp(x)))


Called.__name__ = "Net"


class Doubled(nn.Module):
    """q and k of the batch itself, of numbers so short that no sum of a matrix product rounds."""

    def __init__(self, *, as_one=False):
        super().__init__()
        self.q, self.k = nn.Linear(4, WIDE), nn.Linear(4, WIDE)
        self.head = nn.Linear(WIDE, 3)
        with torch.no_grad():
            for tensor in (*self.q.parameters(), *self.k.parameters()):
                tensor.copy_((tensor * 16).round() / 16)
        if as_one:
            self.qk = merged(self.q, self.k)
            del self.q, self.k

    def forward(self, x):
        x = (x * 4).round() / 4
        q, k = self.qk(x).chunk(2, -1) if hasattr(self, "qk") else (self.q(x), self.k(x))
        return self.head(torch.relu(q) * k)


class Body(nn.Module):
    """A layer that adds what it is given to what it makes, or leaves that to who calls it."""

    def __init__(self, *, adds):
        super().__init__()
        self.layer, self.adds = nn.Linear(WIDTH, WIDTH), adds

    def forward(self, x):
        h = torch.relu(self.layer(x))
        return x + h if self.adds else h


class Masked(nn.Module):
    """A layer that is given a mask, in one shape or another, and maybe a number that it does not use."""

    def __init__(self, *, wide, table=False):
        super().__init__()
        self.layer, self.wide = nn.Linear(WIDTH, WIDTH), wide
        if table:
            self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x, mask, place=None):
        del place
        return self.layer(x) * mask[..., :1]


def masking(*, wide, table=False):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.body, self.head = nn.Linear(4, WIDTH), Masked(wide=wide, table=table), nn.Linear(WIDTH, 3)

        def forward(self, x):
            mask = torch.tensor([1.0, 0.0]).repeat(len(x), 1) if wide else torch.ones(len(x), 1)
            more = {"place": torch.arange(len(x))} if wide else {}
            return self.head(self.body(self.inp(x), mask=mask, **more))

    return Sum


def adding(*, inside, factor=1.0):
    """A sum inside of a layer or around it, whose result is the same but for the factor."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.body, self.head = nn.Linear(4, WIDTH), Body(adds=inside), nn.Linear(WIDTH, 3)

        def forward(self, x):
            x = self.inp(x)
            x = self.body(x) if inside else x + self.body(x)
            return self.head(x) * factor

    return Sum


def wrapped_head():
    net = Net()
    net.head = nn.Sequential(net.head)
    return net


def with_extra(make):
    """Something more between the first layer and the blocks, in a class of the same name."""

    class Extra(Net):
        def __init__(self):
            super().__init__()
            self.extra = make()

        def forward(self, x):
            x = self.extra(self.inp(x))
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    Extra.__name__ = "Net"
    return Extra


def without_bias(*, bias=False):
    class Bare(Net):
        def __init__(self):
            nn.Module.__init__(self)
            self.inp = nn.Linear(4, WIDTH, bias=bias)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.head = nn.Linear(WIDTH, 3)

    Bare.__name__ = "Net"
    return Bare


def evaluated(build):
    """Another model, built and called first, its output kept; the random state goes on from there."""
    kept = []  # a forward pass of which nothing is left would count as none

    def work():
        with torch.random.fork_rng():
            torch.manual_seed(7)
            other = build()
            kept.append(other(torch.ones(2, 4)))

    return work


def draws_once_more():
    net = Net()
    torch.rand(2)
    return net


def two_models(*, swapped=False, target_differs=False):
    """A network and its target, called in one order or the other."""

    def work():
        torch.manual_seed(0)
        network, target_network = Net(depth=1), Net(depth=1)
        optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
        source = torch.Generator().manual_seed(1)
        for _ in range(3):
            x = torch.randn(5, 4, generator=source)
            if swapped:
                with torch.no_grad():
                    wanted = target_network(x)
                given = network(x)
            else:
                given = network(x)
                with torch.no_grad():
                    wanted = target_network(x)
            loss = (given - wanted * (0.9 if target_differs else 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return work


class Images(nn.Module):
    """Three convolutions and a layer at the end; options add a bias to the last one, or one more layer."""

    def __init__(self, *, bias=False, layer=False):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, bias=False)
        self.layer3 = nn.ModuleDict({"conv1": nn.Conv2d(6, 6, 3, bias=bias), "norm": nn.BatchNorm2d(6)})
        if layer:
            self.layer4 = nn.Conv2d(6, 6, 1)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = torch.relu(self.layer3["norm"](self.layer3["conv1"](self.stem(x))))
        if hasattr(self, "layer4"):
            x = self.layer4(x)
        return self.head(x.mean((2, 3)))


class Drawing(torch.utils.data.Dataset):
    """Samples of each of which a random number is drawn that no sample depends on."""

    def __init__(self):
        source = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(15, 3, 8, 8, generator=source), torch.randint(3, (15,), generator=source)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, at):
        return (self.x[at] if torch.rand(()) < 2 else -self.x[at]), self.y[at]


def fed(workers=0, **options):
    """A training run of `Images` from a loader with so many workers."""

    def work():
        torch.manual_seed(0)
        net = Images(**options)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for x, y in torch.utils.data.DataLoader(Drawing(), batch_size=5, num_workers=workers):
            value = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()

    return work

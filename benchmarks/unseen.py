"""What is seen of models that libraries run in their own way: one small training each, captured, and changed inside.

Of each it asks: is every module whose `forward` ran on record, or named as not seen; is the captured training the bare
one bit for bit; and is a change that acts in training alone, or in evaluation alone, ever called the same.

    python benchmarks/unseen.py [NAME...]

The libraries are none of the project's: install those to be asked beside it (`pip install --no-deps gpytorch ...`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from introspect_cli.store.run import open_run

BEGIN = '''
import copy, hashlib, os, sys
import torch
from torch import nn

change = sys.argv[1]
torch.manual_seed(0)


def changed(value, training):
    """Another value where this run is to differ."""
    return value * 1.01 if change == ("train" if training else "eval") else value


def fit(parameters, loss_of, steps=4):
    parameters = list(parameters)
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
    bits = b"".join(one.detach().numpy().tobytes() for one in parameters)
    print(loss.item().hex(), hashlib.sha256(bits).hexdigest()[:16])


def evaluate(model, value_of):
    model.eval()
    with torch.no_grad():
        print(value_of().item().hex())
'''

PROFILED = """
import sys as _sys, threading as _threading
_ran = {}


def _look(frame, event, _value):
    if event == "call" and frame.f_code.co_name == "forward" and "self" in frame.f_locals:
        _module = frame.f_locals["self"]
        if "torch" in _sys.modules and isinstance(_module, _sys.modules["torch"].nn.Module):
            _ran[id(_module)] = _module


_sys.setprofile(_look)
"""

PRINTED = """
_sys.setprofile(None)
import json as _json
print("RAN", _json.dumps([type(_one).__name__ for _one in _ran.values()]))
"""

SCRIPTS = {
    "gpytorch": (
        "`__call__` of its own runs `forward` and returns distributions",
        """
import gpytorch
x = torch.linspace(0, 1, 40); y = torch.sin(6 * x)
class Kernel(gpytorch.kernels.RBFKernel):
    def forward(self, x1, x2, **options):
        return changed(super().forward(x1, x2, **options), self.training)
class Model(gpytorch.models.ExactGP):
    def __init__(self, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(Kernel())
    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
likelihood = gpytorch.likelihoods.GaussianLikelihood(); model = Model(likelihood)
mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
fit(model.parameters(), lambda: -mll(model(x), y))
evaluate(mll, lambda: likelihood(model(torch.linspace(0, 1.3, 25))).variance.sum())
""",
    ),
    "botorch": (
        "a Gaussian process of gpytorch's that transforms its data; acquisition functions ask it",
        """
import gpytorch
from botorch.acquisition import qLogExpectedImprovement
from botorch.models import SingleTaskGP
x = torch.rand(12, 2, dtype=torch.float64); y = torch.sin(6 * x).sum(1, keepdim=True)
class Kernel(gpytorch.kernels.RBFKernel):
    def forward(self, x1, x2, **options):
        return changed(super().forward(x1, x2, **options), self.training)
model = SingleTaskGP(x, y, covar_module=Kernel())
mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
fit(model.parameters(), lambda: -mll(model(*model.train_inputs), model.train_targets))
acquired = qLogExpectedImprovement(model, best_f=y.max()); asked = torch.rand(3, 1, 2, dtype=torch.float64)
evaluate(acquired, lambda: acquired(asked).sum())
""",
    ),
    "torchdiffeq": (
        "the adjoint runs the model without gradients inside an `autograd.Function`",
        """
from torchdiffeq import odeint_adjoint
class Field(nn.Module):
    def __init__(self):
        super().__init__(); self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    def forward(self, t, y):
        return changed(self.net(y), self.training)
model = Field(); y = torch.randn(8, 2); t = torch.linspace(0, 1, 3)
fit(model.parameters(), lambda: odeint_adjoint(model, y, t, method="rk4")[-1].square().mean())
evaluate(model, lambda: odeint_adjoint(model, y, t, method="rk4")[-1].sum())
""",
    ),
    "normflows": (
        "methods (`forward_kld`, `log_prob`) call the flows one by one",
        """
import normflows as nf
flows = []
for _ in range(2):
    flows += [nf.flows.AffineCouplingBlock(nf.nets.MLP([1, 8, 8, 2])), nf.flows.Permute(2)]
class Flow(nf.NormalizingFlow):
    def log_prob(self, x):
        return changed(super().log_prob(x), False)
    def forward_kld(self, x):
        return changed(super().forward_kld(x), True)
model = Flow(nf.distributions.DiagGaussian(2), flows); x = torch.randn(32, 2)
start = model.sample(8)
fit(model.parameters(), lambda: model.forward_kld(x))
evaluate(model, lambda: model.log_prob(x).mean())
""",
    ),
    "e3nn": (
        "generated code, compiled by TorchScript",
        """
from e3nn import o3
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.product = o3.FullyConnectedTensorProduct("2x0e+1x1o", "0e+1o", "2x0e+1x1o")
        self.out = o3.Linear("2x0e+1x1o", "1x0e")
    def forward(self, x, y):
        return self.out(changed(self.product(x, y), self.training))
model = Net(); x, y = torch.randn(8, 5), torch.randn(8, 4)
fit(model.parameters(), lambda: model(x, y).square().mean())
evaluate(model, lambda: model(x, y).sum())
""",
    ),
    "torch_geometric": (
        "message passing",
        """
from torch_geometric.nn import GCNConv
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.one, self.two = GCNConv(4, 8), GCNConv(8, 2)
    def forward(self, x, edges):
        return self.two(changed(self.one(x, edges), self.training).relu(), edges)
model = Net(); x = torch.randn(10, 4); edges = torch.randint(0, 10, (2, 30))
fit(model.parameters(), lambda: model(x, edges).square().mean())
evaluate(model, lambda: model(x, edges).sum())
""",
    ),
    "diffusers": (
        "a U-Net that returns an object",
        """
from diffusers import UNet2DModel
class Net(UNet2DModel):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs); out.sample = changed(out.sample, self.training); return out
model = Net(
    sample_size=8, in_channels=1, out_channels=1, block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    attention_head_dim=4,
)
x = torch.randn(2, 1, 8, 8)
fit(model.parameters(), lambda: model(x, 3).sample.square().mean(), 2)
evaluate(model, lambda: model(x, 3).sample.sum())
""",
    ),
    "pyro": (
        "a model of statements, its parameters in a store, modules with a context around each call",
        """
import pyro, pyro.distributions as dist
from pyro.nn import PyroModule, PyroParam
class Net(PyroModule):
    def __init__(self):
        super().__init__(); self.lin = PyroModule[nn.Linear](3, 1)
        self.scale = PyroParam(torch.tensor(1.0), dist.constraints.positive)
    def forward(self, x, y=None):
        mean = changed(self.lin(x).squeeze(-1), self.training)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, self.scale), obs=y)
        return mean
model = Net(); x = torch.randn(16, 3); y = x.sum(1)
guide = lambda x, y=None: None
svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), pyro.infer.Trace_ELBO())
for _ in range(4): last = svi.step(x, y)
print(last)
evaluate(model, lambda: model(x).sum())
""",
    ),
    "torchmetrics": (
        "a metric inside a model, updated and computed by methods",
        """
import torchmetrics
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.lin = nn.Linear(4, 1); self.metric = torchmetrics.MeanSquaredError()
    def forward(self, x, y):
        out = changed(self.lin(x), self.training); self.metric.update(out.detach(), y); return out
model = Net(); x, y = torch.randn(16, 4), torch.randn(16, 1)
fit(model.parameters(), lambda: (model(x, y) - y).square().mean())
evaluate(model, lambda: (model(x, y), model.metric.compute())[1])
""",
    ),
    "torchrl": (
        "a loss module that holds a network's parameters and puts them into it for each call",
        """
from tensordict import TensorDict
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    def forward(self, x):
        return changed(self.net(x), self.training)
actor = QValueActor(Net(), in_keys=["observation"], action_space="one-hot")
loss = DQNLoss(actor, action_space="one-hot", delay_value=True); loss.make_value_estimator(gamma=0.9)
def batch():
    one = torch.nn.functional.one_hot(torch.randint(0, 3, (16,)), 3)
    no = torch.zeros(16, 1, dtype=torch.bool)
    step = {"observation": torch.randn(16, 4), "reward": torch.randn(16, 1), "done": no, "terminated": no}
    return TensorDict({"observation": torch.randn(16, 4), "action": one, "next": step}, [16])
data = batch()
fit([one for one in loss.parameters() if one.requires_grad], lambda: loss(data)["loss"])
evaluate(actor, lambda: actor(TensorDict({"observation": torch.randn(8, 4)}, [8]))["action_value"].sum())
""",
    ),
    "functorch": (
        "an ensemble: states are stacked, `vmap` runs a skeleton with each",
        """
from torch.func import functional_call, stack_module_state, vmap
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.lin = nn.Linear(4, 2)
    def forward(self, x):
        return changed(self.lin(x).tanh(), self.training)
nets = [Net() for _ in range(3)]; parameters, buffers = stack_module_state(nets)
skeleton = copy.deepcopy(nets[0]).to("meta"); x = torch.randn(8, 4)
run = lambda: vmap(lambda p, b: functional_call(skeleton, (p, b), (x,)))(parameters, buffers)
fit(parameters.values(), lambda: run().square().mean())
evaluate(skeleton, lambda: run().sum())
""",
    ),
    "functional_call": (
        "an inner step runs a network with other parameters",
        """
from torch.func import functional_call
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    def forward(self, x):
        with torch.enable_grad():
            loss = self.net(x).square().mean()
            found = torch.autograd.grad(loss, list(self.net.parameters()), create_graph=self.training)
        rate = changed(0.5, self.training)
        fast = {name: one - rate * g for (name, one), g in zip(self.net.named_parameters(), found)}
        return functional_call(self.net, fast, (x,))
model = Net(); x = torch.randn(8, 4)
fit(model.parameters(), lambda: model(x).square().mean())
evaluate(model, lambda: model(x).sum())
""",
    ),
    "parametrize": (
        "a weight that modules compute when it is asked for",
        """
from torch.nn.utils import parametrize
class Scaled(nn.Module):
    def forward(self, weight):
        return changed(weight - weight.mean(), self.training)
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.lin = nn.Linear(4, 4)
        parametrize.register_parametrization(self.lin, "weight", Scaled())
    def forward(self, x):
        return nn.functional.linear(x, self.lin.weight)
model = Net(); x = torch.randn(8, 4)
fit(model.parameters(), lambda: model(x).square().mean())
evaluate(model, lambda: model(x).sum())
""",
    ),
    "checkpoint": (
        "layers that run again in the backward pass",
        """
from torch.utils.checkpoint import checkpoint
class Layer(nn.Linear):
    def forward(self, x):
        return changed(super().forward(x).tanh(), self.training)
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.layers = nn.ModuleList(Layer(4, 4) for _ in range(3))
    def forward(self, x):
        for at, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=at == 1)
        return x
model = Net(); x = torch.randn(8, 4, requires_grad=True)
fit(model.parameters(), lambda: model(x).square().mean())
evaluate(model, lambda: model(x).sum())
""",
    ),
    "forward by name": (
        "`forward` and another method called past the model's own call",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 2)
    def encode(self, x):
        return changed(self.one(x), self.training).tanh()
    def forward(self, x):
        return self.two.forward(self.encode(x))
model = Net(); x = torch.randn(8, 4)
fit(model.parameters(), lambda: model.forward(x).square().mean())
evaluate(model, lambda: model.forward(x).sum())
""",
    ),
}


def ask(name: str, folder: Path) -> str:
    """A row of the table."""
    idea, body = SCRIPTS[name]
    (folder / "train.py").write_text(BEGIN + body)
    (folder / "profiled.py").write_text(BEGIN.replace("import copy", PROFILED + "import copy", 1) + body + PRINTED)
    bare = _python(folder, "train.py", "")
    ran = _python(folder, "profiled.py", "").rpartition("RAN ")[2]
    said = {}
    for run, change in (("a", ""), ("again", ""), ("train", "train"), ("eval", "eval")):
        said[run] = _introspect(folder, "capture", "-q", "--eval", "-o", run, "train.py", change).stdout
    answers = {run: _introspect(folder, "diff", "a", run, "--format", "json") for run in ("again", "train", "eval")}
    with open_run(folder / "a") as run:
        reader = run.rank(0)
        pairs = zip(reader.sites.fqn, reader.sites.kind, strict=True)
        returned = {fqn for fqn, kind in pairs if kind == "output"}
        seen = Counter(module.module_class for module in reader.modules if module.fqn in returned)
        unseen = run.manifest.get("ran_unseen", {})
        notes = run.manifest["not_observed"]
    missing = Counter(json.loads(ran)) - seen
    cells = [
        name, idea, len(json.loads(ran)), seen.total(), ", ".join(unseen) or "-",
        ", ".join(f"{count} {cls}" for cls, count in sorted(missing.items())) or "-",
        "yes" if bare == said["a"] else "NO",
        *(
            _answer(answers[run]) + " (the change had no effect)" * (run != "again" and said[run] == said["a"])
            for run in ("again", "train", "eval")
        ),
    ]  # fmt: skip
    print("\n".join(f"  {name}: {note}" for note in notes), file=sys.stderr)
    return "| " + " | ".join(map(str, cells)) + " |"


def _answer(answer: subprocess.CompletedProcess[str]) -> str:
    found = json.loads(answer.stdout) if answer.stdout.startswith("{") else {}
    first = found.get("first") or (found.get("evaluation") or {}).get("first") or {}
    parts = [f"{part} {found[part]['verdict']}" for part in ("training", "evaluation") if found.get(part)]
    place = f": step {first['step']} {first['phase']} {first['kind']} {first['fqn']}" if first else ""
    return f"{answer.returncode} ({', '.join(parts) or found.get('verdict', answer.stderr[-200:])}{place})"


def _python(folder: Path, *args: str) -> str:
    done = subprocess.run([sys.executable, *args], cwd=folder, capture_output=True, text=True, check=False, timeout=200)
    return done.stdout if not done.returncode else sys.exit(done.stderr[-2000:])


def _introspect(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "introspect_cli", *args]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=200)


if __name__ == "__main__":
    for each in sys.argv[1:] or SCRIPTS:
        with tempfile.TemporaryDirectory() as made:
            print(ask(each, Path(made)), flush=True)

"""Two captured runs of a small network, one setting apart."""

import numpy as np
from synthetic import row

from introspect_cli.records import ModuleInfo

MODULES = (
    ModuleInfo("Net", "Net"),
    ModuleInfo("Net.a", "Linear", "", ("weight",)),
    ModuleInfo("Net.norm", "BatchNorm1d", "", (), ("mean",)),
    ModuleInfo("Net.b", "Linear", "", ("weight",)),
)


F32 = np.float32


def train(*faults, steps=4, at=1, lr=0.05, seed=0, start=0, state=None, batches=True, rng=True):
    """The records of a training run; what a fault does, it does at step `at` (or always, where that makes sense)."""
    random = np.random.default_rng(seed)
    weights = {name: random.normal(size=(8, 8)).astype(F32) for name in ("Net.a.weight", "Net.b.weight")}
    if "init" in faults:
        weights["Net.b.weight"] = weights["Net.b.weight"] * F32(1.5)
    momentum = {name: np.zeros((8, 8), F32) for name in weights}
    mean = np.zeros(8, F32)
    before = {name: np.zeros((8, 8), F32) for name in weights}
    recorded = []
    for k in range(steps):
        now = k == at
        rows = []
        draws = "seed 1" if "seed" in faults else f"{k + (1 if 'draw' in faults and k >= at else 0)}"
        if rng:
            rows += [row("start", "rng", "torch", draws), row("start", "rng", "numpy", "0")]
        x = np.random.default_rng(100 + k).normal(size=(6, 8)).astype(F32)
        if "batch" in faults and now:
            x = x + F32(0.5)
        if "shuffled" in faults and now:
            x = x[::-1].copy()
        y = np.arange(6) + k
        if batches:
            rows += [
                row("data", "batch", "DataLoader", x, path="[0]"),
                row("data", "batch", "DataLoader", y, path="[1]"),
            ]
        if k == 0:
            rows += [row("start", "param", name, value, module_class="Linear") for name, value in weights.items()]
            rows.append(row("start", "buffer", "Net.norm.mean", mean, module_class="BatchNorm1d"))
        if "script" in faults and now:
            x = x * F32(1.1)
        calls = 2 if "accumulate" in faults and now else 1
        grads, extra = _pass(rows, x, weights, mean, faults, now, calls)
        mean = extra["mean"]
        for name, grad in grads.items():
            grads[name] = grad
            if "scaled" in faults and now:
                grads[name] = grad * F32(0.25)
            if "stale" in faults and now:
                grads[name] = grad + before[name]
            if "kernel" in faults and now:
                grads[name] = grad * (1 + F32(1e-6) * np.sign(grad))
        before = grads
        rows.append(row("optimizer", "hyperparameter", "SGD", lr, path="[0]['lr']"))
        rows.append(row("optimizer", "hyperparameter", "SGD", 0.9, path="[0]['momentum']"))
        frozen = "Net.a.weight" if "frozen" in faults else ""
        rows += [
            row("optimizer", "grad", name, grad, module_class="Linear")
            for name, grad in grads.items()
            if name != frozen
        ]
        if "fresh" in faults and now:
            momentum = {name: np.zeros((8, 8), F32) for name in weights}
        for name, grad in grads.items():
            if name == frozen or ("missed" in faults and name == "Net.b.weight" and k >= at):
                continue
            momentum[name] = F32(0.9) * momentum[name] + grad
            weights[name] = weights[name] - F32(lr) * momentum[name]
        rows += [row("optimizer", "param", name, value, module_class="Linear") for name, value in weights.items()]
        count = 1 if "fresh" in faults and now else k + 1
        for name in weights:
            rows.append(row("optimizer", "optimizer_state", name, float(count), path="['step']"))
            rows.append(row("optimizer", "optimizer_state", name, momentum[name], path="['momentum']"))
        rows.append(row("optimizer", "buffer", "Net.norm.mean", mean, module_class="BatchNorm1d"))
        recorded.append(rows)
    return recorded


def _pass(rows, x, weights, mean, faults, now, calls):
    """Forward, loss and backward, recorded."""
    first = {}
    for call in range(calls):
        a, b = weights["Net.a.weight"], weights["Net.b.weight"]
        rows.append(row("forward", "input", "Net", x, path="[0]", call=call, module_class="Net"))
        rows.append(row("forward", "input", "Net.a", x, path="[0]", call=call, module_class="Linear"))
        hidden = x @ a
        if "module" in faults and now:
            hidden = hidden + F32(0.01)
        if "rounding" in faults and now:
            hidden = hidden * (1 + F32(2e-7))
        if "half" in faults and now:
            hidden = hidden.astype(np.float16)
        rows.append(row("forward", "output", "Net.a", hidden, call=call, module_class="Linear"))
        hidden = hidden.astype(F32)
        if "inserted" in faults:
            rows.append(row("forward", "input", "Net.new", hidden, path="[0]", module_class="ReLU"))
            rows.append(row("forward", "output", "Net.new", hidden, module_class="ReLU"))
        if "between" in faults and now:
            hidden = hidden * F32(1.01)
        rows.append(row("forward", "input", "Net.norm", hidden, path="[0]", call=call, module_class="BatchNorm1d"))
        normed = hidden - hidden.mean(0)
        mean = F32(0.9) * mean + F32(0.2 if "buffer" in faults and now else 0.1) * hidden.mean(0)
        rows.append(row("forward", "output", "Net.norm", normed, call=call, module_class="BatchNorm1d"))
        rows.append(row("forward", "input", "Net.b", normed, path="[0]", call=call, module_class="Linear"))
        out = normed @ b
        rows.append(row("forward", "output", "Net.b", out, call=call, module_class="Linear"))
        if "after" in faults and now:
            out = out + F32(0.1)
        rows.append(row("forward", "output", "Net", out, call=call, module_class="Net"))
        loss = F32((out**2).mean() * (3 if "loss" in faults and now else 1))
        rows.append(row("loss", "loss", "loss", loss, call=call))
        upstream = (2 * out / out.size).astype(F32)
        rows.append(row("backward", "grad_output", "Net", upstream, call=call, module_class="Net"))
        back = upstream @ b.T
        if "backward" in faults and now:
            back = back * F32(1.5)
        if "frozen" not in faults:
            rows.append(row("backward", "grad_input", "Net.b", back, path="[0]", call=call, module_class="Linear"))
        first = {"Net.a.weight": (x.T @ back).astype(F32), "Net.b.weight": (normed.T @ upstream).astype(F32)}
    return first, {"mean": mean.astype(F32)}


SGD = row("optimizer", "hyperparameter", "SGD", 0.1, path="[0]['lr']")

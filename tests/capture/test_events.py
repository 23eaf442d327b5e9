"""The table of events has all that a capture replaces in a process."""

from __future__ import annotations

import importlib
import json

from introspect_cli.capture.events import EVENTS

SCRIPT = """
import functools, json, os, sys, types
import numpy, pyarrow.parquet, safetensors.torch, torch, torch.multiprocessing.spawn
import torch.distributed._functional_collectives, torch.nn.utils.stateless, torch.utils.data
HERE, found = os.path.dirname(sys.modules["introspect_cli"].__file__), {}

def is_of_introspect(value):
    while type(value) in (types.MethodType, staticmethod, classmethod, functools.partial):
        value = value.func if type(value) is functools.partial else value.__func__
    if type(value) is types.FunctionType:
        return value.__code__.co_filename.startswith(HERE)
    return str((value if isinstance(value, type) else type(value)).__module__).startswith("introspect_cli")

def look():
    modules = [(name, one) for name, one in sys.modules.items() if type(one) is types.ModuleType]
    kinds = [(f"{one.__module__}:{one.__qualname__}", one) for _, module in modules for one in vars(module).values()
             if type(one) is type]
    for home, owner in modules + kinds:
        for name, value in list(vars(owner).items()):
            if name != "__builtins__" and not home.startswith(("introspect_cli", "__main__", "__mp_main__")):
                several = value.values() if isinstance(value, dict) else value if type(value) in (list, set) else ()
                for one in filter(is_of_introspect, (value, *several)):
                    found.setdefault(id(one), (one, set()))[1].add(f"{home}.{name}")

look()
net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.randn(3, 2)).sum().backward()
optimizer.step()
look()
json.dump([sorted(places) for _, places in found.values()], open("found.json", "w"))
"""

NO_ROW = {
    "sys.meta_path": "waits for modules that rows name",
    "threading.excepthook": "takes introspect's frames off what is printed of a thread that has failed",
}


def in_table():
    """What rows name; of those that register hooks also where torch keeps these."""
    for event in EVENTS:
        for module, _, kind in (home.partition(":") for home in event.homes.split()):
            try:
                owner = importlib.import_module(module)
            except ImportError:
                continue
            owner = getattr(owner, kind) if kind else owner
            home = f"{owner.__module__}:{owner.__qualname__}" if kind else module
            for glob in event.names.split():
                names = [name for name in vars(owner) if name.startswith(glob[:-1])] if "*" in glob else [glob]
                names += getattr(owner, glob).__code__.co_names if event.treatment == "hook" else ()
                yield from (f"{home}.{name}" for name in names)


def test_whatever_a_capture_replaces_has_a_row(project, tmp_path):
    """What other modules have copied from a place of the table since is the same object."""
    project("run", train=SCRIPT)
    found = json.loads((tmp_path / "run-project" / "found.json").read_text())
    assert len(found) > 40
    assert [places for places in found if not {*places} & {*in_table(), *NO_ROW}] == []
    assert all(any(place in places for places in found) for place in NO_ROW)

"""Notices when a private name of torch's that capture leans on moves, and that capture lives without each of them."""

from __future__ import annotations

import operator
import re
from pathlib import Path

import pytest
import torch
from neutrality import Seen, assert_neutral, mlp, watched
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import introspect_cli
from introspect_cli.capture import private_api

PACKAGE = Path(introspect_cli.__file__).parent
HOMES = {"private_api.py", "torch_distributed.py"}
"""The files of private names; `test_private_distributed.py` is on the second."""


def test_names_are_where_they_were():
    assert private_api.tracing_state is torch._C._get_tracing_state
    assert private_api.graph_task is torch._C._current_graph_task_id
    assert private_api.no_torch_function is torch._C.DisableTorchFunction
    assert private_api.FAKE_TENSOR is torch._subclasses.fake_tensor.FakeTensor
    assert private_api.LOADER_ITERATOR is torch.utils.data.dataloader._BaseDataLoaderIter
    assert private_api.COMPILERS_GRAPH is torch.fx._lazy_graph_module._LazyGraphModule
    assert private_api.running_node is torch._C._current_autograd_node
    assert private_api._CompileContext is torch._guards.CompileContext
    assert torch._C._after_autograd_keyset is not None
    assert callable(torch.library.Library._destroy)


def test_graph_task_tells_a_backward_pass():
    seen = [private_api.graph_task()]
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: seen.append(private_api.graph_task()))
    x.sum().backward()
    assert seen[0] == -1
    assert seen[1] != -1


def test_compiling_tells_a_compiler_at_work():
    seen = []

    def backend(graph, inputs):
        seen.append(private_api.compiling())
        return graph.forward

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    assert compiled(torch.ones(2)).tolist() == [2, 2]
    seen.append(private_api.compiling())
    assert seen == [True, False]


@pytest.mark.filterwarnings("ignore")
def test_tracing_state_tells_a_trace():
    seen = [private_api.tracing_state()]

    def traced(x):
        seen.append(private_api.tracing_state())
        return x + 1

    torch.jit.trace(traced, torch.ones(2))
    assert seen[0] is None
    assert seen[1] is not None


def test_torch_function_is_hidden_inside():
    from torch.overrides import TorchFunctionMode

    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        with private_api.no_torch_function():
            torch.ones(2).requires_grad  # noqa: B018 - reading it is what would be seen
        hidden = len(seen)
        torch.ones(2)
    assert hidden == 0
    assert len(seen) == 1


def test_mark_of_a_module_compiled_in_place():
    module = nn.Linear(2, 1)
    module.compile(backend="eager")
    assert vars(module).get(private_api.MODULE_WRAPPED_CALL) is not None


def test_mark_of_the_graphs_that_dynamo_runs():
    marks = []

    def backend(graph, example):
        marks.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(nn.Linear(2, 1), backend=backend)(torch.ones(2))
    (graph,) = marks
    assert isinstance(graph, torch.fx.GraphModule)
    assert private_api.DYNAMO_GRAPH_MARK in vars(graph) or isinstance(graph, private_api.COMPILERS_GRAPH)
    torch._dynamo.reset()


def train(log):
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x in DataLoader(torch.randn(8, 8), batch_size=4):
        log.loss(checkpoint(net, x, use_reentrant=False).square().mean()).backward()
        optimizer.step()
        log(net, optimizer)


def test_capture_without_the_graph_task(tmp_path, monkeypatch):
    monkeypatch.setattr(private_api, "graph_task", lambda: -1)
    assert_neutral(train, tmp_path / "run").assert_losses()


def test_capture_without_the_loader_iterator_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(private_api, "LOADER_ITERATOR", None)
    with watched(tmp_path / "run"):
        train(type("Log", (), {"__call__": lambda *things: None, "loss": staticmethod(lambda value: value)})())
    seen = Seen(tmp_path / "run")
    assert any("batches are not observed" in sentence for sentence in seen.manifest["not_observed"])
    assert not seen.of("batch")
    assert seen.of("loss")


def test_a_capture_goes_on_without_names_that_only_tell_what_is_traced(tmp_path, monkeypatch):
    import contextlib

    monkeypatch.setattr(private_api, "tracing_state", lambda: None)
    monkeypatch.setattr(private_api, "no_torch_function", contextlib.nullcontext)
    monkeypatch.setattr(private_api, "FAKE_TENSOR", ())
    monkeypatch.setattr(private_api, "COMPILERS_GRAPH", ())
    assert_neutral(train, tmp_path / "run").assert_losses()


def used_elsewhere():
    """Underscores on lines that the linter was told to let pass, and those asked for as text, outside those files."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.name in HOMES | {"run.py"}:  # which runs scripts, with python's own
            continue
        for line in file.read_text().splitlines():
            code = line.partition("#")[0]
            names = re.findall(r"(?<!self)\.(_[a-z]\w*)", code) if "SLF001" in line else []
            if "getattr(torch" in code or '"_Disable' in code:
                names += re.findall(r'"(_\w+)"', code)
            found |= dict.fromkeys(names, file.name)
    return found


ELSEWHERE = {
    "torch.compiler._is_compiling_flag": "`is_compiling()` in a call of a module without two frames of torch's",
    "torch.nn.Module._parameters": "the public view builds a name for each; without it nothing can be named",
    "torch.nn.Module._buffers": "as _parameters",
    "torch.nn.Module._modules": "as _parameters; the public view also leaves out modules met twice",
    "torch.nn.Module._forward_hooks": "taps find their own hooks by it; without it they cannot be taken off",
    "torch.nn.Module._forward_pre_hooks": "as _forward_hooks",
    "torch.Tensor._version": "counts in-place writes; without it steps of compiled optimizers are not noticed",
    "torch.Tensor._backward_hooks": "tells whether a leaf has our hook; without it, one would get a second",
    "torch.autograd.graph.Node._register_hook_dict": "hooks that the script does not see; without it, it sees them",
    "torch.Tensor._is_zerotensor": "tells zeros without memory; without it nothing but small tensors is observed",
    "torch.Tensor._values": "values of a sparse tensor as stored; without it such tensors are not observed",
    "torch.Tensor._indices": "as _values",
    "torch.Tensor._nested_tensor_size": "sizes in a nested tensor; without it such tensors are not observed",
    "torch.nested._internal.nested_tensor.NestedTensor._offsets": "jagged tensors; without it they are not observed",
    "torch.nested._internal.nested_tensor.NestedTensor._lengths": "as _offsets",
    "torch.distributed.tensor.DTensor._local_tensor": "the shard; without it distributed tensors are not observed",
    "torch.autograd.graph.Node._sequence_nr": "ties a backward operator to its forward; without it they are not tied",
    "torch._C._len_torch_function_stack": "whether the script watches functions; without it nothing is observed",
    "torch._C._functorch.is_functorch_wrapped_tensor": "tells tensors of transforms; without it nothing is observed",
    "torch._C.DisableTorchFunction": "keeps our operations from the script's modes; without it the script sees them",
    "torch._C._DisableTorchDispatch": "as DisableTorchFunction",
    "torch._C._DisableAutocast": "keeps our operations from autocast; without it statistics may be rounded",
    "torch._C._is_any_autocast_enabled": "spares us _DisableAutocast where there is none; without it, each is used",
    "torch._ops.OpOverload": "the type of an operator with its overload; there is no public one",
    "torch._is_functional_tensor": "tells tensors without data; without it they are recorded as an error",
    "torch._subclasses.fake_tensor.FakeTensor": "as _is_functional_tensor",
    "torch._C._aoti.unsafe_alloc_void_ptr_from_tensor": "where a tensor lies; without it each takes twice as long",
    "torch._C._dispatch_keys": "tells lazy negation without a call; else each small tensor is asked",
    "torch._C._data_address": "tells where elements are; without it, lazy copies get memory of their own",
    "torch._C.Generator._cdata": "where the generator lies; without it, who draws within a step is not observed",
    "torch._C._cuda_getDevice": "in CUDA builds; without it the public function, ten times as slow, is asked",
    "torch._C._cuda_getCurrentRawStream": "as _cuda_getDevice",
    "torch.mps._get_default_mps_generator": "random states on Apple's accelerator; without it they are not observed",
}
"""Private names used outside these files: what for, and what is lost without each."""


def test_every_private_name_used_elsewhere_is_listed():
    listed = {name.rpartition(".")[2] for name in ELSEWHERE}
    passed = {
        "_getframe",
        "__func__",
        "_reconstruct",
        "_bootstrap",
        "_target",
        "_args",
        "_C",
        "_ops",
        "_functorch",
        "_aoti",
    }  # python's, and the way to what is listed
    found = used_elsewhere()
    assert {"_parameters", "_version", "_local_tensor", "_DisableAutocast", "_is_functional_tensor"} <= found.keys()
    assert {name: file for name, file in found.items() if name not in listed | passed} == {}


YOUNG = {"torch.distributed.tensor.DTensor._local_tensor"}
"""Names that torch 2.4, the oldest that installs, lacks, and that the code does without there."""

AGE = tuple(int(word) for word in torch.__version__.split(".")[:2])


def there(name):
    try:
        return operator.attrgetter(name.removeprefix("torch."))(torch) is not None
    except AttributeError:
        return False


@pytest.mark.parametrize("name", ELSEWHERE)
def test_private_name_used_elsewhere_is_where_it_was(name):
    owner, _, attribute = name.rpartition(".")
    if name in YOUNG and AGE < (2, 13) and not there(name):
        pytest.skip(f"torch {torch.__version__} does without")
    if owner == "torch.nn.Module":
        assert attribute in vars(nn.Linear(1, 1))
    elif owner.endswith("NestedTensor"):
        jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
        assert hasattr(jagged, attribute)
    elif owner.endswith("DTensor"):
        tensor = pytest.importorskip("torch.distributed.tensor")
        assert attribute in tensor.DTensor.__slots__ or hasattr(tensor.DTensor, attribute)
    elif attribute.startswith("_cuda_"):
        assert hasattr(torch._C, attribute) or not torch.backends.cuda.is_built()
    elif owner.endswith("Node"):
        assert hasattr(torch.ones(1, requires_grad=True).exp().grad_fn, attribute)
    else:
        found = operator.attrgetter(name.removeprefix("torch."))(torch)
        assert callable(found) or attribute in ("_version", "_backward_hooks", "_cdata", "_is_compiling_flag")


def test_private_names_are_gathered_in_two_files():
    """In capture, an underscore of torch's outside those files carries the linter's mark and a reason."""
    pattern = re.compile(r"\btorch\.(?:\w+\.)*_[a-z]\w*|\btorch\._C\b")
    found = []
    for file in sorted((PACKAGE / "capture").rglob("*.py")):
        if file.name in HOMES:
            continue
        lines = file.read_text().splitlines()
        for number, line in enumerate(lines):
            if "torch.utils._python_dispatch import TorchDispatchMode" in line:
                continue  # documented, whatever its module is called
            code = re.sub(r'"[^"]*"', "", line)
            if pattern.search(code) and "noqa: SLF001" not in line and not line.lstrip().startswith("#"):
                found.append(f"{file.name}:{number + 1}: {line.strip()}")
    assert found == []

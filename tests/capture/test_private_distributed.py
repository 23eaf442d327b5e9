"""Notices when a private name of `torch.distributed` moves, and that capture lives without each of them.

In a launch of one process: a group, a mesh, a pipeline of one are no less than others for this.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from launches import DISTRIBUTED, needs
from neutrality import assert_neutral, mlp, watched
from torch import nn

from introspect_cli.capture import torch_distributed
from introspect_cli.records import Kind

dist = torch.distributed
pytestmark = [pytest.mark.launch, DISTRIBUTED]


@pytest.fixture
def group():
    """That of all processes, which is this one."""
    hook = sys.excepthook  # torch's process groups put in one of their own
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
    sys.excepthook = hook


@pytest.fixture
def mesh(group):
    needs("tp")
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, "cpu")


def test_stages_of_pipelines_have_the_functions_whose_frames_are_asked():
    needs("gpipe")
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    stage = pytest.importorskip("torch.distributed.pipelining.stage")
    seen = set()
    for home in (stage, schedules):
        for cls in (
            each for each in vars(home).values() if isinstance(each, type) and each.__module__ == home.__name__
        ):
            for name, (_, module, holder) in torch_distributed._IN_STAGE.items():
                code = getattr(vars(cls).get(name), "__code__", None)
                if code is not None and module == home.__name__:
                    assert holder in code.co_varnames[: code.co_argcount]
                    seen.add(name)
    assert {"forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk", "_maybe_compute_loss"} <= seen
    assert {"_forward_metadata_inference", "_shape_inference"} & seen


def test_a_group_is_known_by_what_operators_and_functional_collectives_are_given(mesh, group, monkeypatch):
    assert torch_distributed.group_of(group.boxed()) == group
    for given in (group, group.group_name, mesh, (mesh, 0)):
        assert torch_distributed.group_named(given) == group
    assert torch_distributed.group_named(3) is None
    assert torch_distributed.ranks_of(group) == [0]
    assert torch_distributed.rank_in(group) == 0
    monkeypatch.delattr(dist.distributed_c10d, "_resolve_process_group")
    assert torch_distributed.group_named(group.group_name) is None


def test_a_reduction_is_reported_by_what_operators_are_given():
    assert torch_distributed.reduction_of(SimpleNamespace(op=lambda: int(dist.ReduceOp.MAX))) == "max"
    assert torch_distributed.reduction_of("sum") == ""


def test_what_nobody_has_waited_for_is_reported(group, monkeypatch):
    from torch.distributed import _functional_collectives as functional

    value = functional.all_reduce(torch.ones(2), "sum", group)
    assert type(value) is functional.AsyncCollectiveTensor
    assert torch_distributed.on_its_way(value)
    assert not torch_distributed.on_its_way(functional.wait_tensor(value))
    monkeypatch.delattr(functional, "AsyncCollectiveTensor")
    assert not torch_distributed.on_its_way(torch.ones(2))


def test_a_share_of_a_distributed_tensor_knows_its_place(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = distribute_tensor(torch.ones(4, 2, requires_grad=True), mesh, [Shard(0)])
    spec = torch_distributed.local_of(whole.to_local())
    assert (spec.mesh, spec.placements, tuple(spec.tensor_meta.shape)) == (mesh, (Shard(0),), (4, 2))
    assert torch_distributed.local_of(whole.detach().to_local()) is None
    assert torch_distributed.local_of("a word") is None


def test_styles_leave_what_they_take_in_their_hooks(mesh):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as styles

    whole, rows = Replicate(), Shard(0)
    for style, takes in (
        (styles.ColwiseParallel(), [("[0]", mesh, (whole,))]),
        (styles.RowwiseParallel(output_layouts=rows), [("[0]", mesh, (Shard(-1),))]),
        (styles.PrepareModuleInput(input_layouts=rows, desired_input_layouts=whole), [("[0]", mesh, (rows,))]),
        (styles.PrepareModuleOutput(output_layouts=rows, desired_output_layouts=whole), []),
    ):
        module = styles.parallelize_module(nn.Linear(2, 2), mesh, style)
        assert torch_distributed.styles_of(module) == takes, style


def cut(net, **settings):
    needs("fsdp2")
    from torch.distributed.fsdp import fully_shard

    return fully_shard(net, **settings)


def test_what_fully_shard_cuts_is_known_by_its_groups_and_keepers(mesh, group):
    net = cut(nn.Linear(2, 2), mesh=mesh)
    assert torch_distributed.is_cut(net)
    assert torch_distributed.fsdp_groups(net) == [group]
    assert torch_distributed.unsharded_of(net) == []
    shards = list(net.parameters())
    net.unshard()
    held = torch_distributed.unsharded_of(net)
    assert [(each.holder, each.name) for each in held] == [(net, "weight"), (net, "bias")]
    assert all(each.whole is whole for each, whole in zip(held, net.parameters(), strict=True))
    assert all(each.keeper.sharded_param is shard for each, shard in zip(held, shards, strict=True))


def test_what_fully_shard_copies_is_known_by_the_group_of_the_copies(group):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("copy", "cut"))
    net = cut(nn.Linear(2, 2), mesh=mesh)
    assert torch_distributed.fsdp_groups(net) == [mesh.get_group("cut"), mesh.get_group("copy")]


class Mixture(nn.Module):
    """A dense layer, and one whose parameters are cut over other ranks."""

    def __init__(self):
        super().__init__()
        self.dense, self.expert = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.dense(x) + self.expert(x)


def test_parameters_of_one_module_that_are_cut_over_several_meshes(mesh, group, tmp_path):
    common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(common, "ShardPlacementResult"):
        pytest.skip(f"torch {torch.__version__} cuts all parameters of a module over one mesh")
    other = dist.new_group([0])
    dense, expert = (
        common.FSDPMeshInfo(each, shard_mesh_dim=0) for each in (mesh, type(mesh).from_group(other, "cpu"))
    )

    def train(log):
        torch.manual_seed(0)
        net = Mixture()
        experts = {id(each) for each in net.expert.parameters()}
        place = lambda x: common.ShardPlacementResult(None, expert if id(x) in experts else dense)  # noqa: E731
        cut(net, mesh=mesh, shard_placement_fn=place)
        assert torch_distributed.fsdp_groups(net) == [group, other]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            net.unshard()  # before the step, as a script may
            log.loss(net(torch.ones(2, 4)).square().mean()).backward()
            optimizer.step()

    seen = assert_neutral(train, tmp_path / "run")
    names = {record.site.fqn for record in seen.of("param", phase="optimizer")}
    assert names == {f"Mixture.{layer}.{each}" for layer in ("dense", "expert") for each in ("weight", "bias")}
    assert len(seen.steps) == 2


def train(log):
    """A cut model, a tensor parallel one, one that a pipeline runs, and a collective of each kind."""
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    group = dist.group.WORLD
    mesh = DeviceMesh.from_group(group, "cpu")
    whole, styled, staged = cut(mlp(), mesh=mesh), parallelize_module(nn.Linear(8, 8), mesh, ColwiseParallel()), mlp()
    stage = PipelineStage(staged, 0, 1, torch.device("cpu"))
    stage.chunks = 1
    optimizer = torch.optim.SGD(
        [*whole.parameters(), *styled.parameters(), *staged.parameters()], lr=0.1, foreach=False
    )
    for _ in range(2):
        optimizer.zero_grad()
        x = torch.ones(4, 8)
        whole.unshard()
        loss = whole(styled(x)).square().mean() + stage.forward_one_chunk(0, (x,)).square().mean()
        stage.clear_runtime_states()
        log.loss(loss).backward()
        shared = loss.detach().clone()
        dist.all_reduce(shared)
        functional.wait_tensor(functional.all_reduce(shared, "max", group.group_name))
        optimizer.step()


WITHOUT = {
    "nothing": (None, None),
    "fully_shard's state": ("is_cut", lambda module: False),
    "the hooks of styles": ("_style_in", lambda hook: None),
    "what to_local leaves": ("local_of", lambda value: None),
    "the frames of stages": ("_IN_STAGE", {}),
    "groups by name": ("group_named", lambda group: None),
    "what is on its way": ("on_its_way", lambda value: False),
    "reductions": ("reduction_of", lambda boxed: ""),
}
"""What torch may lack, and what our functions then answer."""


@pytest.fixture
def launched(group, monkeypatch):
    """As the first of two, of which the other never comes: alone, no collective is watched."""
    needs("fsdp2", "tp", "gpipe")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("without", WITHOUT)
def test_a_capture_of_ranks_goes_on_without_a_private_name(launched, tmp_path, monkeypatch, without):
    name, answer = WITHOUT[without]
    if name:
        monkeypatch.setattr(torch_distributed, name, answer)
    seen = assert_neutral(train, tmp_path / "run", record=frozenset(Kind))
    seen.assert_losses()
    assert len(seen.steps) == 2
    words = [record.summary.text.strip("'") for record in seen.of("collective", step=1) if record.summary.text]
    functional = [] if name == "group_named" else ["all_reduce max of float32 []"]
    plain = "all_reduce of float32 []" if name == "reduction_of" else "all_reduce sum of float32 []"
    assert words == [plain, *functional]


def test_capture_without_the_groups_of_operators_says_so(launched, tmp_path, monkeypatch):
    def absent(boxed):
        raise AttributeError("type object 'ProcessGroup' has no attribute 'unbox'")

    monkeypatch.setattr(torch_distributed, "group_of", absent)
    with watched(tmp_path / "run", record=frozenset(Kind)) as session:
        train(type("Log", (), {"loss": staticmethod(lambda value: value)})())
    (sentence,) = session._guard.sentences
    assert "collectives are not observed from here on" in sentence

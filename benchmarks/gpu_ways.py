"""Ways to train on a GPU, each small: do the same bits come out bare and captured?"""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 4


class Net(nn.Module):
    """A small network with dropout, normalisation and a residual path."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.middle = nn.Sequential(nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64))
        self.last = nn.Linear(64, 8)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 16) to (batch, 8)."""
        x = self.first(x)
        if self.checkpointed:
            x = x + torch.utils.checkpoint.checkpoint(self.middle, x, use_reentrant=False)
        else:
            x = x + self.middle(x)
        out = self.last(functional.relu(x))
        return out  # noqa: RET504  # mypy knows a module's call as Any


class Images(nn.Module):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
            *(nn.Conv2d(8, 16, 3, stride=2), nn.GroupNorm(4, 16), nn.SiLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images to logits."""
        out = self.layers(x)
        return out  # noqa: RET504  # as above


def trained(
    device: torch.device,
    *,
    model: Callable[[], nn.Module] = Net,
    shape: tuple[int, ...] = (32, 16),
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.AdamW(params, 1e-3),
    dtype: torch.dtype | None = None,
    scaled: bool = False,
    wrap: Callable[[nn.Module], Any] = lambda model: model,
    accumulate: int = 1,
    clip: bool = False,
    stream: bool = False,
    pinned: bool = False,
    foreign: Callable[[nn.Module], None] | None = None,
) -> list[torch.Tensor]:
    """Train for some steps; everything there is at the end: parameters, buffers, gradients, optimizer state, losses."""
    torch.manual_seed(0)
    built = model().to(device)
    run = wrap(built)
    chosen = optimizer(run.parameters())
    scaler = torch.amp.GradScaler(device.type, enabled=scaled)
    losses = []
    data = torch.utils.data.TensorDataset(torch.randn(32 * STEPS * accumulate, *shape[1:]))
    loader = torch.utils.data.DataLoader(data, batch_size=shape[0], pin_memory=pinned)
    side = torch.cuda.Stream(device) if stream and device.type == "cuda" else None
    around = torch.cuda.stream(side) if side is not None else contextlib.nullcontext()
    if side is not None:
        side.wait_stream(torch.cuda.current_stream(device))
    with around:
        for number, (batch,) in enumerate(loader):
            x = batch.to(device, non_blocking=pinned)
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                loss = run(x).float().square().mean() / accumulate
            scaler.scale(loss).backward()
            if (number + 1) % accumulate:
                continue
            if clip:
                scaler.unscale_(chosen)
                nn.utils.clip_grad_norm_(run.parameters(), 1.0)
            losses.append(loss.detach().clone())
            scaler.step(chosen)
            scaler.update()
            if foreign is not None:
                foreign(built)
            chosen.zero_grad()
    if side is not None:
        torch.cuda.current_stream(device).wait_stream(side)
    state = [value for entry in chosen.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return [*losses, *built.state_dict().values(), *state, torch.get_rng_state()]


def graphed(device: torch.device) -> list[torch.Tensor]:
    """A whole step in a CUDA graph, replayed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3, device=device), capturable=True)
    x = torch.randn(32, 16, device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(STEPS):
        graph.replay()
    return [value.detach().clone() for value in model.parameters()]


@contextlib.contextmanager
def group(device: torch.device) -> Any:
    """A process group of one."""
    with tempfile.TemporaryDirectory() as directory:
        backend = "nccl" if device.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, init_method=f"file://{directory}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


def sharded(device: torch.device) -> list[torch.Tensor]:
    """Fully sharded data parallel, on one device."""
    from torch.distributed.fsdp import fully_shard

    with group(device):

        def wrap(model: nn.Module) -> Any:
            mesh = torch.distributed.device_mesh.init_device_mesh(device.type, (1,))
            return fully_shard(model, mesh=mesh)

        values = trained(device, wrap=wrap)
        return [value.full_tensor() if hasattr(value, "full_tensor") else value for value in values]


def parallel(device: torch.device) -> list[torch.Tensor]:
    """Data parallel with one rank."""
    with group(device):
        ids = [device.index or 0] if device.type == "cuda" else None
        return trained(device, wrap=lambda model: nn.parallel.DistributedDataParallel(model, device_ids=ids))


def ways(device: torch.device) -> dict[str, Callable[[], list[torch.Tensor]]]:
    """Name to a function that trains and returns all that came out; what a device lacks is left out."""
    gpu = device.type == "cuda"

    def way(**options: Any) -> Callable[[], list[torch.Tensor]]:
        return lambda: trained(device, **options)

    optim = torch.optim
    images: dict[str, Any] = {"model": Images, "shape": (32, 3, 8, 8)}
    named = {
        "float32, AdamW": way(),
        "float32, fused AdamW": way(optimizer=lambda params: optim.AdamW(params, 1e-3, fused=True)),
        "float32, foreach Adam": way(optimizer=lambda params: optim.Adam(params, 1e-3, foreach=True)),
        "SGD with momentum": way(optimizer=lambda params: optim.SGD(params, 0.1, momentum=0.9)),
        "convolutions": way(**images),
        "convolutions, channels last": way(
            model=lambda: Images().to(memory_format=torch.channels_last), shape=images["shape"]
        ),
        "autocast to bfloat16": way(dtype=torch.bfloat16),
        "convolutions under autocast": way(dtype=torch.bfloat16, **images),
        "gradients accumulated": way(accumulate=2),
        "gradients clipped": way(clip=True),
        "activation checkpointing": way(model=lambda: Net(checkpointed=True)),
        "float64": way(model=lambda: nn.Sequential(Net().double()), wrap=_doubled),
        "gradients in a hook of the script's": way(wrap=_hooked),
        "written to by hand after the step": way(foreign=lambda model: model.first.weight.data.mul_(0.999)),
        "data parallel, one rank": lambda: parallel(device),
        "fully sharded, one rank": lambda: sharded(device),
        "torch.compile": way(wrap=torch.compile),
    }
    if gpu:
        named |= {
            "autocast to float16 with GradScaler": way(dtype=torch.float16, scaled=True),
            "clipped under GradScaler": way(dtype=torch.float16, scaled=True, clip=True),
            "a stream of the script's own": way(stream=True),
            "batches from pinned memory": way(pinned=True),
            "a capturable optimizer": way(optimizer=lambda params: optim.AdamW(params, 1e-3, capturable=True)),
            "a CUDA graph, replayed": lambda: graphed(device),
        }
    return named


def _doubled(model: nn.Module) -> nn.Module:
    """Have a network given its numbers in float64."""
    model.register_forward_pre_hook(lambda _module, inputs: tuple(value.double() for value in inputs))
    return model


def _hooked(model: nn.Module) -> nn.Module:
    """Have the script look at gradients and change one of them."""
    next(model.parameters()).register_hook(lambda gradient: gradient * 0.5)
    return model


def deterministic() -> None:
    """As deterministic as torch can be, so that two bare trainings agree."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.backends.cudnn.benchmark = False

"""What can differ between two runs without being a tensor: machine, versions, flags, code.

Each function returns plain data for one file under `settings/`. Nothing here asks an accelerator to wake up: what only
an initialised device can tell is left out until there is one.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from introspect_cli.capture.environment import redact

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.script.target import Target


def runtime() -> dict[str, Any]:
    """For `settings/runtime`: versions of python, torch and its libraries; thread counts; flags that change numbers."""
    backends = torch.backends
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_git": torch.version.git_version,
        **libraries(),
        "mkl": backends.mkl.is_available(),
        "mkldnn": backends.mkldnn.is_available(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        **switches(),
    }


def hardware() -> dict[str, Any]:
    """For `settings/hardware`: machine, system, CPU (name, count, vector capability).

    Once CUDA is initialised also `gpus`, as of `devices`.
    """
    facts: dict[str, Any] = {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    gpus = devices()
    if gpus:
        facts["gpus"] = gpus
    return facts


def _cpu_name() -> str:
    """The CPU's name: `model name` in /proc/cpuinfo, else `platform.processor()`, which may be ""."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def command(target: Target, directory: str, patterns: tuple[str, ...]) -> dict[str, Any]:
    """For `settings/command`: script or module, arguments without secrets, directory, python, and the launcher if any.

    The launcher's arguments are not redacted here.

    Args:
        target: what runs.
        directory: the working directory.
        patterns: globs over names of arguments that are secret, beside the usual ones.
    """
    started = {"launcher": {"arguments": list(target.launcher), "directory": target.launched_in}}
    return {
        "script": target.script,
        "module": target.module,
        "arguments": redact.arguments(target.args, patterns),
        "directory": directory,
        "python": sys.executable,
        **(started if target.launcher else {}),
    }


_DRIVER: Final = Path("/proc/driver/nvidia/version")
"""File in which NVIDIA's kernel module tells its version."""


def switches() -> dict[str, Any]:
    """Flags of torch that change numbers on accelerators, by name; None for one that this torch lacks or refuses."""
    backends = torch.backends
    cuda, cudnn = backends.cuda, backends.cudnn
    matmul = cuda.matmul
    return {
        "cudnn_enabled": cudnn.enabled,
        "cudnn_deterministic": cudnn.deterministic,
        "cudnn_benchmark": cudnn.benchmark,
        # asked for by an old name after it was set by a new one, these raise
        "cudnn_allow_tf32": _answer_of(lambda: cudnn.allow_tf32),
        "matmul_allow_tf32": _answer_of(lambda: matmul.allow_tf32),
        "matmul_fp32_precision": _answer_of(lambda: matmul.fp32_precision),  # torch >= 2.9
        "float32_matmul_precision": _answer_of(torch.get_float32_matmul_precision),
        "fp16_reduced_precision_reduction": _answer_of(lambda: matmul.allow_fp16_reduced_precision_reduction),
        "bf16_reduced_precision_reduction": _answer_of(lambda: matmul.allow_bf16_reduced_precision_reduction),
        "fp16_accumulation": _answer_of(lambda: matmul.allow_fp16_accumulation),
        "flash_sdp": cuda.flash_sdp_enabled(),
        "mem_efficient_sdp": cuda.mem_efficient_sdp_enabled(),
        "math_sdp": cuda.math_sdp_enabled(),
        "cudnn_sdp": _answer_of(cuda.cudnn_sdp_enabled),
    }


def libraries() -> dict[str, Any]:
    """Versions of CUDA, ROCm, driver, cuDNN and NCCL; None if absent, the last two until CUDA is initialised."""
    awake = torch.cuda.is_initialized()
    return {
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "driver": driver(),
        "cudnn": torch.backends.cudnn.version() if awake else None,
        "nccl": _answer_of(lambda: ".".join(map(str, torch.cuda.nccl.version()))) if awake else None,
    }


def devices() -> list[dict[str, Any]]:
    """Visible GPUs by number: name, compute capability, MiB of memory, UUID if known; [] until CUDA is initialised."""
    if not torch.cuda.is_initialized():
        return []
    gpus = []
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        capability = f"{facts.major}.{facts.minor}"
        described = {"name": facts.name, "capability": capability, "memory_mib": facts.total_memory >> 20}
        uuid = str(getattr(facts, "uuid", ""))
        gpus.append(described | ({"uuid": f"GPU-{uuid}"} if uuid else {}))
    return gpus


def driver(source: Path = _DRIVER) -> str | None:
    """Version of NVIDIA's driver, read from a file of its kernel module; None without that file or a version in it."""
    try:
        match = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", source.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return match[0] if match else None


def _answer_of(question: Callable[[], Any]) -> Any:
    """Answer of a question to torch: booleans, texts, integers as they are, others as text; None if refused."""
    try:
        answer = question()
    except (AttributeError, RuntimeError):
        return None
    return answer if isinstance(answer, (bool, str, int)) else str(answer)

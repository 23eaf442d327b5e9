"""What can differ between two runs without being a tensor: machine, versions, flags, code.

Each function returns plain data for one file under `settings/`. Nothing here asks an accelerator to wake up: what only
an initialised device can tell is left out until there is one.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from introspect_cli.capture.environment import redact

if TYPE_CHECKING:
    from introspect_cli.script.target import Target


_ASKED: Final = {
    "torch": "__version__",
    "torch_git": "version.git_version",
    "cuda": "version.cuda",
    "rocm": "version.hip",
    "mkl": "backends.mkl.is_available",
    "mkldnn": "backends.mkldnn.is_available",
    "threads": "get_num_threads",
    "interop_threads": "get_num_interop_threads",
    "deterministic_algorithms": "are_deterministic_algorithms_enabled",
    "deterministic_warn_only": "is_deterministic_algorithms_warn_only_enabled",
    "default_dtype": "get_default_dtype",
    "cudnn_enabled": "backends.cudnn.enabled",
    "cudnn_deterministic": "backends.cudnn.deterministic",
    "cudnn_benchmark": "backends.cudnn.benchmark",
    "cudnn_allow_tf32": "backends.cudnn.allow_tf32",
    "matmul_allow_tf32": "backends.cuda.matmul.allow_tf32",
    "matmul_fp32_precision": "backends.cuda.matmul.fp32_precision",
    "float32_matmul_precision": "get_float32_matmul_precision",
    "fp16_reduced_precision_reduction": "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "bf16_reduced_precision_reduction": "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "fp16_accumulation": "backends.cuda.matmul.allow_fp16_accumulation",
    "flash_sdp": "backends.cuda.flash_sdp_enabled",
    "mem_efficient_sdp": "backends.cuda.mem_efficient_sdp_enabled",
    "math_sdp": "backends.cuda.math_sdp_enabled",
    "cudnn_sdp": "backends.cuda.cudnn_sdp_enabled",
}
"""What is read or called in torch for versions, thread counts, and flags that change numbers."""
_ASKED_AWAKE: Final = {"cudnn": "backends.cudnn.version", "nccl": "cuda.nccl.version"}
"""As above, None until CUDA is initialised."""


def runtime() -> dict[str, Any]:
    """For `settings/runtime`: versions of python, torch and its libraries; thread counts; flags that change numbers."""
    awake = torch.cuda.is_initialized()
    return {
        "python": platform.python_version(),
        "driver": _told_in("/proc/driver/nvidia/version", r"\b(\d{3}\.\d+(?:\.\d+)?)\b"),
        **{name: _answer_of(path) for name, path in _ASKED.items()},
        **{name: _answer_of(path) if awake else None for name, path in _ASKED_AWAKE.items()},
    }


def hardware() -> dict[str, Any]:
    """For `settings/hardware`: machine, system, CPU (name, count, vector capability).

    Once CUDA is initialised also `gpus`, as of `devices`.
    """
    return {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _told_in("/proc/cpuinfo", r"^model name\s*: *(.*?) *$") or platform.processor(),
        "cpu_count": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        **({"gpus": devices()} if torch.cuda.is_initialized() else {}),
    }


def _told_in(file: str, pattern: str) -> str | None:
    """The first group of a pattern in a file of the system's; None without the file, or where nothing matches."""
    try:
        match = re.search(pattern, Path(file).read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return match[1] if match else None


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


def devices() -> list[dict[str, Any]]:
    """Visible GPUs by number: name, compute capability, MiB of memory, UUID if known; CUDA has to be initialised."""
    gpus = []
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        capability = f"{facts.major}.{facts.minor}"
        described = {"name": facts.name, "capability": capability, "memory_mib": facts.total_memory >> 20}
        uuid = str(getattr(facts, "uuid", ""))
        gpus.append(described | ({"uuid": f"GPU-{uuid}"} if uuid else {}))
    return gpus


def _answer_of(path: str) -> Any:
    """What stands at a dotted path in torch, called if it can be; None where this torch lacks it or refuses to say.

    Booleans, texts, integers and None as they are, tuples with dots between, others as text.
    """
    try:
        answer = attrgetter(path)(torch)
        answer = answer() if callable(answer) else answer
    except (AttributeError, RuntimeError):  # as a flag asked for by an old name after it was set by a new one
        return None
    if isinstance(answer, tuple):
        return ".".join(map(str, answer))
    return answer if answer is None or isinstance(answer, (bool, str, int)) else str(answer).removeprefix("torch.")

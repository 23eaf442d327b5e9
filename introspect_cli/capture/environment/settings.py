"""What can differ between two runs without being a tensor: machine, versions, flags, code.

Each function returns plain data for one file under `settings/`. Nothing here asks an accelerator to wake up.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from introspect_cli.capture.environment import accelerators, redact

if TYPE_CHECKING:
    from introspect_cli.script import Target


def runtime() -> dict[str, Any]:
    """Interpreter, torch and the libraries under it, thread counts, determinism flags."""
    backends = torch.backends
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_git": torch.version.git_version,
        **accelerators.libraries(),
        "mkl": backends.mkl.is_available(),
        "mkldnn": backends.mkldnn.is_available(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        **accelerators.switches(),
    }


def hardware() -> dict[str, Any]:
    """Processor, memory and accelerators."""
    facts: dict[str, Any] = {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    gpus = accelerators.devices()
    if gpus:
        facts["gpus"] = gpus
    return facts


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def command(target: Target, directory: str, patterns: tuple[str, ...]) -> dict[str, Any]:
    """What was run: the script or module, its arguments, where; and by which launcher, where that was captured."""
    started = {"launcher": {"arguments": list(target.launcher), "directory": target.launched_in}}
    return {
        "script": target.script,
        "module": target.module,
        "arguments": redact.arguments(target.args, patterns),
        "directory": directory,
        "python": sys.executable,
        **(started if target.launcher else {}),
    }

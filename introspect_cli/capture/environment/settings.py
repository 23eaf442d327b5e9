"""What can differ between two runs without being a tensor: machine, versions, flags, code.

Each function returns plain data for one file under `settings/`. Nothing here asks an accelerator to wake up.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from introspect_cli.capture.environment import redact


def packages() -> dict[str, str]:
    """Installed distributions: name to version."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(name, distribution.version)
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def runtime() -> dict[str, Any]:
    """Interpreter, torch and the libraries under it, thread counts, determinism flags."""
    backends = torch.backends
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "cudnn": backends.cudnn.version() if torch.cuda.is_initialized() else None,
        "mkl": backends.mkl.is_available(),
        "mkldnn": backends.mkldnn.is_available(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn_deterministic": backends.cudnn.deterministic,
        "cudnn_benchmark": backends.cudnn.benchmark,
        "cudnn_allow_tf32": backends.cudnn.allow_tf32,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "flash_sdp": backends.cuda.flash_sdp_enabled(),
        "mem_efficient_sdp": backends.cuda.mem_efficient_sdp_enabled(),
        "math_sdp": backends.cuda.math_sdp_enabled(),
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
    if torch.cuda.is_initialized():
        facts["gpus"] = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return facts


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def git(directory: str) -> dict[str, Any]:
    """Commit of the work tree that holds `directory`, and which tracked files differ from it; {} outside of git."""

    def ask(*arguments: str) -> str | None:
        try:
            answer = subprocess.run(  # noqa: S603 - fixed arguments, no shell
                ["git", "-C", directory, *arguments],  # noqa: S607 - the user's own git
                capture_output=True,
                text=True,
                timeout=10,
                check=False,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return answer.stdout.rstrip("\n") if answer.returncode == 0 else None

    commit = ask("rev-parse", "HEAD")
    if commit is None:
        return {}
    changed = [line[3:] for line in (ask("status", "--porcelain", "--untracked-files=no") or "").splitlines()]
    return {
        "commit": commit,
        "branch": ask("rev-parse", "--abbrev-ref", "HEAD"),
        "subject": redact.looks(ask("log", "-1", "--format=%s") or ""),
        "dirty": bool(changed),
        "changed": sorted(changed)[:200],
    }


def command(argv: tuple[str, ...], script: str | None, module: str | None, patterns: tuple[str, ...]) -> dict[str, Any]:
    """What was run: the script or module, its arguments, where."""
    shown = redact.arguments(argv, patterns)
    return {
        "script": script,
        "module": module,
        "arguments": shown,
        "options": _options(shown),
        "directory": str(Path.cwd()),
        "python": sys.executable,
    }


def _options(argv: list[str]) -> dict[str, Any]:
    """Arguments by option name, so that a diff says `--lr 3e-4 -> 1e-3` wherever it stands in the line."""
    options: dict[str, Any] = {}
    name = ""
    for argument in argv:
        if argument.startswith("-") and not _is_number(argument):
            name, equals, text = argument.partition("=")
            options[name] = text if equals else True
        elif name and options.get(name) is True:
            options[name] = argument
        elif name and isinstance(options.get(name), list):
            options[name].append(argument)
        elif name:
            options[name] = [options[name], argument]
        else:
            options.setdefault("positional", []).append(argument)
    return options


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

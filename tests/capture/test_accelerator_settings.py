"""What is kept of an accelerator beside its tensors."""

from __future__ import annotations

import torch

from introspect_cli.capture.environment import settings


def test_switches_are_those_of_the_moment():
    before = torch.backends.cudnn.benchmark, torch.backends.cuda.flash_sdp_enabled()
    answered = settings.runtime()
    assert (answered["cudnn_benchmark"], answered["flash_sdp"]) == before
    try:
        torch.backends.cudnn.benchmark = not before[0]
        torch.backends.cuda.enable_flash_sdp(not before[1])
        answered = settings.runtime()
        assert (answered["cudnn_benchmark"], answered["flash_sdp"]) == (not before[0], not before[1])
    finally:
        torch.backends.cudnn.benchmark = before[0]
        torch.backends.cuda.enable_flash_sdp(before[1])


def test_tf32_is_reported_whichever_way_it_was_set():
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        matmul.allow_tf32 = True
        assert settings.switches()["matmul_allow_tf32"] is True
    finally:
        matmul.allow_tf32 = before


def test_nothing_wakes_a_device():
    settings.switches()
    settings.libraries()
    assert settings.devices() == []
    assert not torch.cuda.is_initialized()


def test_the_drivers_version_is_read_from_its_module(tmp_path):
    said = tmp_path / "version"
    said.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build\nGCC version: 12.3.0\n"
    )
    assert settings.driver(said) == "570.86.10"
    assert settings.driver(tmp_path / "none") is None

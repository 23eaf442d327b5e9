"""Tensors stored in full come back exactly, and other people's libraries read them."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import safetensors.torch
import torch
from synthetic import write_run

from introspect_cli.errors import StoreError
from introspect_cli.store.run import open_run
from introspect_cli.store.run_writer import StoreWriter
from introspect_cli.store.verify import verify_run

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool, torch.complex64, torch.complex128, torch.complex32,
]  # fmt: skip


def data_of(tensor):
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def saved(path, tensor, checksum=0xABC):
    with StoreWriter.create(path) as store:
        store.save_tensor(checksum, data_of(tensor), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        store.write_manifest({"status": "complete"})
    return path / "rank0/tensors" / f"{checksum:016x}.safetensors"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_type_comes_back_exactly_and_from_the_safetensors_library_too(tmp_path, dtype):
    raw = torch.randint(0, 256, (6, 64), dtype=torch.uint8)
    if dtype is torch.bool:
        raw &= 1
    tensor = raw.view(dtype)
    loaded = safetensors.torch.load_file(saved(tmp_path / "run", tensor))["tensor"]
    assert loaded.dtype == tensor.dtype or dtype.is_complex  # for some of which the format has no name
    assert data_of(loaded) == data_of(tensor)
    with open_run(tmp_path / "run") as run:
        back = run.tensor(0xABC)
        assert run.tensor(0xDEF) is None
    wide = {torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
    wide |= {torch.float8_e4m3fn: torch.float32, torch.float8_e5m2: torch.float32}
    expected = tensor.to(wide.get(dtype, dtype)).numpy()
    assert back.shape == expected.shape
    assert back.dtype == expected.dtype
    np.testing.assert_array_equal(back, expected)
    assert verify_run(tmp_path / "run").counts["tensors"] == 1


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1, 1)])
def test_shapes_without_much_in_them(tmp_path, shape):
    saved(tmp_path / "run", torch.ones(shape))
    with open_run(tmp_path / "run") as run:
        assert run.tensor(0xABC).shape == shape


def test_a_tensor_is_stored_once(tmp_path):
    data = memoryview(np.ones(100, np.float32))
    with StoreWriter.create(tmp_path / "run") as store:
        first = store.save_tensor(1, data, "float32", (100,))
        assert first > 400
        assert store.save_tensor(1, data, "float32", (100,)) == 0
    assert len(list((tmp_path / "run/rank0/tensors").iterdir())) == 1


def test_a_run_without_tensors_has_none(tmp_path):
    with open_run(write_run(tmp_path / "run", [])) as run:
        assert run.tensor(1) is None


def with_header(file, change):
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


HEADERS = {
    "more elements": lambda h: h["__metadata__"].update(shape="[1000000000]"),
    "overflowing shape": lambda h: h["__metadata__"].update(shape=str([2**40] * 4)),
    "zero times huge": lambda h: h["__metadata__"].update(shape=str([0, 2**70])),
    "negative": lambda h: h["__metadata__"].update(shape="[-4, -4]"),
    "boolean": lambda h: h["__metadata__"].update(shape="[true, 16]"),
    "text": lambda h: h["__metadata__"].update(shape='"16"'),
    "many dimensions": lambda h: h["__metadata__"].update(shape=str([1] * 60 + [16])),
    "deep": lambda h: h["__metadata__"].update(shape="[" * 20_000),
    "other type": lambda h: h["__metadata__"].update(dtype="float64"),
    "object type": lambda h: h["__metadata__"].update(dtype="O", crc32="0"),
    "no metadata": lambda h: h.pop("__metadata__"),
    "metadata a list": lambda h: h.update(__metadata__=[1]),
    "crc": lambda h: h["__metadata__"].update(crc32="zz"),
    "other tensor": lambda h: h["__metadata__"].update(checksum="1"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_lie_end_in_a_sentence(tmp_path, name):
    file = saved(tmp_path / "run", torch.ones(16))
    with_header(file, HEADERS[name])
    with open_run(tmp_path / "run") as run, pytest.raises(StoreError, match="is damaged: "):
        run.tensor(0xABC)
    assert not verify_run(tmp_path / "run").sound


@pytest.mark.parametrize(
    "change",
    [
        *(
            lambda _, head=head: head
            for head in (b"", b"\0" * 7, b"\xff" * 8, struct.pack("<Q", 2**63), struct.pack("<Q", 100) + b"{}")
        ),
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    ],
)
def test_lengths_that_lie_and_altered_data_end_in_a_sentence(tmp_path, change):
    file = saved(tmp_path / "run", torch.ones(16))
    file.write_bytes(change(file.read_bytes()))
    with open_run(tmp_path / "run") as run, pytest.raises(StoreError, match="is damaged: "):
        run.tensor(0xABC)

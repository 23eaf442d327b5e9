"""A checkpoint is a stranger's file: what is wrong with it is one sentence, and nothing in it is executed."""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from arrays import as_safetensors
from checkpoint_runs import said

from introspect_cli.errors import IntrospectError
from introspect_cli.exchange.checkpoints import open_any

torch = pytest.importorskip("torch")


class Runs:
    """What executes a command when it is unpickled."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def good(place):
    return as_safetensors(place / "good", {"w": np.arange(6.0)})


def with_header(place, header, data=b""):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path = place / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(**other):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **other}


def refused(path):
    """The sentence that opening it gives."""
    with pytest.raises(IntrospectError) as answered, open_any(path):
        pass
    assert "\n" not in str(answered.value)
    return str(answered.value)


@pytest.mark.parametrize("ending", [".pt", ".pth", ".bin", ".ckpt"])
@pytest.mark.parametrize("way", ["zip", "legacy", "bare"])
def test_a_pickle_that_runs_code_is_refused_and_does_not_run(tmp_path, ending, way):
    path, sign = tmp_path / f"bad{ending}", tmp_path / "ran"
    held = {"w": torch.zeros(2), "odd": Runs(sign)}
    if way == "bare":
        path.write_bytes(pickle.dumps(held["odd"]))
    else:
        torch.save(held, path, _use_new_zipfile_serialization=way == "zip")
    answered = refused(path)
    assert str(path) in answered
    assert ("holds more than tensors and plain values" in answered) or way == "bare"
    assert not sign.exists()


def test_a_whole_model_that_was_saved_names_its_class_and_what_to_do(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")
    answered = refused(tmp_path / "model.pt")
    assert "torch.nn.modules.linear.Linear" in answered
    assert "save the state dicts alone" in answered


def test_the_metadata_of_a_distributed_checkpoint_runs_nothing(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    assert "is no metadata of torch.distributed.checkpoint" in refused(tmp_path / "c")
    (tmp_path / "c" / ".metadata").write_bytes(b"\x80\x04})" + b"\x85" * 1_000_000 + b"Ns.")  # a deep tuple as a key
    assert "is no metadata of torch.distributed.checkpoint" in refused(tmp_path / "c")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../good.safetensors", "/etc/passwd", "..", "", "sub/good.safetensors", 3])
def test_an_index_reaches_no_file_outside_its_directory(tmp_path, name):
    (tmp_path / "c" / "sub").mkdir(parents=True)
    good(tmp_path)
    good(tmp_path / "c" / "sub")
    (tmp_path / "c" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    answered = refused(tmp_path / "c")
    assert "which is no file beside it" in answered or "it has no weight_map" in answered


def test_parts_of_a_distributed_checkpoint_lie_beside_its_metadata(tmp_path):
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    (tmp_path / "c").mkdir()
    torch.save(torch.zeros(4), tmp_path / "outside")
    torch.save(torch.zeros(4), tmp_path / "c" / "inside")
    length = min((place / name).stat().st_size for place, name in ((tmp_path, "outside"), (tmp_path / "c", "inside")))
    for file, first, sizes, answered in (
        ("../outside", 0, [4], "which is no file beside it"),
        ("nothing", 0, [4], "nothing is missing"),
        ("inside", 1 << 40, [4], "lies beyond the end of inside"),
        ("inside", 0, [1 << 50], "a part of w lies outside of it"),
        ("inside", 0, [2], "the parts of w are not all of it"),
    ):
        chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size(sizes))
        about = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4]), [chunk])
        stored = {MetadataIndex("w", torch.Size([0])): _StorageInfo(file, first, length)}
        (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(Metadata({"w": about}, None, stored)))
        assert answered in refused(tmp_path / "c")


HEADERS = {
    "longer than the file": (b"x" * 8, b""),
    "no JSON": (b"{]", b""),
    "a list": (b"[1]", b""),
    "deep": (b"[" * 100_000, b""),
    "beyond the end": ({"w": entry(shape=[1 << 40], data_offsets=[0, 1 << 42])}, b"x" * 8),
    "another size": ({"w": entry(shape=[1 << 40])}, b"x" * 8),
    "backwards": ({"w": entry(data_offsets=[8, 0])}, b"x" * 8),
    "negative": ({"w": entry(shape=[-2])}, b"x" * 8),
    "fractions": ({"w": entry(shape=[2.0])}, b"x" * 8),
    "no offsets": ({"w": {"dtype": "F32", "shape": [2]}}, b"x" * 8),
    "texts": ({"w": entry(shape="ab")}, b"x" * 8),
    "empty": ({}, b""),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_that_lies_is_one_sentence(tmp_path, kind):
    path = with_header(tmp_path, *HEADERS[kind])
    if kind == "longer than the file":
        path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    answered = refused(path)
    assert str(path) in answered
    assert ("is not a .safetensors file" in answered) or kind == "empty"


def test_files_that_are_cut_are_one_sentence(tmp_path):
    torch.save({"w": torch.arange(1000.0)}, tmp_path / "a.pt")
    np.savez(tmp_path / "a.npz", w=np.arange(1000.0))
    paths = [tmp_path / "a.pt", tmp_path / "a.npz", good(tmp_path)]
    for path in paths:
        data = path.read_bytes()
        for size in (0, 1, 7, 8, 9, 100, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:size])
            assert str(path) in refused(path)


def test_a_file_of_an_element_type_that_is_not_known_is_never_called_equal(tmp_path):
    header = {"w": entry(), "odd": entry(dtype="F4", shape=[4], data_offsets=[8, 10])}
    path = with_header(tmp_path, header, b"x" * 10)
    verdict, sentence, _ = said(path, path)
    assert (verdict, "1 could not be read" in sentence) == ("undecided", True)


def test_pipes_and_devices_are_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    os.mkfifo(tmp_path / "pipe.pt")
    for name in ("pipe.safetensors", "pipe.pt"):
        assert "is not a regular file" in refused(tmp_path / name)
    (tmp_path / "zero.npz").symlink_to("/dev/zero")
    assert "is not a regular file" in refused(tmp_path / "zero.npz")
    (tmp_path / "c").mkdir()
    os.mkfifo(tmp_path / "c" / ".metadata")
    assert "is not a regular file" in refused(tmp_path / "c")
    (tmp_path / "gone.pt").symlink_to("nowhere")
    assert "cannot read" in refused(tmp_path / "gone.pt")


def test_objects_in_a_numpy_archive_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", w=np.array([Runs(tmp_path / "ran")], object))
    assert "Object arrays cannot be loaded" in refused(tmp_path / "a.npz")
    assert not (tmp_path / "ran").exists()


def test_a_pickle_that_refers_to_itself_or_without_end_is_refused(tmp_path):
    circle = [torch.zeros(2)]
    circle.append(circle)
    torch.save({"a": circle}, tmp_path / "a.pt")
    assert "nested too deep, or without end" in refused(tmp_path / "a.pt")
    bomb = [torch.zeros(1)]
    for _ in range(40):
        bomb = [bomb, bomb]
    torch.save({"a": bomb}, tmp_path / "a.pt")
    assert "nested too deep, or without end" in refused(tmp_path / "a.pt")


def test_a_zip_whose_parts_are_compressed_is_no_file_of_torch(tmp_path):
    torch.save({"w": torch.zeros(1 << 16)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as old, zipfile.ZipFile(tmp_path / "a.pt", "w", 8) as new:
        for member in old.namelist():
            new.writestr(member, old.read(member))
    assert "its parts are compressed" in refused(tmp_path / "a.pt")


PEAK = """
import resource, sys
import numpy
from introspect_cli.exchange.checkpoints import open_any
def anonymous():
    found = dict(line.split(":") for line in open("/proc/self/status"))
    return int(found["VmHWM"].split()[0])
if sys.argv[1].endswith(".pt"):
    import torch
before = anonymous()
with open_any(sys.argv[1]) as run:
    (record,) = run.rank(0).records(0)
    assert record.summary.layout.numel == 1 << 26
print((anonymous() - before) >> 10)
"""


def test_a_tensor_of_256_mb_takes_a_small_part_of_that(tmp_path):
    """A sparse file, whose zeros are nowhere on the disk; safetensors is read in pieces of 4 MB."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 26], "data_offsets": [0, 1 << 28]}}).encode()
    with (tmp_path / "big.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + (1 << 28))
    words = [sys.executable, "-c", PEAK, str(tmp_path / "big.safetensors")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100

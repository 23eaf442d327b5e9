"""Mutates a valid store in the ways a bad disk, a bad transfer or a bad person would, and reads what comes out.

Two kinds of attack. A *clumsy* one changes bytes and leaves the checks as they are: the answer must be an error, or the
same answer, or (where only an end was lost) the beginning of it. A *forged* one makes every check right again after
the change, so that the bytes reach the deepest code: the answer may be anything, but must be one, or an error.

With the package installed, `python tests/support/store_attacks.py COUNT [SEED]` prints what was tried and
what went wrong.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
from synthetic import row, write_run

from introspect_cli.errors import StoreError
from introspect_cli.records import ModuleInfo
from introspect_cli.store.files import HEADS, LOG, Folder
from introspect_cli.store.frames import BACK, HEAD, START, STEP, chained
from introspect_cli.store.log import CACHE, Frames
from introspect_cli.store.run import RunState, open_run
from introspect_cli.store.run_writer import StoreWriter
from introspect_cli.store.verify import verify_run

TENSOR = 0xFEED
INTERESTING = (
    0, 1, 2, 7, 8, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1,
)  # fmt: skip
SLOW = 5.0  # seconds; an ordinary reading takes a hundredth


def build(path, shift=0.0, complete=True):
    """A small run with something of everything."""
    steps = [
        [
            row("data", "batch", "DataLoader", np.arange(6.0).reshape(2, 3) + shift),
            row("forward", "output", f"A.{step}", np.full(4, step + shift), module_class="Linear"),
            row("loss", "loss", "loss", 0.5 * step),
            row("optimizer", "hyperparameter", "AdamW", 0.1, path="[0]['lr']"),
            row("backward", "grad_output", "A", None),
        ]
        for step in range(4)
    ]
    settings = {"environment": {"HOME": "x", "LIST": [1, 2.5, None, True]}, "git": {"commit": "abc", "dirty": False}}
    modules = [ModuleInfo("A", "A", "a.py:1", ("w", "b"), ("m",), ("c=d",)), ModuleInfo("A.0", "Linear")]
    write_run(path, steps, settings=settings, modules=modules, ranks=2, sorted_stats=("med",), complete=complete)
    with Folder.at(str(path / "rank1")) as folder, folder.file(LOG) as log:  # as a long log has them
        (path / "rank1" / HEADS).write_bytes(Frames(log, 1, "").encoded())
    with StoreWriter.create(path.with_name("tensors")) as store:
        store.save_tensor(TENSOR, memoryview(np.arange(12, dtype=np.float32)), "float32", (3, 4))
    path.with_name("tensors").joinpath("rank0/tensors").rename(path / "rank0/tensors")
    shutil.rmtree(path.with_name("tensors"))
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def answer(path):
    """All that can be read of a run: state, documents, tensor, and for each rank its names and its steps."""
    with open_run(path) as run:
        tensor = run.tensor(TENSOR)
        fixed = run.manifest, dict(run.settings), None if tensor is None else (tensor.shape, tensor.tobytes())
        ranks = {}
        for rank in run.ranks:
            reader = run.rank(rank)
            steps = [(entry.step, entry.chain, repr(list(reader.records(entry.step)))) for entry in reader.steps]
            ranks[rank] = (reader.modules if steps else None, steps)
        return run.state, fixed, ranks


def clumsy_problem(before, path):
    """What is wrong with the answer to a clumsy attack; None if nothing."""
    try:
        state, fixed, ranks = answer(path)
    except StoreError as error:
        return None if "\n" not in str(error) else "the error is not one sentence"
    (manifest, settings, tensor), (own_manifest, own_settings, own_tensor) = fixed, before[1]
    said = {name: value for name, value in manifest.items() if name != "status"}  # a cut log has what was said before
    if tensor != own_tensor or not (_is_of(said, own_manifest) and _is_of(settings, own_settings)):
        return "another manifest, setting or tensor was read"
    lost = False
    if set(ranks) != set(before[2]):
        return "another number of ranks was read"
    for rank, (modules, steps) in ranks.items():
        own_modules, own_steps = before[2][rank]
        if steps != own_steps[: len(steps)] or (steps and modules != own_modules):
            return "other records were read"
        lost = lost or len(steps) < len(own_steps)
    if lost and state is RunState.COMPLETE:
        return "a run that lost steps is called complete"
    return None


def _is_of(some, every):
    """Whether all that one mapping has is in the other."""
    return all(name in every and repr(value) == repr(every[name]) for name, value in some.items())


def forged_problem(path):
    try:
        answer(path)
    except StoreError as error:
        return None if "\n" not in str(error) else "the error is not one sentence"
    return None


# --- mutations: bytes -> bytes


def _flip(data, rng, others):
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        at = rng.randrange(len(data))
        data[at] ^= 1 << rng.randrange(8)


def _set_number(data, rng, others):
    size, code = rng.choice(((1, "<B"), (2, "<H"), (4, "<I"), (8, "<Q")))
    at = rng.randrange(max(len(data) - size, 0) + 1) // size * size
    value = rng.choice(INTERESTING) & ((1 << 8 * size) - 1)
    data[at : at + size] = struct.pack(code, value)


def _nudge_number(data, rng, others):
    size, code = rng.choice(((4, "<I"), (8, "<Q")))
    at = rng.randrange(max(len(data) - size, 0) + 1) // size * size
    if at + size <= len(data):
        (value,) = struct.unpack_from(code, data, at)
        struct.pack_into(code, data, at, (value + rng.choice((-8, -1, 1, 8))) % (1 << 8 * size))


def _truncate(data, rng, others):
    del data[rng.randrange(len(data)) :]


def _extend(data, rng, others):
    data += rng.randbytes(rng.choice((1, 8, 60, 120, 4000)))


def _insert(data, rng, others):
    at = rng.randrange(len(data))
    data[at:at] = rng.randbytes(rng.choice((1, 4, 8, 120)))


def _remove(data, rng, others):
    at = rng.randrange(len(data))
    del data[at : at + rng.choice((1, 4, 8, 120))]


def _swap(data, rng, others):
    size = rng.choice((1, 4, 8, 16, 64, 120))
    a, b = (rng.randrange(max(len(data) - size, 0) + 1) for _ in range(2))
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]


def _duplicate(data, rng, others):
    size = rng.choice((8, 64, 120, 500))
    at = rng.randrange(len(data))
    data[at:at] = data[at : at + size]


def _zero(data, rng, others):
    at = rng.randrange(len(data))
    size = rng.choice((4, 16, 120, len(data)))
    data[at : at + size] = bytes(len(data[at : at + size]))


def _other_file(data, rng, others):
    data[:] = rng.choice(others)


def _splice(data, rng, others):
    other = rng.choice(others)
    at = rng.randrange(len(data))
    data[at:] = other[at:]


PIECES = (
    b"[" * 5000,
    b'{"a":' * 500, b'"format": 3, ', b'"format": 1, ', b'"launch": {"world_size": 9, "job": "x"}, ', b"{}",
    b"\xff\xfe", b"9" * 5000, b'"id": "x", ', b'"status": "complete", ', b'"\\ud800"', b"NaN", b"\t", b"[]" * 3000,
)  # fmt: skip


def _piece(data, rng, others):
    at = rng.choice([0, *(position + 1 for position, byte in enumerate(data) if byte in b"{, ")])
    data[at:at] = rng.choice(PIECES)


MUTATIONS = (
    _flip, _flip, _set_number, _set_number, _nudge_number, _truncate, _extend, _insert, _remove, _swap, _duplicate,
    _zero, _other_file, _splice,
)  # fmt: skip


def mutated(files, others, rng):
    """Copies of `files` of which one or two were changed; what was done, as a text."""
    out, done = dict(files), []
    for _ in range(rng.choice((1, 1, 1, 2))):
        name = rng.choice([name for name in files if out[name]])
        mutation = _piece if name.endswith(".json") and rng.random() < 0.5 else rng.choice(MUTATIONS)
        data = bytearray(out[name])
        mutation(data, rng, [other for other in (*files.values(), *others.values()) if other])
        out[name] = bytes(data)
        done.append(f"{mutation.__name__} of {name}")
    return out, ", ".join(done)


# --- forging: make every check right again


def forged(files):
    """`files` with all CRCs, chains and check lines computed again over what is there now."""
    out = dict(files)
    for name, data in files.items():
        if name.endswith("log.bin"):
            out[name] = _forged_log(data)
        elif name.endswith("heads.bin") and len(data) >= CACHE.size:
            out[name] = data[:8] + struct.pack("<I", zlib.crc32(data[CACHE.size :])) + data[12:]
        elif name.endswith(".json"):
            body = data[: data.rfind(b', "crc32"')] + b"}"
            out[name] = body[:-1] + b', "crc32": %d}' % zlib.crc32(body)
        elif name.endswith(".safetensors"):
            out[name] = _forged_tensor(data)
    return out


def _forged_log(data):
    if len(data) < START.size:
        return data
    out = bytearray(data)
    crc = zlib.crc32(out[: START.size - 4])
    out[START.size - 4 : START.size] = struct.pack("<I", crc)
    at, chain = START.size, bytes(16)
    while at + HEAD.size <= len(out):
        kind, rows, length, step, digest, _, body_crc, _ = HEAD.unpack_from(out, at)
        end = at + HEAD.size + length
        if end > len(out):
            break
        chain = chained(chain, step, digest) if kind == STEP else bytes(16) if kind == BACK else chain
        body_crc = zlib.crc32(out[at + HEAD.size : end])
        HEAD.pack_into(out, at, kind, rows, length, step, digest, chain, body_crc, 0)
        crc = zlib.crc32(out[at : at + HEAD.size - 4], crc)
        struct.pack_into("<I", out, at + HEAD.size - 4, crc)
        at += HEAD.size + length
    return bytes(out)


def _forged_tensor(data):
    if len(data) < 8:
        return data
    length = struct.unpack("<Q", data[:8])[0]
    try:
        about = json.loads(data[8 : 8 + length])["__metadata__"]
        begins = f"{int(about['checksum'], 16):016x} {about['dtype']} {json.loads(about['shape'])} "
        crc = zlib.crc32(begins.encode())
        written = about["crc32"].encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return data  # too broken for the reader to get as far as the CRC
    return data.replace(written, b"%08x" % zlib.crc32(data[8 + length :], crc), 1)


# --- the campaign


def attack(folder, count, seed):
    """Try `count` mutations; the problems found, each with its number."""
    rng = random.Random(seed)
    runs = []
    for complete in (True, False):
        path = folder / f"run{complete}"
        files = build(path, complete=complete)
        runs.append((path, files, answer(path)))
    others = build(folder / "other", shift=1.0)
    found = []
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024  # by whatever this process did before
    for number in range(count):
        path, files, before = rng.choice(runs)
        forge = rng.random() < 0.5
        changed, done = mutated(files, others, rng)
        if forge:
            changed = forged(changed)
        touched = [name for name in files if changed[name] != files[name]]
        for name in touched:
            _overwrite(path / name, changed[name])
        begin = time.process_time()  # a machine that pauses this process has not made the reader slow
        try:
            problem = forged_problem(path) if forge else clumsy_problem(before, path)
            verify_run(path)
        except StoreError:
            pass
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if time.process_time() - begin > SLOW:
            problem = problem or "it took too long"
        if problem:
            found.append(f"{number} ({'forged' if forge else 'clumsy'}, {done}): {problem}")
        for name in touched:
            _overwrite(path / name, files[name])
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    if memory > max(1024, used):
        found.append(f"{memory} MB of memory were used")
    return found


def _overwrite(file, data):
    file.unlink()  # some file systems flush a file that is truncated and written again, which takes milliseconds
    file.write_bytes(data)


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = attack(Path(folder), count, seed)
    seconds = time.monotonic() - begin
    sys.stdout.write("\n".join([f"{count} mutations in {seconds:.0f} s: {len(found)} problems", *found]) + "\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

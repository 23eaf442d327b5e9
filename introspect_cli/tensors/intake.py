"""The compiled intake: plain tensors summarised, and their sites noted, in one call.

Asking a tensor six things by its methods costs half a microsecond, and asking for its storage leaves a Python object on
it for as long as it lives. Torch exports C functions for compiled models ("aoti_torch_...", kept as they are from one
version to the next) that answer in nanoseconds. They take the address of the C++ tensor. It is the first field of the
Python object, but no header promises that; so it is looked for, and everything that the functions then say of some
tensors is compared with what torch says in Python. Where anything is missing or differs there are none.

`add` and `add_all` are the summarizer's. A recorder tells `into` what it records into: its list of rows, that of slots
and the times of sites, and its lock, which nobody who uses the summarizer does without. Then:

- `record(site, tensor)` returns the slot; or -1, and nothing is done, where the tensor has to take the slow path or the
  site has been recorded in this step.
- `record_all(sites, tensors)`, for who has the recorder's lock, takes lists and returns True; False where nothing is
  done; or the slots of those that it could summarise, -1 for the others, which `Summarizer.add_all` takes: no site is
  noted then.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from introspect_cli.tensors import kernels as k
from introspect_cli.tensors import parallel
from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from ctypes import _NamedFuncPointer as _Function

    import numpy as np
    import numpy.typing as npt


def new_intake(
    flags: int,
    layouts: list[int],
    addresses: list[int],
    team: npt.NDArray[np.int64],
    memory: Any,
    lock: Any,
) -> Any:
    """Make the compiled intake; None where torch's C functions are missing or do not answer as torch does in Python.

    Args:
        flags: the sum of STATS and SKETCH, as far as they are wanted.
        layouts: the number of each slot's layout; the intake appends one for each tensor that it summarises.
        addresses: addresses of the slots' rows.
        team: the engine's shared memory of threads.
        memory: rows of this step and the last by the address of their elements.
        lock: the summarizer's; the intake takes it.
    """
    addresses_of_functions = functions()
    if addresses_of_functions is None:
        return None
    return k.KERNELS.intake(
        flags,
        k.WORTHWHILE,
        team.ctypes.data,
        torch.Tensor,
        torch.nn.Parameter,
        torch._C._len_torch_function_stack,  # noqa: SLF001  # no public one
        layouts,
        addresses,
        addresses_of_functions,
        team,
        memory,
        torch.get_num_threads,
        parallel.SCRIPT,
        lock,
    )


# --- torch's own C functions

_LIBRARIES: Final = ("libtorch_cpu.so", "libtorch_cpu.dylib", "torch_cpu.dll")
_QUESTIONS: Final = (
    ("aoti_torch_get_layout", ctypes.c_int32),
    ("aoti_torch_get_device_type", ctypes.c_int32),
    ("aoti_torch_get_dtype", ctypes.c_int32),
    ("aoti_torch_get_dim", ctypes.c_int64),
    ("aoti_torch_get_sizes", ctypes.c_void_p),
    ("aoti_torch_get_strides", ctypes.c_void_p),
    ("aoti_torch_get_storage_size", ctypes.c_int64),
    ("aoti_torch_get_storage_offset", ctypes.c_int64),
    ("torch_get_const_data_ptr", ctypes.c_void_p),
)
"""In the order of `Functions` in tensor.h, each with the type of its answer."""
_TYPES: Final = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64),
    *(None, None, None, torch.bool, None, None, None, torch.bfloat16),
)
"""Element types by torch's number for them, as tensor.cpp has them."""
_WORD: Final = ctypes.sizeof(ctypes.c_void_p)
_TENSOR: Final = 24 * _WORD
"""Bytes of a C++ tensor, which torch keeps it to."""


@functools.cache
def functions() -> bytes | None:
    """Bytes of `Functions` in tensor.h (two offsets, a key and nine addresses), found once in a process.

    Returns:
        None if any function is missing, any answer differs from what torch says in Python, or anything raises.
    """
    try:
        asked = _functions_of_torch()
        with unobserved():
            samples = _sample_tensors()
            place = _tensor_offset(samples)
            if _WORD != 8 or place is None or not all(_has_same_answers(asked, place, tensor) for tensor in samples):
                return None
            keys, negation = _offset_of_keys(place, samples)
    except Exception:  # whatever torch has made of them: there is another way
        return None
    addresses = [_read_word(ctypes.addressof(function)) or 0 for function in asked]
    return struct.pack(f"=qqQ{len(addresses)}q", place, keys, negation, *addresses)


def _functions_of_torch() -> list[_Function]:
    """The C functions of `_QUESTIONS`, in their order, from torch's library, which is loaded already.

    Raises:
        OSError: there is no such library.
        AttributeError: it lacks one of the functions.
    """
    folder = Path(torch.__file__).parent / "lib"
    library = ctypes.CDLL(str(next((path for name in _LIBRARIES if (path := folder / name).exists()), folder)))
    return [library[name] for name, _ in _QUESTIONS]


def _tensor_offset(samples: list[torch.Tensor]) -> int | None:
    """Offset in bytes of the pointer to the C++ tensor in a tensor's Python object.

    Returns:
        None where not exactly one offset holds for all samples.
    """
    aoti: Any = torch._C._aoti  # noqa: SLF001  # no public one
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    places = set(range(object.__basicsize__, torch.Tensor.__basicsize__, _WORD))
    for tensor in samples:
        handle = aoti.unsafe_alloc_void_ptr_from_tensor(tensor)
        shared = _read_word(pointer(handle, None))  # a C++ tensor is a pointer to what all its copies share
        places = {at for at in places if _read_word(id(tensor) + at) == shared}
        aoti.alloc_tensor_by_stealing_from_void_ptr(handle)
    return places.pop() if len(places) == 1 else None


def _offset_of_keys(place: int, samples: list[torch.Tensor]) -> tuple[int, int]:
    """Where a C++ tensor has its dispatch keys, and which of their bits says that it is negated lazily.

    Args:
        place: what `_tensor_offset` returned.
        samples: tensors to try it on.

    Returns:
        The offset in bytes in a C++ tensor, and a mask.

    Raises:
        ValueError: they are not found for certain.
        AttributeError: this torch does not say what they are.
    """
    keys_of: Any = torch._C._dispatch_keys  # noqa: SLF001  # no public one
    plain = torch.zeros(2, dtype=torch.complex64, device="cpu")
    negated = plain.conj().imag
    every = [(_read_word(id(tensor) + place) or 0, keys_of(tensor).raw_repr()) for tensor in [*samples, plain, negated]]
    (found,) = (
        at for at in range(0, _TENSOR, _WORD) if all((_read_word(tensor + at) or 0) == keys for tensor, keys in every)
    )
    negation = keys_of(negated).raw_repr() & ~keys_of(plain.imag).raw_repr()
    if not negation:
        raise ValueError("nothing tells a tensor that is negated lazily from another")
    return found, negation


def _read_word(address: int) -> int | None:
    """Read the pointer at an address; None for a null pointer."""
    return ctypes.c_void_p.from_address(address).value


def _sample_tensors() -> list[torch.Tensor]:
    """Tensors to try the functions on: an offset view of each element type, a 0-dim tensor, an empty parameter."""
    types = [dtype for dtype in _TYPES if dtype is not None]
    inside = [torch.zeros(5, 4, 3, dtype=dtype, device="cpu")[1:, ::2, 1:] for dtype in types]
    return [*inside, torch.zeros((), device="cpu"), torch.nn.Parameter(torch.zeros(0, 7, device="cpu"))]


def _has_same_answers(asked: list[_Function], place: int, tensor: torch.Tensor) -> bool:
    """Whether all C functions answer for a tensor as its methods do; False if any reports an error.

    Args:
        asked: the functions of `_QUESTIONS`, in their order.
        place: what `_tensor_offset` returned.
        tensor: a strided tensor in CPU memory.
    """
    answers: list[Any] = []
    for function, (_, kind) in zip(asked, _QUESTIONS, strict=True):
        answer: Any = kind()
        if function(ctypes.c_void_p(id(tensor) + place), ctypes.byref(answer)) != 0:
            return False
        answers.append(answer.value)
    layout, device, number, dims, sizes, strides, size, offset, address = answers
    shape, steps = (list((ctypes.c_int64 * dims).from_address(own)) if dims else [] for own in (sizes, strides))
    return (layout, device, _TYPES[number]) == (0, 0, tensor.dtype) and (
        (shape, steps, size, offset, address or 0)
        == (
            list(tensor.shape),
            list(tensor.stride()),
            tensor.untyped_storage().nbytes(),
            tensor.storage_offset(),
            tensor.data_ptr(),
        )
    )

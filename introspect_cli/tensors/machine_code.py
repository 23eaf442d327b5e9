"""Compiled kernels in this process: linked, mapped, and called as a function written in C would be.

The problem: an object file is not loadable, LLVM, which could load it, takes 46 MB, and `ctypes` takes microseconds
for nine arguments. The way: the system's linker, where there is one, makes a shared library of it, of which only
what is used is mapped; elsewhere LLVM does. Either way Python calls the address directly, as a built-in function.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

CALL: Final = "introspect_call"
"""Symbol of what Python calls."""
PART: Final = "introspect_part"
"""Symbol of what a team's threads call."""
ARGUMENTS: Final = 9
"""Integers that `kernels.enter` takes."""

BEGINNING: Final = b"\0the kernels\0"
"""What comes before an object file in what the compiling process writes, since a `sitecustomize` may print as well."""

_FASTCALL: Final = 0x0080
"""METH_FASTCALL."""


class Code(NamedTuple):
    """Addresses of kernels that are in memory.

    Attributes:
        call: of CALL.
        part: of PART.
        owner: what keeps them there.
    """

    call: int
    part: int
    owner: object


class _Definition(ctypes.Structure):
    """PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("text", ctypes.c_char_p),
    )


_DEFINITIONS: Final[list[_Definition]] = []
"""What built-in functions refer to and do not own."""


def function(address: int) -> Callable[..., int]:
    """The function at an address that is written for METH_FASTCALL."""
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype = ctypes.py_object
    make.argtypes = (ctypes.POINTER(_Definition), ctypes.c_void_p, ctypes.c_void_p)
    definition = _Definition(CALL.encode(), address, _FASTCALL, None)
    _DEFINITIONS.append(definition)
    made: Callable[..., int] = make(ctypes.byref(definition), None, None)
    return made


def linked(binary: bytes) -> bytes | None:
    """A shared library made of an object file; None where there is no linker, or it will not."""
    linker = shutil.which("ld")
    if linker is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
        source.write_bytes(binary)
        command = [linker, "-shared", "-z", "noexecstack", "-o", str(target), str(source)]
        done = subprocess.run(command, check=False, capture_output=True, stdin=subprocess.DEVNULL)  # noqa: S603  # the linker on the path, with paths of ours
        return target.read_bytes() if done.returncode == 0 else None


def mapped(path: Path) -> Code:
    """The kernels in a shared library.

    Raises:
        OSError: it cannot be loaded, for instance from where nothing may be executed.
    """
    library = ctypes.CDLL(str(path))
    call, part = (_address(getattr(library, name)) for name in (CALL, PART))
    return Code(call, part, library)


def _address(symbol: Any) -> int:
    address = ctypes.cast(symbol, ctypes.c_void_p).value
    assert address is not None
    return address


def in_memory(binary: bytes) -> Code:
    """The kernels in an object file, loaded by LLVM.

    Raises:
        ImportError: there is no llvmlite.
        RuntimeError: LLVM will not load it.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(binary))
    engine.finalize_object()
    return Code(engine.get_function_address(CALL), engine.get_function_address(PART), engine)

"""Compiling the jitted kernels to an object file, in a process of its own.

The problem: numba and LLVM take 120 MB and half a second in every process that imports them, and only to compile.
The way: a child process compiles, tries the result against the reference, and writes an object file to its standard
output; `jit` keeps that, and loads it without either. The object exports two functions: `introspect_call`, which
Python calls as it calls any function written in C (`METH_FASTCALL`), and `introspect_part`, which the threads of a
team call.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import llvmlite.binding as llvm
import numpy as np
import torch
from llvmlite import ir

from introspect_cli.tensors import codes, reference
from introspect_cli.tensors import rows as r
from introspect_cli.tensors.kernels import enter
from introspect_cli.tensors.machine_code import ARGUMENTS, BEGINNING, CALL, PART, function, in_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_DOUBLE: Final = ir.DoubleType()
_POINTER: Final = ir.PointerType(ir.IntType(8))

_HELPERS: Final = (("frexp", _DOUBLE, _POINTER), ("ldexp", _DOUBLE, _I32))
"""Functions of the C library that numba calls through helpers of its own, and their arguments."""


def compiled() -> bytes:
    """The kernels as an object file for this machine, in position-independent code."""
    (signature,) = enter.signatures
    result = enter.overloads[signature]
    module = llvm.parse_assembly(result.library.get_llvm_str())
    module.link_in(llvm.parse_assembly(str(_exports(module, result.fndesc.llvm_func_name))))
    for part in (*module.functions, *module.global_variables):
        if not part.is_declaration and part.name not in {CALL, PART}:
            part.linkage = "internal"
    module.verify()
    target = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="pic",
        codemodel="default",
    )
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options()))
    return bytes(target.emit_object(module))


def _exports(kernels: Any, name: str) -> Any:
    """A module with the exported functions.

    Args:
        kernels: the module to link with.
        name: of `enter` as numba compiled it: `int32 name(int64 *result, void **error, int64 ... x 9)`, not 0 on
            failure.
    """
    module = ir.Module("exports")
    module.triple, module.data_layout = kernels.triple, kernels.data_layout
    inner = ir.Function(module, ir.FunctionType(_I32, [_POINTER, _POINTER, *[_I64] * ARGUMENTS]), name)
    for helper, *arguments in _HELPERS:
        kind = ir.FunctionType(_DOUBLE, arguments)
        own = ir.Function(module, kind, f"numba_{helper}")
        builder = ir.IRBuilder(own.append_basic_block())
        builder.ret(builder.call(ir.Function(module, kind, helper), own.args))
    _define_part(module, inner)
    _define_call(module, inner)
    return module


def _run(builder: Any, inner: Any, arguments: Sequence[Any]) -> tuple[Any, Any]:
    """Call the kernels; whether they failed, and the result."""
    result, error = builder.alloca(_I64), builder.alloca(_POINTER)
    places = [builder.bitcast(place, _POINTER) for place in (result, error)]
    status = builder.call(inner, [*places, *arguments])
    return builder.icmp_unsigned("!=", status, _I32(0)), builder.load(result)


def _define_part(module: Any, inner: Any) -> None:
    """`int64 introspect_part(int64 team)`: take chunks of a team's work."""
    part = ir.Function(module, ir.FunctionType(_I64, [_I64]), PART)
    builder = ir.IRBuilder(part.append_basic_block())
    _, result = _run(builder, inner, [_I64(codes.TAKE), *[_I64(0)] * (ARGUMENTS - 2), part.args[0]])
    builder.ret(result)


def _define_call(module: Any, inner: Any) -> None:
    """`PyObject *introspect_call(self, arguments, count)`: without the interpreter lock, all arguments integers."""

    def python(name: str, result: Any, *arguments: Any) -> Any:
        return ir.Function(module, ir.FunctionType(result, arguments), name)

    nothing = ir.VoidType()
    to_int, error = python("PyLong_AsUnsignedLongLongMask", _I64, _POINTER), python("PyErr_Occurred", _POINTER)
    bad_argument, failed = python("PyErr_BadArgument", _I32), python("PyErr_BadInternalCall", nothing)
    release, acquire = python("PyEval_SaveThread", _POINTER), python("PyEval_RestoreThread", nothing, _POINTER)
    from_int = python("PyLong_FromLongLong", _POINTER, _I64)

    call = python(CALL, _POINTER, _POINTER, _POINTER, _I64)
    builder = ir.IRBuilder(call.append_basic_block())
    with builder.if_then(builder.icmp_signed("!=", call.args[2], _I64(ARGUMENTS)), likely=False):
        builder.call(bad_argument, [])
        builder.ret(_POINTER(None))
    objects = builder.bitcast(call.args[1], ir.PointerType(_POINTER))
    words = [builder.call(to_int, [builder.load(builder.gep(objects, [_I64(at)]))]) for at in range(ARGUMENTS)]
    raised = builder.icmp_unsigned("!=", builder.ptrtoint(builder.call(error, []), _I64), _I64(0))
    with builder.if_then(raised, likely=False):
        builder.ret(_POINTER(None))
    state = builder.call(release, [])
    broken, result = _run(builder, inner, words)
    builder.call(acquire, [state])
    with builder.if_then(broken, likely=False):
        builder.call(failed, [])
        builder.ret(_POINTER(None))
    builder.ret(builder.call(from_int, [result]))


def _try(binary: bytes) -> None:
    """Compare what was compiled with the reference.

    Raises:
        RuntimeError: they differ.
    """
    code = in_memory(binary)
    call = function(code.call)
    team = np.zeros(codes.TEAM_WORDS, dtype=np.int64)
    for count in (0, 7, 1000, 5000):
        values = (torch.arange(count, dtype=torch.float32) / 100).square() - 1
        row = r.empty(1)
        arguments = (values.data_ptr(), count, 0, codes.F32, codes.STATS | codes.SKETCH, 0)
        call(codes.ONE, *arguments, row.ctypes.data, team.ctypes.data)
        wanted = reference.row(values, with_stats=True, with_sketch=True).numpy()
        floats = slice(r.MIN, r.MEDIAN)
        same = np.array_equal(row[0, : r.MIN], wanted.view(np.uint64)[: r.MIN]) and np.allclose(
            row[0].view(np.float64)[floats], wanted.view(np.float64)[floats], rtol=1e-5
        )
        if not same:
            raise RuntimeError(f"compiled for this processor, the kernels compute wrong results ({count} elements)")


def main() -> None:
    """Write the object file to standard output."""
    binary = compiled()
    _try(binary)
    sys.stdout.buffer.write(BEGINNING + binary)


if __name__ == "__main__":
    main()

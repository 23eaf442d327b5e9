// Functions for Python, in the limited API, that take integers only, addresses among them.
#pragma once
#include "kernels.h"
#include "limited.h"

namespace {

constexpr i64 BRIEF = 1 << 13;  // elements up to which a call is over sooner than the interpreter's lock changes hands

// The arguments as integers; false, and an exception set, if they are not as many integers.
bool integers(PyObject *const *arguments, Py_ssize_t given, int wanted, u64 *out) {
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "%d integers wanted, %zd arguments given", wanted, given);
        return false;
    }
    for (int i = 0; i < wanted; i++) {
        out[i] = PyLong_AsUnsignedLongLongMask(arguments[i]);
        if (out[i] == u64(-1) && PyErr_Occurred()) return false;
    }
    return true;
}

// A Python function of WANTED integers; `call` returns an integer. `counted` is the argument that says how many elements
// there are: for few of them the lock is kept. RELEASED: never; KEPT: always.
constexpr int RELEASED = -1, KEPT = -2;
template <int WANTED, class Call>
PyObject *function(PyObject *const *arguments, Py_ssize_t given, int counted, Call call) {
    u64 w[WANTED];
    if (!integers(arguments, given, WANTED, w)) return nullptr;
    i64 result;
    if (counted == KEPT || (counted >= 0 && i64(w[counted]) <= BRIEF)) {
        result = call(w);
    } else {
        Py_BEGIN_ALLOW_THREADS
        result = call(w);
        Py_END_ALLOW_THREADS
    }
    return PyLong_FromLongLong(result);
}

using Arguments = PyObject *const *;

}  // namespace

#define FAST(name) {#name, (PyCFunction)(void (*)())py_##name, METH_FASTCALL, nullptr}

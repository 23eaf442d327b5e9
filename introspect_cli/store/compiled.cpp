// What the store has compiled, as a Python module. See compiled.py for what calls mean.
#include "adding.h"
#include "calls.h"
#include "room.h"

namespace {

PyObject *py_read_again(PyObject *, Arguments a, Py_ssize_t n) {
    return function<7>(a, n, RELEASED, [](const u64 *w) {
        return i64(read_again(int(w[0]), i64(w[1]), i64(w[2]), u32(w[3]), (u8 *)w[4], (const Piece *)w[5], i64(w[6])));
    });
}
PyObject *py_add(PyObject *, Arguments a, Py_ssize_t n) {
    return function<4>(a, n, RELEASED, [](const u64 *w) {
        return add((const Alike *)w[0], (const Sums *)w[1], i64(w[2]), i64(w[3])), i64(0);
    });
}
PyObject *py_spread(PyObject *, Arguments a, Py_ssize_t n) {
    return function<4>(a, n, RELEASED, [](const u64 *w) {
        return spread((const Alike *)w[0], (const Sums *)w[1], i64(w[2]), i64(w[3])), i64(0);
    });
}

PyMethodDef METHODS[] = {FAST(read_again), FAST(add), FAST(spread), {nullptr, nullptr, 0, nullptr}};
PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_compiled", nullptr, -1, METHODS, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__compiled() {
    PyObject *module = PyModule_Create(&MODULE);
    if (module && PyModule_AddStringConstant(module, "SOURCES", SOURCES)) return Py_DecRef(module), nullptr;
    return module;
}

// Python, by its limited API, and classes whose objects are made here alone.
#pragma once
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include "kernels.h"

// A class, which is made when its first object is.
struct Class {
    PyType_Spec spec;
    PyObject *made = nullptr;

    constexpr Class(const char *name, size_t size, PyType_Slot *slots, unsigned long flags = 0)
        : spec{name, int(size), 0, unsigned(Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | flags), slots} {}
    PyObject *get() { return made ? made : made = PyType_FromSpec(&spec); }  // null with an exception
    bool has(PyObject *object) const { return made && (PyObject *)Py_TYPE(object) == made; }
    template <class Own> Own *make() {  // all of it 0; null with an exception
        return get() ? (Own *)PyType_GenericAlloc((PyTypeObject *)made, 0) : nullptr;
    }
};

// Frees an object, for its class: `free` of the object gives away what it has.
template <class Own> void forget(PyObject *object) {
    PyObject *type = (PyObject *)Py_TYPE(object);
    ((Own *)object)->free();
    PyObject_Free(object);
    Py_DecRef(type);
}

// An integer, a new reference; -1 without an exception where there is none.
INLINE i64 integer(PyObject *number) {
    const i64 value = number ? PyLong_AsLongLong(number) : -1;
    Py_DecRef(number);
    return PyErr_Occurred() ? (PyErr_Clear(), -1) : value;
}

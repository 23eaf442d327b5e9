// What the compiled parts of probes share. They do what is done for each tensor of a step, without a frame of Python; whatever is
// not plain they leave to their probe.
#pragma once
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include "intake.h"

#include <initializer_list>

HIDDEN PyObject *new_gradients(PyObject *, PyObject *const *arguments, Py_ssize_t given);
HIDDEN PyObject *new_section_type();
HIDDEN PyObject *share_sections(PyObject *, PyObject *const *arguments, Py_ssize_t given);
HIDDEN PyObject *section_depth(PyObject *, PyObject *);
HIDDEN PyObject *record_gradients(PyObject *, PyObject *const *arguments, Py_ssize_t given);
HIDDEN PyObject *record_state(PyObject *, PyObject *const *arguments, Py_ssize_t given);

inline u64 HOLDERS = 0;  // made so far

// An object of introspect's that holds N others and is known to the garbage collector.
template <int N> struct Holder {
    PyObject_HEAD
    u64 number;  // which no other has had
    PyObject *held[N];

    static int visit_all(PyObject *object, visitproc visit, void *arg) {
        Py_VISIT(Py_TYPE(object));
        for (PyObject *one : ((Holder *)object)->held) Py_VISIT(one);
        return 0;
    }
    static int clear_all(PyObject *object) {
        for (PyObject *&one : ((Holder *)object)->held) {
            PyObject *before = one;
            one = nullptr;
            if (before) Py_DecRef(before);
        }
        return 0;
    }
    static void free_all(PyObject *object) {
        PyObject *type = (PyObject *)Py_TYPE(object);
        PyObject_GC_UnTrack(object);
        clear_all(object);
        PyObject_GC_Del(object);
        Py_DecRef(type);
    }
    // The type of these objects, made when it is first asked for; the name and the methods stay where they are.
    static PyObject *define(PyObject *&type, const char *name, PyMethodDef *methods) {
        PyType_Slot slots[] = {{Py_tp_dealloc, (void *)free_all}, {Py_tp_traverse, (void *)visit_all},
                               {Py_tp_clear, (void *)clear_all}, {Py_tp_methods, (void *)methods}, {0, nullptr}};
        PyType_Spec spec = {name, sizeof(Holder), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
        return type ? type : type = PyType_FromSpec(&spec);
    }
    static PyObject *make(PyObject *type, PyObject *const *arguments, Py_ssize_t given) {
        if (given != N) return PyErr_Format(PyExc_TypeError, "%d arguments wanted, %zd given", N, given);
        Holder *self = PyObject_GC_New(Holder, (PyTypeObject *)type);
        if (!self) return nullptr;
        self->number = ++HOLDERS;
        for (int i = 0; i < N; i++) self->held[i] = Py_NewRef(arguments[i]);
        PyObject_GC_Track((PyObject *)self);
        return (PyObject *)self;
    }
};

// A name that attributes are asked for by, made once.
struct Name {
    const char *text;
    PyObject *made = nullptr;
    PyObject *get() { return made ? made : made = PyUnicode_InternFromString(text); }
};

// An attribute, or null without an exception.
INLINE PyObject *attribute(PyObject *of, Name &name) {
    PyObject *found = PyObject_GetAttr(of, name.get());
    if (!found) PyErr_Clear();
    return found;
}
INLINE bool attribute_is(PyObject *of, Name &name, PyObject *wanted) {
    PyObject *found = attribute(of, name);
    if (found) Py_DecRef(found);
    return found == wanted;
}

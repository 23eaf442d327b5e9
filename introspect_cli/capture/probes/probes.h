// What the compiled parts of probes share. They do what is done for each tensor of a step, without a frame of Python; whatever is
// not plain they leave to their probe.
#pragma once
#include "limited.h"

#include "intake.h"

#include <initializer_list>

HIDDEN PyObject *new_gradients(PyObject *, PyObject *const *arguments, Py_ssize_t given);
HIDDEN PyObject *new_section_type();
HIDDEN PyObject *share_sections(PyObject *, PyObject *const *arguments, Py_ssize_t given);
HIDDEN PyObject *section_depth(PyObject *, PyObject *);
HIDDEN PyObject *record_gradients(PyObject *, PyObject *const *arguments, Py_ssize_t given);
HIDDEN PyObject *record_state(PyObject *, PyObject *const *arguments, Py_ssize_t given);

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
    Py_DecRef(found);
    return found == wanted;
}

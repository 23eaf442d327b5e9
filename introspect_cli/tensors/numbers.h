// Lists of numbers that are filled anew in each step, and keep their room.
#pragma once
#include "kernels.h"
#include "limited.h"

#include <cstdlib>

struct Numbers {
    PyObject_HEAD
    i64 *items;
    Py_ssize_t count, room;

    void free() { std::free(items); }
};

HIDDEN PyObject *new_numbers(PyObject *, PyObject *);
HIDDEN bool is_numbers(PyObject *object);

INLINE Py_ssize_t size_of_numbers(PyObject *numbers) { return ((Numbers *)numbers)->count; }
INLINE const i64 *first_of_numbers(PyObject *numbers) { return ((Numbers *)numbers)->items; }  // where they lie, until more are added
INLINE void clear_numbers(PyObject *numbers) { ((Numbers *)numbers)->count = 0; }
HIDDEN bool add_number(PyObject *numbers, i64 number);  // false with an exception
HIDDEN bool add_numbers(PyObject *numbers, const i64 *first, Py_ssize_t count);
HIDDEN bool add_list(PyObject *numbers, PyObject *list);  // all of a list of Python's

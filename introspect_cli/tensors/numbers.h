// Lists of numbers that are filled anew in each step, and keep their room.
#pragma once
#include "kernels.h"
#include "limited.h"

HIDDEN PyObject *new_numbers(PyObject *, PyObject *);
HIDDEN bool is_numbers(PyObject *object);

HIDDEN Py_ssize_t size_of_numbers(PyObject *numbers);
HIDDEN const i64 *first_of_numbers(PyObject *numbers);  // where they lie, until more are added
HIDDEN void clear_numbers(PyObject *numbers);
HIDDEN bool add_number(PyObject *numbers, i64 number);  // false with an exception
HIDDEN bool add_numbers(PyObject *numbers, const i64 *first, Py_ssize_t count);
HIDDEN bool add_list(PyObject *numbers, PyObject *list);  // all of a list of Python's

// Lists of numbers that are filled anew in each step, and keep their room.
#pragma once
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include "kernels.h"

HIDDEN PyObject *new_numbers(PyObject *, PyObject *);
HIDDEN bool is_numbers(PyObject *object);

HIDDEN Py_ssize_t size_of_numbers(PyObject *numbers);
HIDDEN bool add_number(PyObject *numbers, PyObject *number);   // false with an exception
HIDDEN bool add_numbers(PyObject *numbers, PyObject *list);    // all of a list

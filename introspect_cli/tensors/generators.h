// Whether the default random generators have moved; see generators.py.
#pragma once
#include "intake.h"

HIDDEN PyObject *watch_generator(PyObject *, PyObject *const *arguments, Py_ssize_t count);
HIDDEN PyObject *generators_moved(PyObject *, PyObject *);
HIDDEN PyObject *generator_state(PyObject *, PyObject *number);

// How often each site has been recorded in the current step.
#pragma once
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include "kernels.h"

HIDDEN PyObject *new_times(PyObject *, PyObject *);
HIDDEN bool is_times(PyObject *object);

HIDDEN i64 times_of(PyObject *times, i64 site);            // 0 for what is no site
HIDDEN bool add_times(PyObject *times, i64 site, i64 by);  // false with an exception
// Notes that each of some sites is recorded once: 1; 0, and nothing is noted, where one was recorded before or comes twice; -1 with
// an exception.
HIDDEN int note_once(PyObject *times, const i64 *sites, Py_ssize_t count);

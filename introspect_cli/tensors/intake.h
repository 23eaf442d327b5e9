// What module.cpp and intake.cpp share.
#pragma once
#include <Python.h>

#include "kernels.h"

extern HIDDEN Run *RUN;  // for the best level of this processor, or the one that was chosen
HIDDEN PyObject *new_intake(PyObject *, PyObject *const *arguments, Py_ssize_t given);
HIDDEN u64 glance(const char *bytes, i64 size);  // 64 bits of what lies at places spread over some bytes

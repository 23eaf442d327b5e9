// A lock that its thread may take again, and that is taken and given back from here without a call of Python.
#pragma once
#include "kernels.h"
#include "limited.h"

HIDDEN PyObject *new_lock(PyObject *, PyObject *);
HIDDEN bool is_lock(PyObject *object);

// False, at once, where another thread has it. Never an exception.
HIDDEN bool try_take(PyObject *lock);
HIDDEN void give_back(PyObject *lock);  // for who has it; an exception that is set stays

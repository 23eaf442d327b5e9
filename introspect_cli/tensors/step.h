// What has been recorded in the current step: at which sites, which slots have the values, how often each site came.
#pragma once
#include "kernels.h"
#include "limited.h"

HIDDEN PyObject *new_step(PyObject *, PyObject *);
HIDDEN bool is_step(PyObject *object);

HIDDEN i64 times_of(PyObject *step, i64 site);           // 0 for what is no site
HIDDEN bool note(PyObject *step, i64 site, i64 slot);    // counts the site; a row where it comes for the first time. False with an exception
// Notes sites that all come for the first time: 1; 0, and nothing is noted, where one was recorded before or comes twice; -1 with an
// exception.
HIDDEN int note_once(PyObject *step, const i64 *sites, const i64 *slots, Py_ssize_t count);

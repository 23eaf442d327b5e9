// What the sources that talk to Python share.
#pragma once
#include "kernels.h"
#include "limited.h"

extern HIDDEN Run *RUN;  // for the best level of this processor, or the one that was chosen
HIDDEN PyObject *new_intake(PyObject *, PyObject *const *arguments, Py_ssize_t given);
HIDDEN u64 glance(const char *bytes, i64 size);  // 64 bits of what lies at places spread over some bytes

// Summarises a small plain tensor and notes it at sites, as the recorder does: its slot; -1, and nothing is done, where it
// goes the long way; -2 with an exception.
HIDDEN i64 record_at(PyObject *intake, PyObject *const *sites, Py_ssize_t count, PyObject *tensor);
// Summarises tensors and notes them at their sites, a list of numbers or Numbers. True: done. False: nothing is. A list of slots, -1
// for those that go the long way: the rest, and the noting, are not. It needs the recorder's lock.
struct Objects;
HIDDEN PyObject *record_many(PyObject *intake, PyObject *sites, const Objects &tensors);
HIDDEN Objects &objects_of(PyObject *intake);  // room for such
HIDDEN bool is_intake(PyObject *object);
HIDDEN bool is_seen_by_nobody(PyObject *intake, PyObject *tensor);  // plain, so that no class or mode of the script's sees what it is asked

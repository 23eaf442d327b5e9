// Rows of this step and the last, by the address of the elements they are of; reuse.py says what for.
#pragma once
#include "kernels.h"
#include "limited.h"

struct Known {  // what was at an address
    u64 address;
    i64 kind, count;  // a number for the element type, elements
    const Row *row;   // good until the next turn
};

HIDDEN PyObject *new_memory(PyObject *, PyObject *limit);
HIDDEN bool is_memory(PyObject *object);
// The row of what may still be at an address, which is kept for the next step then; null if there is none.
HIDDEN const Row *find_known(PyObject *memory, u64 address, i64 kind, i64 count);
HIDDEN void note_known(PyObject *memory, const Known &known);  // without room for it, it is forgotten

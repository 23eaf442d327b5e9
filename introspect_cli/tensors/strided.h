// Strided tensors: copied in pieces that fit into the processor's cache, and summarised there.
#pragma once
#include "team.h"

struct Piece {  // elements that follow one another in logical order, as cpu.py has it
    i64 place;  // of the first in memory, in elements from the tensor's first
    i64 count, first;
    i64 dims, plan;  // number of dimensions, and which of the tensor's plans says how to copy it
};
static_assert(sizeof(Piece) == 5 * 8);
struct Strided {
    u64 address;
    i64 code, flags;
    const float *table;
    const Piece *pieces;
    i64 number;
    const i64 *plans;  // of `copy`, one after the other
};

// Copies a strided box of elements of `size` bytes to contiguous memory; see kernels.py for the plan.
HIDDEN void copy(const char *source, i64 dims, i64 size, const i64 *plan, char *target);
// Into a row, with one for each piece in `parts`, and memory for a piece for each of the team's threads in `blocks`.
HIDDEN void summarise_strided(const Strided &tensor, Row *parts, char *blocks, Row *row, Team *team);

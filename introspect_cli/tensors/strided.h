// Strided tensors: copied in pieces that fit into the processor's cache, and summarised there.
#pragma once
#include "team.h"

struct Strided {
    u64 address;
    i64 code, flags;
    const float *table;
    i64 dims;  // from 1 to MAX_DIMS - 2, with a last one that fits into a chunk
    const i64 *sizes, *strides;
};

// Into a row, with memory for a chunk for each of the team's threads in `blocks`; false, and nothing is done, without memory for the
// rows of its pieces.
HIDDEN bool summarise_strided(const Strided &tensor, char *blocks, Row *row, Team *team);

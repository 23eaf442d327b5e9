// A step's rows as the columns that the store keeps.
#pragma once
#include "kernels.h"

// What a column holds: the statistics in the order of `STATISTICS`.
enum Column {
    SUM, NANS, POSINFS, NEGINFS, ZEROS, MIN, MAX, ABSMIN, MEAN, AMEAN, VAR, SKEW, KURT, MED, MODE, SKETCHES, COLUMNS
};

// How much of a row counts.
enum Seen { ALL_OF_IT, BITS_ALONE, NOTHING_OF_IT };

// Fills the columns that have an address with what follows from `count` rows: those of `slots`, or the first ones where that
// is null. A block has `each` rows. `headers` and `seen` are of the rows that are taken, in their order.
HIDDEN void columns_of(const Row *const *blocks, i64 each, const u32 *slots, const u64 *headers, const u8 *seen, i64 count,
                       void *const *columns);

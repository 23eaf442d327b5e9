// A step's rows as the columns that the store keeps.
#pragma once
#include "kernels.h"

// What a column holds, as columns.py has it.
enum Column {
    SUM, NANS, POSINFS, NEGINFS, ZEROS, MIN, MAX, ABSMIN, MEAN, AMEAN, VAR, SKEW, KURT, SKETCHES, COLUMNS
};

// How much of a row counts.
enum Seen { ALL_OF_IT, BITS_ALONE, NOTHING_OF_IT };

// Fills the columns that have an address, from place `first` on, with what follows from `count` rows. `headers` and `seen` are
// of all rows.
HIDDEN void columns_of(const Row *rows, const u64 *headers, const u8 *seen, i64 count, i64 first, void *const *columns);

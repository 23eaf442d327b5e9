// A step's rows as the columns that the store keeps, equal ones once.
#pragma once
#include "kernels.h"

// What a column holds: the statistics in the order of `STATISTICS`.
enum Column {
    LAYOUT, STATUS, SUM, NANS, POSINFS, NEGINFS, ZEROS, MIN, MAX, ABSMIN, MEAN, AMEAN, VAR, SKEW, KURT, MED, MODE, SKETCHES, COLUMNS
};

// How much of a row counts.
enum Seen { ALL_OF_IT, BITS_ALONE, NOTHING_OF_IT };

// Records of a step, in order: the slot of each, and what is known of it beside its row. A block has `each` rows.
struct Records {
    const Row *const *blocks;
    i64 each;
    const u32 *slots;
    const u64 *headers;
    const u8 *seen, *status;
    const u32 *layouts;
    i64 count;
};

// Fills the columns that have an address with what follows from the records, one after the other; returns how many there are then.
// With `places`, records that are equal in all of it are there once: `places` gets where that is, of each record.
HIDDEN i64 columns_of(const Records &records, u32 *places, void *const *columns);

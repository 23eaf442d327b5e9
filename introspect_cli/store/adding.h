// Sums over the records of several ranks.
#pragma once
#include "kernels.h"

// Columns that add up, in the order of adding.py. From NANS to ZEROS they are 64-bit integers, from MIN on float64.
enum Summed { RAW, SKETCHES, NANS, POSINFS, NEGINFS, ZEROS, MIN, MAX, ABSMIN, MEAN, AMEAN, VAR, SUMMED };

// Ranks of which the same rows are added to the same sums, as adding.py fills it in.
struct Alike {
    i64 ranks, count;
    const i64 *rows;  // those of each rank; null where they follow one another from `first` on
    i64 first;
    const i64 *to;                 // the sum of each row
    const double *held;            // [ranks][count] elements
    const void *const *columns;    // [ranks][SUMMED], null where a rank has no such column
};

struct Sums {
    void *columns[SUMMED];  // of all sums; null where it is not wanted. Those of means are still to be divided by `total`
    u8 *known;              // [ZEROS - NANS + 1][sums] whether all that is added was counted
    i64 sums;
    double *total;          // finite elements
    const double *middle;   // means, for `spread`
};

// Adds up the rows from `first` to `last`, all columns but VAR; and VAR, which needs the means.
HIDDEN void add(const Alike *alike, const Sums *sums, i64 first, i64 last);
HIDDEN void spread(const Alike *alike, const Sums *sums, i64 first, i64 last);

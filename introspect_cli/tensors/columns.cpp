// The statistics, all over finite elements (complex numbers: over the absolute values); absent is NaN, for counts -1. Where the
// variance is 0 there is no skewness and no kurtosis; where there is no finite element there is nothing.
#include "columns.h"

namespace {

template <class T> INLINE void put(void *const *columns, Column column, i64 at, T value) {
    if (columns[column]) ((T *)columns[column])[at] = value;
}

}  // namespace

void columns_of(const Row *const *blocks, i64 each, const u32 *slots, const u64 *headers, const u8 *seen, i64 count,
                void *const *columns) {
    constexpr Row NONE = {0, -1, -1, -1, -1, -1, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING,
                          {NOTHING}, NOTHING,
                          {NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING,
                           NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING}};
    for (i64 at = 0; at < count; at++) {
        const i64 slot = slots ? i64(slots[at]) : at;
        const Row *rows = blocks[slot / each] + slot % each;
        const Row &r = seen[at] == ALL_OF_IT ? *rows : NONE;
        const double n = double(r.finite), var = r.m2 / n;
        const bool some = n > 0;
        auto kept = [some](double value) { return some && -INF < value && value < INF ? value : NOTHING; };
        auto spread = [=](double value) { return var > 0 ? kept(value) : NOTHING; };
        put(columns, SUM, at, seen[at] == NOTHING_OF_IT ? u64(0) : mix(rows->raw + headers[at]));
        put(columns, NANS, at, r.nans), put(columns, POSINFS, at, r.posinfs), put(columns, NEGINFS, at, r.neginfs);
        put(columns, ZEROS, at, r.zeros);
        put(columns, MIN, at, kept(r.min)), put(columns, MAX, at, kept(r.max)), put(columns, ABSMIN, at, kept(r.absmin));
        put(columns, MEAN, at, kept(r.mean)), put(columns, AMEAN, at, kept(r.abssum / n)), put(columns, VAR, at, kept(var));
        put(columns, SKEW, at, float(spread(r.m3 / n / (var * __builtin_sqrt(var)))));
        put(columns, KURT, at, float(spread(r.m4 / n / (var * var))));
        put(columns, MED, at, kept(r.median)), put(columns, MODE, at, kept(r.mode));
        if (columns[SKETCHES])
            for (int k = 0; k < 16; k++) ((float *)columns[SKETCHES])[16 * at + k] = float(r.sketch[k]);
    }
}

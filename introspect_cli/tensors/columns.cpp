// The statistics, all over finite elements (complex numbers: over the absolute values); absent is NaN, for counts -1. Where the
// variance is 0 there is no skewness and no kurtosis; where there is no finite element there is nothing.
#include "columns.h"

#include <cstdlib>
#include <cstring>

namespace {

template <class T> INLINE void put(void *const *columns, Column column, i64 at, T value) {
    if (columns[column]) ((T *)columns[column])[at] = value;
}

const Row *row_of(const Records &all, i64 i) { return all.blocks[all.slots[i] / all.each] + all.slots[i] % all.each; }

bool are_equal(const Records &all, i64 i, i64 j) {
    return all.layouts[i] == all.layouts[j] && all.headers[i] == all.headers[j] && !std::memcmp(row_of(all, i), row_of(all, j), sizeof(Row));
}

// Finds the first record that an observed one is equal to.
struct Firsts {
    const Records &all;
    u64 room = 1;
    u32 *numbers;  // from 1 on; null without memory: then none is equal to another

    explicit Firsts(const Records &records) : all(records) {
        while (room < u64(2 * all.count)) room *= 2;
        numbers = (u32 *)std::calloc(room, sizeof(u32));
    }
    ~Firsts() { std::free(numbers); }
    i64 first(i64 i) {
        if (!numbers || all.seen[i] != ALL_OF_IT || all.status[i]) return i;
        u64 at = mix(row_of(all, i)->raw + all.headers[i]) & (room - 1);
        for (; numbers[at]; at = (at + 1) & (room - 1))
            if (are_equal(all, i, numbers[at] - 1)) return numbers[at] - 1;
        return (numbers[at] = u32(i + 1)) - 1;
    }
};

}  // namespace

i64 columns_of(const Records &all, u32 *places, void *const *columns) {
    constexpr Row NONE = {0, -1, -1, -1, -1, -1, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING,
                          {NOTHING}, NOTHING,
                          {NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING,
                           NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING}};
    Firsts firsts(all);
    i64 end = 0;
    for (i64 i = 0; i < all.count; i++) {
        const i64 first = places ? firsts.first(i) : i;
        if (places) places[i] = first < i ? places[first] : u32(end);
        if (first < i) continue;
        const i64 at = end++;
        const Row *row = row_of(all, i);
        const Row &r = all.seen[i] == ALL_OF_IT ? *row : NONE;
        const double n = double(r.finite), var = r.m2 / n;
        const bool some = n > 0;
        auto kept = [some](double value) { return some && -INF < value && value < INF ? value : NOTHING; };
        auto spread = [=](double value) { return var > 0 ? kept(value) : NOTHING; };
        put(columns, LAYOUT, at, all.layouts[i]), put(columns, STATUS, at, all.status[i]);
        put(columns, SUM, at, all.seen[i] == NOTHING_OF_IT ? u64(0) : mix(row->raw + all.headers[i]));
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
    return end;
}

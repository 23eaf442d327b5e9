// What adding.py adds up with numpy, a column after the other, in one pass over the rows of all ranks: bit by bit the
// same numbers, since every sum takes the ranks in their order.
#include "adding.h"

namespace {

constexpr i64 BLOCK = 128;  // sums that stay in the first-level cache while all ranks are added

INLINE u64 unmix(u64 v) {  // sums.unmix
    v ^= v >> 31 ^ v >> 62;
    v *= 0x319642B2D24D8EC3;
    v ^= v >> 27 ^ v >> 54;
    v *= 0x96DE1B173F119089;
    return v ^ v >> 30 ^ v >> 60;
}

// A column of a rank, of `count` rows from `first` on of those that are added.
template <class T, bool FOLLOW> struct Rows {
    const T *values;
    const i64 *rows;
    INLINE const T *operator()(i64 i) const { return values + (FOLLOW ? i : rows[i]); }
};
template <class T, bool FOLLOW> INLINE Rows<T, FOLLOW> rows_of(const Alike &a, i64 rank, int column, i64 first, i64 width = 1) {
    const T *values = (const T *)a.columns[rank * SUMMED + column];
    return {FOLLOW ? values + (a.first + first) * width : values, FOLLOW ? nullptr : a.rows + first};
}

// Numbers of finite elements of a rank's rows.
template <bool FOLLOW> INLINE void finite_of(const Alike &a, const Sums &s, i64 rank, i64 first, i64 n, double *finite) {
    i64 others[BLOCK] = {};
    for (int column = NANS; column <= NEGINFS; column++)
        if (s.columns[column]) {
            const auto own = rows_of<i64, FOLLOW>(a, rank, column, first);
            for (i64 i = 0; i < n; i++) others[i] += most(*own(i), i64(0));
        }
    const double *held = a.held + rank * a.count + first;
    for (i64 i = 0; i < n; i++) finite[i] = held[i] - double(others[i]);
}

INLINE double used(double finite, double value) { return finite > 0 ? value : 0.0; }

template <bool FOLLOW> void add_block(const Alike &a, const Sums &s, i64 first, i64 n) {
    const i64 *to = a.to + first;
    u64 raw[BLOCK] = {};
    for (i64 rank = 0; rank < a.ranks; rank++) {
        const auto own = rows_of<u64, FOLLOW>(a, rank, RAW, first);
        for (i64 i = 0; i < n; i++) raw[i] += unmix(*own(i));
    }
    for (i64 i = 0; i < n; i++) ((u64 *)s.columns[RAW])[to[i]] += raw[i];
    if (s.columns[SKETCHES]) {
        double sketch[BLOCK][16], *out = (double *)s.columns[SKETCHES];
        for (i64 i = 0; i < n; i++) __builtin_memcpy(sketch[i], out + 16 * to[i], sizeof sketch[i]);
        for (i64 rank = 0; rank < a.ranks; rank++) {
            const float *values = (const float *)a.columns[rank * SUMMED + SKETCHES];
            for (i64 i = 0; i < n; i++) {
                const float *own = values + 16 * (FOLLOW ? a.first + first + i : a.rows[first + i]);
                for (int k = 0; k < 16; k++) sketch[i][k] += double(own[k]);
            }
        }
        for (i64 i = 0; i < n; i++) __builtin_memcpy(out + 16 * to[i], sketch[i], sizeof sketch[i]);
    }
    for (int column = NANS; column <= ZEROS; column++)
        if (s.columns[column]) {
            i64 sum[BLOCK] = {}, fewest[BLOCK] = {};
            for (i64 rank = 0; rank < a.ranks; rank++) {
                const auto own = rows_of<i64, FOLLOW>(a, rank, column, first);
                for (i64 i = 0; i < n; i++) sum[i] = i64(u64(sum[i]) + u64(*own(i))), fewest[i] |= *own(i);  // the sign stays
            }
            for (i64 i = 0; i < n; i++) {
                ((i64 *)s.columns[column])[to[i]] += sum[i];
                s.known[(column - NANS) * s.sums + to[i]] &= fewest[i] >= 0;
            }
        }
    double finite[BLOCK], total[BLOCK] = {}, sums[2][BLOCK] = {}, ends[3][BLOCK];
    for (auto &end : ends)
        for (double &value : end) value = NOTHING;
    for (i64 rank = 0; rank < a.ranks; rank++) {
        finite_of<FOLLOW>(a, s, rank, first, n, finite);
        for (i64 i = 0; i < n; i++) total[i] += finite[i];
        for (int column = MIN; column <= ABSMIN; column++)
            if (s.columns[column]) {
                const auto own = rows_of<double, FOLLOW>(a, rank, column, first);
                double *end = ends[column - MIN];
                for (i64 i = 0; i < n; i++) {
                    const double value = finite[i] > 0 ? *own(i) : NOTHING;
                    const bool further = column == MAX ? value >= end[i] : value <= end[i];
                    end[i] = further || end[i] != end[i] ? value : end[i];
                }
            }
        for (int column = MEAN; column <= AMEAN; column++)
            if (s.columns[column]) {
                const auto own = rows_of<double, FOLLOW>(a, rank, column, first);
                for (i64 i = 0; i < n; i++) sums[column - MEAN][i] += finite[i] * used(finite[i], *own(i));
            }
    }
    for (i64 i = 0; i < n; i++) s.total[to[i]] += total[i];
    for (int column = MIN; column <= ABSMIN; column++)
        if (double *out = (double *)s.columns[column])
            for (i64 i = 0; i < n; i++) {
                const double value = ends[column - MIN][i], old = out[to[i]];
                const bool further = column == MAX ? value >= old : value <= old;
                out[to[i]] = further || old != old ? value : old;
            }
    for (int column = MEAN; column <= AMEAN; column++)
        if (double *out = (double *)s.columns[column])
            for (i64 i = 0; i < n; i++) out[to[i]] += sums[column - MEAN][i];
}

template <bool FOLLOW> void spread_block(const Alike &a, const Sums &s, i64 first, i64 n) {
    double finite[BLOCK], sum[BLOCK] = {};
    const i64 *to = a.to + first;
    for (i64 rank = 0; rank < a.ranks; rank++) {
        finite_of<FOLLOW>(a, s, rank, first, n, finite);
        const auto mean = rows_of<double, FOLLOW>(a, rank, MEAN, first), var = rows_of<double, FOLLOW>(a, rank, VAR, first);
        for (i64 i = 0; i < n; i++) {
            const double off = *mean(i) - s.middle[to[i]];
            sum[i] += finite[i] * used(finite[i], *var(i) + off * off);
        }
    }
    for (i64 i = 0; i < n; i++) ((double *)s.columns[VAR])[to[i]] += sum[i];
}

template <class Block> INLINE void in_blocks(i64 first, i64 last, Block block) {
    for (; first < last; first += BLOCK) block(first, least(BLOCK, last - first));
}

}  // namespace

void add(const Alike *alike, const Sums *sums, i64 first, i64 last) {
    const auto block = alike->rows ? add_block<false> : add_block<true>;
    in_blocks(first, last, [&](i64 at, i64 n) { block(*alike, *sums, at, n); });
}

void spread(const Alike *alike, const Sums *sums, i64 first, i64 last) {
    const auto block = alike->rows ? spread_block<false> : spread_block<true>;
    in_blocks(first, last, [&](i64 at, i64 n) { block(*alike, *sums, at, n); });
}

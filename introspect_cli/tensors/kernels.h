// What the sources of the compiled kernels share: the row, type codes, the checksum's tables, one level's entry point.
#pragma once
#include <cstdint>

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using i32 = int32_t;
using u64 = uint64_t;
using i64 = int64_t;

#define INLINE __attribute__((always_inline)) inline
#define NOINLINE __attribute__((noinline))
#define HIDDEN __attribute__((visibility("hidden")))

// Type codes, as kernels.py has them. Up to I16 a block is summarised as float32, up to I64 as float64.
enum Code { F32, F16, BF16, TABLE, U8, I8, U16, I16, F64, U32, I32, U64, I64, C32, C64, C128, OPAQUE8, OPAQUE16 };
constexpr int SIZES[] = {4, 2, 2, 1, 1, 1, 2, 2, 8, 4, 4, 8, 8, 4, 8, 16, 1, 2};

constexpr int STATS = 1, SKETCH = 2;
constexpr u64 G = 0x9E3779B97F4A7C15;
constexpr i64 SPAN = 512;  // words that share one block's key
constexpr double INF = __builtin_inf(), NOTHING = __builtin_nan("");

struct Row {  // as rows.py has it
    u64 raw;
    i64 finite, nans, posinfs, neginfs, zeros;
    double min, max, absmin, mean, m2, m3, m4, abssum;
    union {
        double median;
        u64 sample;
    };
    double mode, sketch[16];
};
static_assert(sizeof(Row) == 32 * 8);
constexpr Row EMPTY = {0, 0, 0, 0, 0, 0, INF, -INF, INF, 0, 0, 0, 0, 0, {NOTHING}, NOTHING, {}};

template <class T> INLINE constexpr T least(T a, T b) { return b < a ? b : a; }
template <class T> INLINE constexpr T most(T a, T b) { return a < b ? b : a; }

INLINE constexpr u64 mix(u64 z) {  // checksum.mix
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
}

// FACTORS and SHIFTS of checksum.py for words of 1, 2 and 4 bytes. A vector of eight lanes of 64 bits holds 8 words of
// each byte position in a lane, so the keys of words with the same position lie side by side.
struct alignas(64) Keys {  // a load that crosses cache lines takes twice as long
    u64 factor[SPAN], shift[SPAN];
};
extern HIDDEN const Keys KEYS[3];
template <int SIZE> constexpr const Keys &keys() { return KEYS[SIZE / 2]; }
template <int SIZE> INLINE constexpr i64 key_place(i64 word) {  // of a word in those tables
    constexpr i64 in_lane = 8 / SIZE, group = 8 * in_lane;
    return word / group * group + word % in_lane * 8 + word % group / in_lane;
}

// Merges moments of a disjoint part into a row, about the mean of both; `about_lower` of gpu/kernels.py is its like for Triton.
INLINE void merge_moments(Row &r, double n_b, double mean_b, double m2_b, double m3_b, double m4_b) {
    double n_a = double(r.finite);
    if (n_b == 0) return;
    r.finite += i64(n_b);
    if (n_a == 0) {
        r.mean = mean_b, r.m2 = m2_b, r.m3 = m3_b, r.m4 = m4_b;
        return;
    }
    double delta = mean_b - r.mean, step = delta / (n_a + n_b), cross = delta * step * n_a * n_b;
    r.m4 += m4_b + cross * step * step * (n_a * n_a - n_a * n_b + n_b * n_b) +
            6 * step * step * (n_a * n_a * m2_b + n_b * n_b * r.m2) + 4 * step * (n_a * m3_b - n_b * r.m3);
    r.m3 += m3_b + cross * step * (n_a - n_b) + 3 * step * (n_a * m2_b - n_b * r.m2);
    r.m2 += m2_b + cross;
    r.mean += step * n_b;
}

INLINE void extend(Row &r, double low, double high, double small, double sizes) {
    r.min = least(r.min, low), r.max = most(r.max, high);
    r.absmin = least(r.absmin, small), r.abssum += sizes;
}

// Summarises `count` contiguous elements, the first with index `first` in the whole tensor, into a row.
using Run = void(const void *address, i64 count, i64 first, int code, int flags, const float *table, Row *row);

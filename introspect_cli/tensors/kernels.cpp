// Checksum, statistics and sketch of contiguous elements in CPU memory, for one level of the processor.
//
// Memory must be read once, whatever is computed, and a thousand elements must cost little more than the call. So
// blocks of 16 kB stay in the first-level cache while each loop passes over them: checksum; extent and sums;
// central moments about the block's own mean; sketch. float32 is exact enough inside a block, since deviations are
// from the block's mean and scaled by a power of two to around one, so that no power of them over- or underflows;
// blocks are merged in float64. A block whose sum of absolute values is not finite takes a careful way in float64.
//
// This file is compiled once for each level, with LEVEL as the name of its entry point. Every level computes with the
// same lanes in the same order, and without fused multiply-add, so rows are the same bits on every processor. Nothing
// here assumes away NaN or infinity, or touches the floating-point environment.
#include "lanes.h"

namespace {

// ---- checksum: see checksum.py

template <class W> INLINE u64 term(u64 word, i64 lane, u64 key) {
    i64 place = key_place<sizeof(W)>(lane);
    u64 z = word * keys<sizeof(W)>().factor[place] + (keys<sizeof(W)>().shift[place] + key);
    return (z & 0xFFFFFFFF) * (z >> 32) + z;
}

// Word k, of SIZE bytes, of each lane; with anything in the upper half, which `times` does not look at.
template <int SIZE> INLINE V<u64> word_of(V<u64> lanes, int k) {
    constexpr int in_lane = 8 / SIZE, bits = 8 * SIZE;
#if defined(__AVX512F__)  // one shuffle is quicker than a shift and a mask
    if (SIZE < 4 && k < in_lane - 1) {
        u64 bytes = 0x8080808080808080;  // zeros
        for (int byte = 0; byte < SIZE; byte++) bytes ^= u64(0x80 ^ (k * SIZE + byte)) << (8 * byte);
        const u64 upper = bytes + (0x0808080808080808 >> (64 - bits));  // bytes are counted in pairs of lanes
        return (V<u64>)_mm512_shuffle_epi8((__m512i)lanes, (__m512i)V<u64>{bytes, upper, bytes, upper, bytes, upper, bytes, upper});
    }
#endif
    V<u64> word = lanes >> (k * bits);
    return SIZE < 4 && k < in_lane - 1 ? word & ((u64(1) << bits) - 1) : word;
}

// The words of one span from its word `lane` on, which is the first of a group of 64 bytes.
template <class W> INLINE u64 groups(const W *x, i64 words, i64 lane, u64 key, i64 ahead) {
    constexpr int in_lane = 8 / sizeof(W), group = 8 * in_lane, parts = 64 / WIDTH;
    V<u64> sum[2] = {};
    for (i64 i = 0; i < words; i += group) {
        const u64 *factor = keys<sizeof(W)>().factor + lane + i, *shift = keys<sizeof(W)>().shift + lane + i;
        __builtin_prefetch((const char *)(x + i) + ahead, 0, 2);
        for (int part = 0; part < parts; part++) {
            V<u64> v = load((const u64 *)(x + i) + part * LANES<u64>);
            for (int k = 0; k < in_lane; k++) {
                V<u64> word = word_of<sizeof(W)>(v, k);
                V<u64> z = times(word, load(factor + 8 * k + part * LANES<u64>));
                z += load(shift + 8 * k + part * LANES<u64>) + key;
                sum[0] += times(z, z >> 32);
                sum[1] += z;
            }
        }
    }
    sum[0] += sum[1];
    u64 total = 0;
    for (int lane_of_sum = 0; lane_of_sum < LANES<u64>; lane_of_sum++) total += sum[0][lane_of_sum];
    return total;
}

template <class W> u64 checksum(const W *x, i64 words, u64 first, i64 ahead) {
    constexpr i64 group = 64 / sizeof(W);
    u64 total = 0;
    while (words > 0) {
        i64 lane = first % SPAN, some = least(words, SPAN - lane), done = 0;
        u64 key = mix((first / SPAN + 1) * G);
        if (some == SPAN) {
            total += groups(x, SPAN, 0, key, ahead);
        } else {
            for (; done < some && (lane + done) % group; done++) total += term<W>(x[done], lane + done, key);
            i64 whole = (some - done) / group * group;
            if (whole) total += groups(x + done, whole, lane + done, key, ahead);
            for (done += whole; done < some; done++) total += term<W>(x[done], lane + done, key);
        }
        x += some, first += some, words -= some;
    }
    return total;
}

// ---- sketch: see sketch.py

// Elements 16 * group + LANES * part ... of a block, with those negated whose bit is set.
#if defined(__AVX512F__)
INLINE V<float> flipped(V<float> v, u64 signs, int group, int part) {
    const V<u32> bits = (V<u32>)v, sign = V<u32>{} + 0x80000000;
    return (V<float>)_mm512_mask_xor_epi32((__m512i)bits, u16(signs >> (16 * group + 16 * part)), (__m512i)bits, (__m512i)sign);
}
INLINE V<double> flipped(V<double> v, u64 signs, int group, int part) {
    const V<u64> bits = (V<u64>)v, sign = V<u64>{} + 0x8000000000000000;
    return (V<double>)_mm512_mask_xor_epi64((__m512i)bits, u8(signs >> (16 * group + 8 * part)), (__m512i)bits, (__m512i)sign);
}
#else
INLINE V<float> flipped(V<float> v, u64 signs, int group, int part) {
    V<u32> bits = V<u32>{} + u32(signs >> 32 * (group / 2));
#if defined(__AVX2__) || !defined(__x86_64__)
    V<u32> up;
    for (int lane = 0; lane < LANES<u32>; lane++) up[lane] = 31 - (group % 2 * 16 + part * LANES<u32> + lane);
    bits = bits << up;
#else
    V<u32> bit;
    for (int lane = 0; lane < LANES<u32>; lane++) bit[lane] = u32(1) << (group % 2 * 16 + part * LANES<u32> + lane);
    bits = (V<u32>)((bits & bit) == bit);
#endif
    return (V<float>)((V<u32>)v ^ (bits & 0x80000000));
}
INLINE V<double> flipped(V<double> v, u64 signs, int group, int part) {
    V<u64> up, bits = V<u64>{} + signs;
    for (int lane = 0; lane < LANES<u64>; lane++) up[lane] = 63 - (group * 16 + part * LANES<u64> + lane);
    return (V<double>)((V<u64>)v ^ (bits << up & 0x8000000000000000));
}
#endif

struct Hashes {
    u64 row, signs;
};
INLINE Hashes hashes(u64 number) {  // of a block of 64 elements
    u64 z = (number + 1) * 0x9FB21C651E98DF25;
    z = (z ^ z >> 32) * 0xC4CEB9FE1A85EC53;
    u64 signs = (z ^ z >> 32) * 0xD6E8FEB86659FD93;
    return {z >> 60, signs ^ signs >> 32};
}

// The rows of a table that some numbers are added to, a bit each: of a small tensor there are few, and the others are left alone.
INLINE u32 rows_of(u64 first, i64 count) {
    constexpr u64 FEW = 12;
    const u64 begin = first / 64, end = (first + u64(count) + 63) / 64;
    u32 rows = 0;
    for (u64 number = begin; number < end && end - begin <= FEW; number++) rows |= u32(1) << hashes(number).row;
    return end - begin <= FEW ? rows : 0xFFFF;
}

// Adds whole blocks of 64 finite numbers to a table of 16 rows, one for each rotation, by 16 lanes.
template <class T> NOINLINE void sketch_blocks(const T *x, i64 blocks, u64 number, double (*table)[16]) {
    for (; blocks--; number++, x += 64) {
        auto [row, signs] = hashes(number);
        for (int part = 0; part < 16 / LANES<T>; part++) {
            V<T> total = {};
            for (int group = 0; group < 4; group++) {
                V<T> v = flipped(load(x + 16 * group + part * LANES<T>), signs, group, part);
                total = group ? total + v : v;
            }
            carry(table[row] + part * LANES<T>, total);
        }
    }
}
template <class T> void sketch(const T *x, i64 count, u64 first, double (*table)[16]) {
    for (i64 i = 0; i < count;) {
        u64 place = first + i;
        i64 blocks = place % 64 ? 0 : (count - i) / 64, end = least(count, i + 64 - i64(place % 64));
        if (blocks) {
            sketch_blocks(x + i, blocks, place / 64, table);
            i += 64 * blocks;
            continue;
        }
        auto [row, signs] = hashes(place / 64);
        for (; i < end; i++, place++) {
            double v = double(x[i]);
            table[row][place % 16] += signs >> (place % 64) & 1 ? -v : v;
        }
    }
}

// Adds a row of a table to a sketch: lane l to lane l ^ turn.
INLINE void add_turned(double *sketch, const double *row, int turn) {
#if defined(__AVX512F__)
    const V<u64> from = V<u64>{0, 1, 2, 3, 4, 5, 6, 7} ^ u64(turn & 7);
    for (int part = 0; part < 16; part += 8)
        carry(sketch + part, (V<double>)_mm512_permutexvar_pd((__m512i)from, (__m512d)load(row + (part ^ (turn & 8)))));
#elif defined(__AVX2__)
    const V<u32> from = V<u32>{0, 1, 2, 3, 4, 5, 6, 7} ^ u32(2 * (turn & 3));  // each number is two of them
    for (int part = 0; part < 16; part += 4)
        carry(sketch + part, (V<double>)_mm256_permutevar8x32_epi32((__m256i)load((const u32 *)(row + (part ^ (turn & 12)))), (__m256i)from));
#else
    for (int lane = 0; lane < 16; lane++) sketch[lane] += row[lane ^ turn];
#endif
}

// ---- statistics of a block

// The terms of N vectors that lie `step` apart, added up in pairs.
template <int N, int SUMS, class T, class Term> INLINE void pairwise(const T *x, i64 step, V<T> *sums, int p, Term term) {
    if constexpr (N == 1) {
        term(load(x), sums, p);
    } else {
        V<T> other[SUMS];
        pairwise<N / 2, SUMS>(x, step, sums, p, term);
        pairwise<N / 2, SUMS>(x + N / 2 * step, step, other, p, term);
        for (int s = 0; s < SUMS; s++) sums[s] += other[s];
    }
}

// Sums over whole units of what `term(v, terms, p)` makes of each vector. In float32 a sum that has grown large rounds
// whatever is added to it, and if that is often the same, always the same way: so only eight times, each time four.
// Memory is fetched so many bytes `ahead`.
template <int SUMS, class T, class Term> INLINE void add_up(const T *x, i64 units, double *out, i64 ahead, Term term) {
    constexpr int unit = UNIT / sizeof(T), pass = PASS / sizeof(T), parts = PASS / WIDTH;
    if (!units) {  // of a small tensor: zeroing and adding up all lanes would take longer than its elements
        for (int s = 0; s < SUMS; s++) out[s] = 0;
        return;
    }
    alignas(64) double totals[SUMS][unit];
    for (i64 start = 0; start < units; start += FLUSH<T>) {
        i64 end = least(units, start + FLUSH<T>);
        for (int side = 0; side < unit; side += pass) {
            V<T> sums[parts][SUMS] = {}, terms[SUMS];
            const T *at = x + start * unit + side, *last = x + end * unit + side;
            auto add = [&](auto number) __attribute__((always_inline)) {
                for (int p = 0; p < parts; p++) {
                    pairwise<number(), SUMS>(at + p * LANES<T>, unit, terms, p, term);
                    for (int s = 0; s < SUMS; s++) sums[p][s] += terms[s];
                }
                for (int line = 0; side == 0 && line < number() * UNIT; line += LINE)
                    __builtin_prefetch((const char *)at + ahead + line, 0, 2);
                at += number() * unit;
            };
            while (last - at >= 4 * unit) add(std::integral_constant<int, 4>());
            while (last > at) add(std::integral_constant<int, 1>());
            for (int p = 0; p < parts; p++)
                for (int s = 0; s < SUMS; s++) carry(totals[s] + side + p * LANES<T>, sums[p][s], start == 0);
        }
    }
    for (int s = 0; s < SUMS; s++) out[s] = fold<unit>(totals[s]);
}

INLINE float from_bits(u32 bits) {
    float v;
    std::memcpy(&v, &bits, 4);
    return v;
}
INLINE double power_of_two(int exponent) {  // within what a normal number can be
    u64 bits = u64(1023 + exponent) << 52;
    double v;
    std::memcpy(&v, &bits, 8);
    return v;
}
INLINE int exponent_of(double v) {  // such that v is between 1/2 and 1 times two to it; v is positive and no subnormal
    u64 bits;
    std::memcpy(&bits, &v, 8);
    return int(bits >> 52) - 1022;
}

// Whether every number counts, or only those that are finite.
enum Which { ALL, FINITE };
template <Which WHICH, class A> INLINE A kept(A v) {  // 0 for what does not count
    if (WHICH == ALL) return v;
    using Bits = decltype(v < v);
    return (A)((Bits)v & (magnitude(v) < V<ELEMENT<A>>{} + ELEMENT<A>(INF)));
}

// v * a - b, where a is a power of two: the product is exact, so fusing changes no bit.
#if defined(__AVX512F__)
INLINE V<float> shifted(V<float> v, V<float> a, V<float> b) { return (V<float>)_mm512_fmsub_ps((__m512)v, (__m512)a, (__m512)b); }
INLINE V<double> shifted(V<double> v, V<double> a, V<double> b) { return (V<double>)_mm512_fmsub_pd((__m512d)v, (__m512d)a, (__m512d)b); }
#elif defined(__FMA__)
INLINE V<float> shifted(V<float> v, V<float> a, V<float> b) { return (V<float>)_mm256_fmsub_ps((__m256)v, (__m256)a, (__m256)b); }
INLINE V<double> shifted(V<double> v, V<double> a, V<double> b) { return (V<double>)_mm256_fmsub_pd((__m256d)v, (__m256d)a, (__m256d)b); }
#else
template <class A> INLINE A shifted(A v, A a, A b) { return v * a - b; }
#endif

// Merges the central moments of the n numbers of a block that count, whose extrema are `low` and `high`.
template <Which WHICH, class T>
NOINLINE void moments(const T *x, i64 count, Row &r, double n, double low, double high, double mean, i64 ahead) {
    if (low == high) return merge_moments(r, n, low, 0, 0, 0);
    constexpr int limit = sizeof(T) == 4 ? 120 : 1000, unit = UNIT / sizeof(T);
    int exponent = most(-limit, least(limit, exponent_of(most(-low, high))));
    double scale = power_of_two(-exponent), pivot = double(T(mean)) * scale, s[4];
    const V<T> a = V<T>{} + T(scale), b = V<T>{} + T(pivot);
    i64 units = count / unit;
    add_up<4>(x, units, s, ahead, [=](V<T> v, V<T> *terms, int) __attribute__((always_inline)) {
        V<T> d = shifted(v, a, b);
        if (WHICH == FINITE) d = kept<FINITE>(d);
        V<T> square = d * d;
        terms[0] = d, terms[1] = square, terms[2] = square * d, terms[3] = square * square;
    });
    for (i64 i = units * unit; i < count; i++) {
        double d = double(x[i]) * scale - pivot;
        if (WHICH == FINITE && !is_finite(d)) continue;
        double square = d * d;
        s[0] += d, s[1] += square, s[2] += square * d, s[3] += square * square;
    }
    double u = s[0] / n, back = power_of_two(exponent), square = back * back;
    double m2 = s[1] - n * u * u, m3 = s[2] - 3 * u * s[1] + 2 * n * u * u * u;
    double m4 = s[3] - 4 * u * s[2] + 6 * u * u * s[1] - 3 * n * u * u * u * u;
    merge_moments(r, n, (pivot + u) * back, most(m2, 0.0) * square, m3 * square * back, most(m4, 0.0) * square * square);
}

template <class T> INLINE i64 zeros(const T *x, i64 count) {
    constexpr int step = 4 * LANES<T>;
    decltype(V<T>{} == V<T>{}) found[4] = {};
    i64 i = 0, total = 0;
    for (; i + step <= count; i += step)
        for (int k = 0; k < 4; k++) found[k] += load(x + i + k * LANES<T>) == V<T>{};  // true is -1
    for (int k = 0; k < 4; k++)
        for (int lane = 0; lane < LANES<T>; lane++) total -= found[k][lane];
    for (; i < count; i++) total += x[i] == 0;
    return total;
}

// ---- the ends of a block: the smallest and the largest number, and the smallest absolute value, lane by lane

constexpr auto LEAST = [](auto a, auto b) { return least(a, b); };  // of numbers, or of the lanes of vectors
constexpr auto MOST = [](auto a, auto b) { return most(a, b); };

template <class T, int N> struct ByValue {
    V<T> lows[N], highs[N], smalls[N];

    INLINE ByValue() {
        for (int p = 0; p < N; p++) lows[p] = smalls[p] = V<T>{} + T(INF), highs[p] = V<T>{} - T(INF);
    }
    INLINE void take(V<T> v, V<T> size, int p) {
        lows[p] = lower(v, lows[p]), highs[p] = upper(v, highs[p]), smalls[p] = lower(size, smalls[p]);
    }
    INLINE void take_finite(V<T> v, V<T> size, int p) {
        const V<T> inf = V<T>{} + T(INF);
        auto counts = size < inf;
        lows[p] = lower(counts ? v : inf, lows[p]), highs[p] = upper(counts ? v : -inf, highs[p]);
        smalls[p] = lower(counts ? size : inf, smalls[p]);
    }
    INLINE bool found(double &low, double &high, double &small) {
        for (int p = 1; p < N; p++)
            lows[0] = lower(lows[p], lows[0]), highs[0] = upper(highs[p], highs[0]), smalls[0] = lower(smalls[p], smalls[0]);
        low = across(lows[0], LEAST), high = across(highs[0], MOST), small = across(smalls[0], LEAST);
        return true;
    }
};

#if defined(__AVX2__)
// By their bits, since the units of the processor that compare numbers are those that add them up, and have enough to do. As
// integers, those with a sign come after all others, the smallest last; but signed, those without one come last, the largest
// at the end. No NaN may be among them.
template <int N> struct ByBits {
    static constexpr u32 SIGN = 0x80000000, INFINITE = 0x7F800000;
    V<u32> last[N], sizes[N];
    V<i32> top[N];

    INLINE ByBits() {
        for (int p = 0; p < N; p++) last[p] = V<u32>{}, top[p] = V<i32>{} + i32(SIGN), sizes[p] = V<u32>{} + INFINITE;
    }
    INLINE void take(V<float> v, V<float> size, int p) {
        last[p] = upper((V<u32>)v, last[p]), top[p] = upper((V<i32>)v, top[p]), sizes[p] = lower((V<u32>)size, sizes[p]);
    }
    // False where one of them may be 0.0 or -0.0, whichever came first.
    INLINE bool found(double &low, double &high, double &small) {
        for (int p = 1; p < N; p++)
            last[0] = upper(last[p], last[0]), top[0] = upper(top[p], top[0]), sizes[0] = lower(sizes[p], sizes[0]);
        const u32 lowest = u32(across(last[0], MOST));
        const i32 highest = i32(across(top[0], MOST));
        small = from_bits(u32(across(sizes[0], LEAST)));
        low = lowest & SIGN ? from_bits(lowest) : small, high = highest >= 0 ? from_bits(u32(highest)) : -small;
        return !(lowest & SIGN) || highest < 0 || (lowest != SIGN && highest != 0);
    }
};
template <Which WHICH, class T, int N> using Ends = std::conditional_t<WHICH == ALL && sizeof(T) == 4, ByBits<N>, ByValue<T, N>>;
#else
template <Which WHICH, class T, int N> using Ends = ByValue<T, N>;
#endif

// Of the n numbers of a block that count. False, and nothing written, if their absolute values add up to more than
// there is, or to NaN.
template <Which WHICH, class T, class Own = Ends<WHICH, T, PASS / WIDTH>>
NOINLINE bool statistics(const T *x, i64 count, i64 n, Row &r, i64 ahead) {
    constexpr int unit = UNIT / sizeof(T);
    Own ends;
    double s[2], lo, hi, sm;
    i64 units = count / unit;
    add_up<2>(x, units, s, 0, [&](V<T> v, V<T> *terms, int p) __attribute__((always_inline)) {
        V<T> size = magnitude(v);
        if constexpr (WHICH == ALL) {
            ends.take(v, size, p);
        } else {
            ends.take_finite(v, size, p);
            v = kept<WHICH>(v), size = magnitude(v);
        }
        terms[0] = v, terms[1] = size;
    });
    bool certain = true;
    if (units) certain = ends.found(lo, hi, sm);
    else lo = sm = INF, hi = -INF;
    double total = s[0], sizes = s[1];
    for (i64 i = units * unit; i < count; i++) {
        double v = double(x[i]), size = size_of(v);
        if (WHICH == FINITE && !is_finite(v)) continue;
        lo = least(lo, v), hi = most(hi, v), sm = least(sm, size), total += v, sizes += size;
    }
    if (!(sizes < INF)) return false;
    if (!certain) return statistics<WHICH, T, ByValue<T, PASS / WIDTH>>(x, count, n, r, ahead);
    if (sm == 0) r.zeros += zeros(x, count);
    extend(r, lo, hi, sm, sizes);
    moments<WHICH>(x, count, r, double(n), lo, hi, total / double(n), ahead);
    return true;
}

// A block whose sums overflow, even without what is not finite.
template <class T> NOINLINE void huge(const T *x, i64 count, Row &r) {
    alignas(64) double finite[BLOCK<T>];
    double low = INF, high = -INF, small = INF;
    i64 n = 0;
    for (i64 i = 0; i < count; i++) {
        double v = double(x[i]);
        if (!is_finite(v)) continue;
        finite[n++] = v, low = least(low, v), high = most(high, v), small = least(small, size_of(v));
    }
    if (statistics<ALL>(finite, n, n, r, 0)) return;
    r.zeros += zeros(finite, n);
    extend(r, low, high, small, INF);
    moments<ALL>(finite, n, r, double(n), low, high, 0.5 * low + 0.5 * high, 0);
}

template <class T> NOINLINE void zeroed(const T *x, i64 count, T *to) {  // 0 for what is not finite
    i64 i = 0;
    for (; i + LANES<T> <= count; i += LANES<T>) store(to + i, kept<FINITE>(load(x + i)));
    for (; i < count; i++) to[i] = is_finite(double(x[i])) ? x[i] : T(0);
}

// The statistics of a block that may hold anything; whether all of it is finite.
template <class T> INLINE bool measure(const T *x, i64 count, Row &r, i64 ahead) {
    if (statistics<ALL>(x, count, count, r, ahead)) return true;
    i64 nans = 0, posinfs = 0, neginfs = 0;
    for (i64 i = 0; i < count; i++) nans += x[i] != x[i], posinfs += x[i] == T(INF), neginfs += x[i] == -T(INF);
    r.nans += nans, r.posinfs += posinfs, r.neginfs += neginfs;
    i64 n = count - nans - posinfs - neginfs;
    if (n && !statistics<FINITE>(x, count, n, r, ahead)) huge(x, count, r);
    return n == count;
}

template <class T> NOINLINE void values(const T *x, i64 count, u64 first, int flags, Row &r, double (*table)[16], i64 ahead) {
    alignas(64) T clean[BLOCK<T>];
    bool finite = flags & STATS && measure(x, count, r, ahead);
    if (!(flags & SKETCH)) return;
    if (!finite) zeroed(x, count, clean);
    sketch(finite ? x : clean, count, first, table);
}

// ---- other types as float32 or float64

template <class From, class To> INLINE void convert(const void *from, i64 count, To *to) {
    const From *x = (const From *)from;
    for (i64 i = 0; i < count; i++) to[i] = To(x[i]);
}

INLINE float half(u16 h) {  // without an instruction for it, and without subnormal float32 numbers
    u32 bits = u32(h & 0x7FFF) << 13, sign = u32(h & 0x8000) << 16;
    if (bits >= 0x0F800000) bits += 0x70000000;
    else if (bits >= 0x00800000) bits += 0x38000000;
    else {
        float v = from_bits(bits + 0x38800000) - from_bits(0x38800000);
        std::memcpy(&bits, &v, 4);
    }
    return from_bits(bits | sign);
}
INLINE void halves(const u16 *x, i64 count, float *to) {
    i64 i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= count; i += 16) _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(x + i))));
#elif defined(__F16C__)
    for (; i + 8 <= count; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i))));
#endif
    for (; i < count; i++) to[i] = half(x[i]);
}

INLINE void brains(const u16 *x, i64 count, float *to) {
    u32 *bits = (u32 *)__builtin_assume_aligned(to, 64);
    for (i64 i = 0; i < count; i++) bits[i] = u32(x[i]) << 16;
}
INLINE void looked_up(const u8 *x, i64 count, const float *table, float *to) {
    i64 i = 0;
    for (; i + 8 <= count; i += 8) {
        u64 some;
        std::memcpy(&some, x + i, 8);
        for (int k = 0; k < 8; k++) to[i + k] = table[some >> (8 * k) & 255];
    }
    for (; i < count; i++) to[i] = table[x[i]];
}

// Complex numbers count by their absolute values; in the sketch, by their components.
INLINE double absolute(double re, double im, float) { return __builtin_sqrt(re * re + im * im); }
INLINE double absolute(double re, double im, double) {  // without a square that over- or underflows
    double large = most(size_of(re), size_of(im)), scale = 1;
    if (large > 0x1p500) scale = 0x1p-600;
    if (large < 0x1p-500) scale = 0x1p600;
    return __builtin_sqrt(re * scale * (re * scale) + im * scale * (im * scale)) / scale;
}
template <class T> NOINLINE void complex(const T *x, i64 count, u64 first, int flags, Row &r, double (*table)[16]) {
    alignas(64) double sizes[BLOCK<double> / 2], parts[BLOCK<double>], clean[BLOCK<double>];
    convert<T>(x, 2 * count, parts);
    for (i64 i = 0; i < count; i++) sizes[i] = absolute(parts[2 * i], parts[2 * i + 1], T());
    bool finite = flags & STATS && measure(sizes, count, r, 0);
    if (!(flags & SKETCH)) return;
    if (!finite) zeroed(parts, 2 * count, clean);
    sketch(finite ? parts : clean, 2 * count, 2 * first, table);
}

INLINE u64 words(const void *x, i64 count, u64 first, int size, i64 ahead) {
    int width = size < 4 ? size : 4, each = size / width;
    if (width == 4) return checksum((const u32 *)x, count * each, first * each, ahead);
    return width == 2 ? checksum((const u16 *)x, count, first, ahead) : checksum((const u8 *)x, count, first, ahead);
}

NOINLINE void block(const void *x, i64 n, u64 at, int code, int flags, const float *lut, Row &r, double (*table)[16]) {
    alignas(64) union {
        float narrow[BLOCK<float>];
        double wide[BLOCK<double>];
    } as;
    float *narrow = as.narrow;
    double *wide = as.wide;
    switch (code) {
    case F32: return values((const float *)x, n, at, flags, r, table, FAR);
    case F64: return values((const double *)x, n, at, flags, r, table, FAR);
    case C64: return complex((const float *)x, n, at, flags, r, table);
    case C128: return complex((const double *)x, n, at, flags, r, table);
    case C32: halves((const u16 *)x, 2 * n, narrow); return complex(narrow, n, at, flags, r, table);
    case F16: halves((const u16 *)x, n, narrow); break;
    case BF16: brains((const u16 *)x, n, narrow); break;
    case TABLE: looked_up((const u8 *)x, n, lut, narrow); break;
    case U8: convert<u8>(x, n, narrow); break;
    case I8: convert<int8_t>(x, n, narrow); break;
    case U16: convert<u16>(x, n, narrow); break;
    case I16: convert<int16_t>(x, n, narrow); break;
    case U32: convert<u32>(x, n, wide); break;
    case I32: convert<int32_t>(x, n, wide); break;
    case U64: convert<u64>(x, n, wide); break;
    default: convert<i64>(x, n, wide);
    }
    code < F64 ? values(narrow, n, at, flags, r, table, 0) : values(wide, n, at, flags, r, table, 0);
}

void run(const void *address, i64 count, i64 first, int code, int flags, const float *lut, Row *out) {
    alignas(64) double table[16][16];
    const int size = SIZES[code];
    Row &r = *out;
    r = EMPTY;
    if (code >= OPAQUE8) flags = 0;
    const int parts = code >= C32 ? 2 : 1;
    const u32 rows = flags & SKETCH ? rows_of(u64(first) * parts, count * parts) : 0;
    for (u32 left = rows; left; left &= left - 1) std::memset(table[__builtin_ctz(left)], 0, sizeof table[0]);
    i64 step = code >= C32 ? BLOCK<double> / 2 : code >= F64 ? BLOCK<double> : BLOCK<float>;
    if (!flags) step = most<i64>(count, 1);
    // The next block is fetched while this one is worked on: by the longest loop that reads it where it lies. A checksum alone
    // is left to the processor's own foresight, which is better.
    const i64 ahead = flags && code != F32 && code != F64 ? FAR : 0;
    for (i64 start = 0; start < count; start += step) {
        const char *x = (const char *)address + start * size;
        i64 some = least(step, count - start);
        r.raw += words(x, some, first + start, size, ahead);
        if (flags) block(x, some, first + start, code, flags, lut, r, table);
    }
    for (u32 left = rows; left; left &= left - 1) add_turned(r.sketch, table[__builtin_ctz(left)], __builtin_ctz(left));
}

}  // namespace

extern HIDDEN Run *const LEVEL;
Run *const LEVEL = run;

// Vectors of the processor's registers, and how their lanes are combined: in the same order at every width, so that sums
// are the same bits on every processor. For kernels.cpp, which is compiled once for each level.
#pragma once
#include "kernels.h"

#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int WIDTH = 64;
#elif defined(__AVX2__)
constexpr int WIDTH = 32;
#else
constexpr int WIDTH = 16;
#endif
constexpr int UNIT = 128;         // bytes whose elements are summed in a lane each, whatever the width of registers
constexpr int PASS = 2 * WIDTH;   // of which so many at once, so that all sums stay in registers
template <class T> constexpr i64 FLUSH = sizeof(T) == 4 ? 32 : i64(1) << 40;  // additions in float32, then float64: rounding must not add up
template <class T> constexpr i64 BLOCK = 16384 / sizeof(T);
constexpr int FAR = 16384, LINE = 64;  // bytes ahead that memory is fetched into the second-level cache, line by line

template <class T, int N> struct Vector {
    typedef T type __attribute__((vector_size(N * sizeof(T)), may_alias));
};
template <class T, int N = WIDTH / int(sizeof(T))> using V = typename Vector<T, N>::type;
template <class T> constexpr int LANES = WIDTH / int(sizeof(T));
template <class A> using ELEMENT = std::remove_reference_t<decltype(A()[0])>;

template <class T> INLINE V<T> load(const T *x) {
    V<T> v;
    std::memcpy(&v, x, sizeof v);
    return v;
}
template <class T> INLINE void store(T *x, V<T> v) { std::memcpy(x, &v, sizeof v); }

#if defined(__AVX512F__)
INLINE V<u64> times(V<u64> a, V<u64> b) { return (V<u64>)_mm512_mul_epu32((__m512i)a, (__m512i)b); }
INLINE V<float> lower(V<float> a, V<float> b) { return (V<float>)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE V<float> upper(V<float> a, V<float> b) { return (V<float>)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE V<double> lower(V<double> a, V<double> b) { return (V<double>)_mm512_min_pd((__m512d)a, (__m512d)b); }
INLINE V<double> upper(V<double> a, V<double> b) { return (V<double>)_mm512_max_pd((__m512d)a, (__m512d)b); }
INLINE V<u32> lower(V<u32> a, V<u32> b) { return (V<u32>)_mm512_min_epu32((__m512i)a, (__m512i)b); }
INLINE V<u32> upper(V<u32> a, V<u32> b) { return (V<u32>)_mm512_max_epu32((__m512i)a, (__m512i)b); }
INLINE V<i32> upper(V<i32> a, V<i32> b) { return (V<i32>)_mm512_max_epi32((__m512i)a, (__m512i)b); }
#elif defined(__AVX2__)
INLINE V<u64> times(V<u64> a, V<u64> b) { return (V<u64>)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
INLINE V<float> lower(V<float> a, V<float> b) { return (V<float>)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE V<float> upper(V<float> a, V<float> b) { return (V<float>)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE V<double> lower(V<double> a, V<double> b) { return (V<double>)_mm256_min_pd((__m256d)a, (__m256d)b); }
INLINE V<double> upper(V<double> a, V<double> b) { return (V<double>)_mm256_max_pd((__m256d)a, (__m256d)b); }
INLINE V<u32> lower(V<u32> a, V<u32> b) { return (V<u32>)_mm256_min_epu32((__m256i)a, (__m256i)b); }
INLINE V<u32> upper(V<u32> a, V<u32> b) { return (V<u32>)_mm256_max_epu32((__m256i)a, (__m256i)b); }
INLINE V<i32> upper(V<i32> a, V<i32> b) { return (V<i32>)_mm256_max_epi32((__m256i)a, (__m256i)b); }
#else
template <class A> INLINE A lower(A a, A b) { return a < b ? a : b; }
template <class A> INLINE A upper(A a, A b) { return a > b ? a : b; }
#if defined(__SSE2__)
INLINE V<u64> times(V<u64> a, V<u64> b) { return (V<u64>)_mm_mul_epu32((__m128i)a, (__m128i)b); }
#else
INLINE V<u64> times(V<u64> a, V<u64> b) {
    return __builtin_convertvector(__builtin_convertvector(a, V<u32, 2>), V<u64>) *
           __builtin_convertvector(__builtin_convertvector(b, V<u32, 2>), V<u64>);
}
#endif
#endif
INLINE V<float> magnitude(V<float> v) { return (V<float>)((V<u32>)v & 0x7FFFFFFF); }
INLINE V<double> magnitude(V<double> v) { return (V<double>)((V<u64>)v & 0x7FFFFFFFFFFFFFFF); }
INLINE double size_of(double v) { return __builtin_fabs(v); }
INLINE bool is_finite(double v) { return size_of(v) < INF; }

// Adds a vector to numbers in float64, or to zeros in their place where it is the first.
INLINE void carry(double *to, V<double> v, bool first = false) { store(to, (first ? V<double>{} : load(to)) + v); }
INLINE void carry(double *to, V<float> v, bool first = false) {
    constexpr int half = LANES<double>;
    V<float, half> parts[2];
    std::memcpy(parts, &v, sizeof v);
#if defined(__AVX512F__)
    carry(to, (V<double>)_mm512_cvtps_pd((__m256)parts[0]), first);
    carry(to + half, (V<double>)_mm512_cvtps_pd((__m256)parts[1]), first);
#elif defined(__AVX2__)
    carry(to, (V<double>)_mm256_cvtps_pd((__m128)parts[0]), first);
    carry(to + half, (V<double>)_mm256_cvtps_pd((__m128)parts[1]), first);
#else
    carry(to, __builtin_convertvector(parts[0], V<double>), first);
    carry(to + half, __builtin_convertvector(parts[1], V<double>), first);
#endif
}

// Combines the lanes of a vector, upper half to lower half until one is left.
template <class A, class Combine> INLINE double across(A v, Combine combine) {
    constexpr int half = sizeof(v) / sizeof(v[0]) / 2;
    if constexpr (half > 1) {
        V<ELEMENT<A>, half> parts[2];
        std::memcpy(parts, &v, sizeof v);
        return across(combine(parts[0], parts[1]), combine);
    } else {
        return double(combine(v[0], v[1]));
    }
}

// The sum of the lanes' totals, in an order that is the same at every width.
template <int N> INLINE double fold(const double *totals) {
    constexpr int vectors = N / LANES<double>;
    V<double> v[vectors];
    for (int i = 0; i < vectors; i++) v[i] = load(totals + i * LANES<double>);
    for (int half = vectors / 2; half; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return across(v[0], [](auto a, auto b) { return a + b; });
}

}  // namespace

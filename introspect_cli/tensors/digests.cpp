// What vouches for a step in the store: the CRC-32 of its bytes and the digest of its records. zlib and numpy compute the same; for a
// step of thousands of records it takes them a fifth of what writing it takes.
#include "digests.h"

#include <cstring>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace {

constexpr u32 POLYNOMIAL = 0xEDB88320;  // zlib's: the bit of x^31 is the lowest

constexpr u32 times_x(u32 r) { return r >> 1 ^ (r & 1 ? POLYNOMIAL : 0); }

u32 crc_of_bytes(u32 r, const u8 *bytes, i64 count) {  // a few
    for (i64 i = 0; i < count; i++) {
        r ^= bytes[i];
        for (int bit = 0; bit < 8; bit++) r = times_x(r);
    }
    return r;
}

#if defined(__x86_64__)
constexpr i64 power_of_x(int n) {  // x^n modulo the polynomial, as the product without carries of two such numbers wants it
    u32 r = u32(1) << 31;
    for (int i = 0; i < n; i++) r = times_x(r);
    return i64(u64(r) << 1);
}

bool multiplies() {  // pclmulqdq, sse4.1
    u32 a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 1 & 1) && (c >> 19 & 1);
}
const bool MULTIPLIES = multiplies();

// 16 bytes moved on by a distance: both halves times what x to the power of that is.
__attribute__((target("pclmul,sse4.1"))) INLINE __m128i moved(__m128i bytes, __m128i by) {
    return _mm_xor_si128(_mm_clmulepi64_si128(bytes, by, 0x00), _mm_clmulepi64_si128(bytes, by, 0x11));
}

// Gopal et al., "Fast CRC computation for generic polynomials using PCLMULQDQ instruction", Intel 2009: bytes far ahead of the end
// are replaced by 16 nearer to it that leave the same remainder, four streams at a time.
__attribute__((target("pclmul,sse4.1"))) u32 folded(u32 r, const u8 *bytes, i64 count) {
    constexpr int STREAMS = 4, BITS = 128;
    constexpr i64 SIZE = 16;
    const __m128i far = _mm_set_epi64x(power_of_x(STREAMS * BITS - 32), power_of_x(STREAMS * BITS + 32));
    const __m128i near = _mm_set_epi64x(power_of_x(BITS - 32), power_of_x(BITS + 32));
    auto at = [bytes](i64 place) { return _mm_loadu_si128((const __m128i *)(bytes + place)); };
    __m128i a = _mm_xor_si128(at(0), _mm_cvtsi32_si128(i32(r))), b = at(SIZE), c = at(2 * SIZE), d = at(3 * SIZE);
    i64 place = STREAMS * SIZE;
    for (; place + STREAMS * SIZE <= count; place += STREAMS * SIZE) {
        a = _mm_xor_si128(moved(a, far), at(place)), b = _mm_xor_si128(moved(b, far), at(place + SIZE));
        c = _mm_xor_si128(moved(c, far), at(place + 2 * SIZE)), d = _mm_xor_si128(moved(d, far), at(place + 3 * SIZE));
    }
    b = _mm_xor_si128(moved(a, near), b), c = _mm_xor_si128(moved(b, near), c), d = _mm_xor_si128(moved(c, near), d);
    for (; place + SIZE <= count; place += SIZE) d = _mm_xor_si128(moved(d, near), at(place));
    u8 last[SIZE];
    std::memcpy(last, &d, SIZE);
    return crc_of_bytes(crc_of_bytes(0, last, SIZE), bytes + place, count - place);
}
#endif

}  // namespace

bool has_crc32() {
#if defined(__x86_64__)
    return MULTIPLIES;
#else
    return false;
#endif
}

u32 crc32_of(u32 before, const u8 *bytes, i64 count) {
#if defined(__x86_64__)
    constexpr i64 LEAST = 64;
    if (count >= LEAST && has_crc32()) return ~folded(~before, bytes, count);
#endif
    return ~crc_of_bytes(~before, bytes, count);
}

void step_digest(const Records &of, u64 *sums) {
    constexpr u64 STATUS = 0x9E3779B97F4A7C15, SECOND = 0xD1B54A32D192ED03;  // as index.py has them
    sums[0] = sums[1] = 0;
    for (i64 i = 0; i < of.count; i++) {
        const u32 site = of.sites[i];
        if (of.settings[site]) continue;
        const u64 mixed = mix(mix((u64(of.statuses[i]) + 1) * STATUS + of.checksums[i]) ^ of.keys[site]);
        sums[0] += mixed, sums[1] += mix(mixed + SECOND);
    }
}

// CRC-32 and the digest of a step, which the store asks for once a step, of half a megabyte: what numpy and zlib take a
// third of the end of a step for.
#include "sums.h"

#include <cstring>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace {

// ---- CRC-32, the one of zlib: bits are reflected, so a polynomial's highest power is its lowest bit

constexpr u32 POLYNOMIAL = 0xEDB88320;

constexpr u32 times_x(u32 value) { return value & 1 ? value >> 1 ^ POLYNOMIAL : value >> 1; }

struct Bytes {
    u32 of[256];
};
constexpr Bytes BYTES = [] {
    Bytes made{};
    for (u32 byte = 0; byte < 256; byte++) {
        made.of[byte] = byte;
        for (int bit = 0; bit < 8; bit++) made.of[byte] = times_x(made.of[byte]);
    }
    return made;
}();

u32 by_bytes(const u8 *data, i64 size, u32 crc) {
    while (size-- > 0) crc = crc >> 8 ^ BYTES.of[(crc ^ *data++) & 255];
    return crc;
}

#if defined(__x86_64__)
// x to some power, as the product without carries wants it: shifted by one, since the product of two reflected numbers
// of n bits has 2n - 1.
constexpr u64 power(int exponent) {
    u32 value = 0x80000000;
    while (exponent--) value = times_x(value);
    return u64(value) << 1;
}

#define CARRYLESS __attribute__((target("sse4.1,pclmul")))

bool has_carryless() {
    u32 a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && c >> 1 & 1 && c >> 19 & 1;
}
const bool CARRIES_LESS = has_carryless();

// 128 bits, moved up by as many bits as `by` has the powers for, and added to others.
CARRYLESS INLINE __m128i fold(__m128i value, __m128i by, __m128i next) {
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(value, by, 0x00), _mm_clmulepi64_si128(value, by, 0x11)), next);
}
CARRYLESS INLINE __m128i load(const u8 *at) { return _mm_loadu_si128((const __m128i *)at); }

// What is left of whole groups of 64 bytes is 16 bytes with the same remainder.
CARRYLESS u32 by_groups(const u8 *data, i64 size, u32 crc) {
    const __m128i far = _mm_set_epi64x(i64(power(4 * 128 - 32)), i64(power(4 * 128 + 32)));
    const __m128i near = _mm_set_epi64x(i64(power(128 - 32)), i64(power(128 + 32)));
    __m128i parts[4];
    for (int k = 0; k < 4; k++) parts[k] = load(data + 16 * k);
    parts[0] = _mm_xor_si128(parts[0], _mm_cvtsi32_si128(int(crc)));
    for (data += 64, size -= 64; size >= 64; data += 64, size -= 64)
        for (int k = 0; k < 4; k++) parts[k] = fold(parts[k], far, load(data + 16 * k));
    __m128i all = parts[0];
    for (int k = 1; k < 4; k++) all = fold(all, near, parts[k]);
    for (; size >= 16; data += 16, size -= 16) all = fold(all, near, load(data));
    u8 rest[16];
    _mm_storeu_si128((__m128i *)rest, all);
    return by_bytes(data, size, by_bytes(rest, 16, 0));
}
#endif

}  // namespace

u32 crc32(const u8 *data, i64 size, u32 begun) {
#if defined(__x86_64__)
    if (CARRIES_LESS && size >= 64) return ~by_groups(data, size, ~begun);
#endif
    return ~by_bytes(data, size, ~begun);
}

// ---- digests: `step_digest` of the store's index.py

void step_digest(const u64 *keys, const u8 *left_out, const u32 *sites, const u64 *checksums, const u8 *statuses, i64 count,
                 u64 *out) {
    constexpr u64 SECOND = 0xD1B54A32D192ED03;
    u64 low = 0, high = 0;
    for (i64 i = 0; i < count; i++) {
        if (left_out[sites[i]]) continue;
        const u64 mixed = mix(keys[sites[i]] ^ mix(checksums[i] + (u64(statuses[i]) + 1) * G));
        low += mixed, high += mix(mixed + SECOND);
    }
    out[0] = low, out[1] = high;
}

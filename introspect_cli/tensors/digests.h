// The CRC-32 of many bytes, and the digest of a step.
#pragma once
#include "kernels.h"

// Whether this processor has what makes it faster than zlib.
HIDDEN bool has_crc32();
// zlib's `crc32`: of some bytes after those that gave `before`.
HIDDEN u32 crc32_of(u32 before, const u8 *bytes, i64 count);

struct Records {  // of a step: the site, checksum and status of each; by site, its key and whether it is a setting
    i64 count;
    const u32 *sites;
    const u64 *checksums;
    const u8 *statuses;
    const u64 *keys;
    const u8 *settings;
};
// `step_digest` of index.py: two sums.
HIDDEN void step_digest(const Records &of, u64 *sums);

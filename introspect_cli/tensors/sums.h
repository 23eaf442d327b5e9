// The sums that vouch for a step.
#pragma once
#include "kernels.h"

HIDDEN u32 crc32(const u8 *data, i64 size, u32 begun);
// 16 bytes of the records of some sites, by the sites' keys; those of sites that are left out do not count.
HIDDEN void step_digest(const u64 *keys, const u8 *left_out, const u32 *sites, const u64 *checksums, const u8 *statuses,
                        i64 count, u64 *out);

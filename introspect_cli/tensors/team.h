// Large tensors: cut into chunks, which threads share.
#pragma once
#include "kernels.h"
#include "pace.h"

constexpr i64 CHUNK = 1 << 16, WORTHWHILE = 8192, SHARED = 2 * CHUNK;

struct Item {  // a tensor to summarise; its first chunk's number, and its first row of partial results
    u64 address;
    i64 count, first, code;
    Row *row;
    const float *table;
    i64 chunk, part;
};
struct Team {  // as kernels.py has it
    i64 counter[3], chunks;
    Item *items;
    i64 count, flags;
    Row *parts;
    i64 threads;  // that may take part, the caller's included
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    int (*number)();
    i64 room;       // elements that there are parts for
    i64 taking;     // threads that took part in the last call
    Pace paces[4];  // by flags
};
static_assert(sizeof(Item) == 8 * 8 && sizeof(Pace) == 6 * 8 && sizeof(Team) == 37 * 8);

HIDDEN u64 sample(u64 address, i64 count, i64 code);  // eight bytes from the middle
HIDDEN void merge(const Row *parts, i64 count, Row *out);
// Runs a function, for `count` elements in all, in the team's threads if that pays.
HIDDEN void share(Team *team, void (*function)(void *), void *data, i64 count, i64 flags);
HIDDEN void summarise_all(Team *team);
HIDDEN void summarise(u64 address, i64 count, i64 first, i64 code, i64 flags, const float *table, Row *row, Team *team);
HIDDEN bool again(u64 address, i64 count, const Row *known, i64 code, Row *row, Team *team);

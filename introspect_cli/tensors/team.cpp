// Chunks, and the threads that share them.
//
// A large tensor wants all cores for a tenth of a millisecond. Whoever takes part, in the runtime's own threads, draws
// the next chunk from counters. Chunks depend on the tensor's size alone and their rows are merged in order, so the
// result does not depend on the number of threads.
#include "team.h"

#include "intake.h"

#include <cstring>

namespace {

i64 chunk_of(i64 count) {  // elements in a chunk: more for huge tensors, so that the rows stay small beside them
    return CHUNK * most<i64>(1, (count + (CHUNK << 12) - 1) / (CHUNK << 12));
}
i64 chunks_of(i64 count) {
    i64 chunk = chunk_of(count);
    return most<i64>(1, (count + chunk - 1) / chunk);
}

}  // namespace

u64 sample(u64 address, i64 count, i64 code) {
    u64 middle = address + (u64(count) * SIZES[code] >> 1), found;
    std::memcpy(&found, (const void *)(middle - middle % 8), 8);
    return found;
}

void merge(const Row *parts, i64 count, Row *out) {
    Row r = EMPTY;
    for (const Row *p = parts; p < parts + count; p++) {
        r.raw += p->raw, r.nans += p->nans, r.posinfs += p->posinfs, r.neginfs += p->neginfs, r.zeros += p->zeros;
        extend(r, p->min, p->max, p->absmin, p->abssum);
        merge_moments(r, double(p->finite), p->mean, p->m2, p->m3, p->m4);
        for (int k = 0; k < 16; k++) r.sketch[k] += p->sketch[k];
    }
    *out = r;
}

// Summarises chunks until none is left; several threads may, for the same team.
static void take(void *data);

void summarise_all(Team *team) {
    i64 chunks = 0, parts = 0, count = 0;
    for (Item *it = team->items; it < team->items + team->count; it++) {
        i64 number = chunks_of(it->count);
        count += it->count;
        it->chunk = chunks, it->part = parts;
        chunks += number, parts += number > 1 ? number : 0;
    }
    team->chunks = chunks;
    for (i64 &counter : team->counter) counter = 0;
    share(team, take, team, count, team->flags);
    for (Item *it = team->items; it < team->items + team->count; it++) {
        i64 number = chunks_of(it->count);
        if (number > 1) merge(team->parts + it->part, number, it->row);
        if (it->count >= WORTHWHILE) it->row->sample = sample(it->address, it->count, it->code);
    }
}

static void take(void *data) {
    Team *team = (Team *)data;
    // Torch's threads have just written the tensor, the first one its beginning: what is in their caches goes first.
    bool back = team->number && team->number() > 0;
    Item *it = team->items, *last = it + team->count - 1;
    while (__atomic_fetch_add(team->counter, 1, __ATOMIC_ACQ_REL) < team->chunks) {
        i64 number = __atomic_fetch_add(team->counter + 1 + back, 1, __ATOMIC_ACQ_REL);
        if (back) number = team->chunks - 1 - number;
        while (it->chunk > number) it--;
        while (it < last && it[1].chunk <= number) it++;
        i64 chunk = chunk_of(it->count), done = (number - it->chunk) * chunk;
        Row *row = it->count > chunk ? team->parts + it->part + number - it->chunk : it->row;
        RUN((const char *)it->address + done * SIZES[it->code], least(chunk, it->count - done), it->first + done,
            int(it->code), int(team->flags), it->table, row);
    }
}

void share(Team *team, void (*function)(void *), void *data, i64 count, i64 flags) {
    Pace &pace = team->paces[flags];
    const bool may = team->threads > 1 && count >= SHARED, timed = may && pace.untimed <= 0;
    const bool shared = may && (timed ? pays(pace) : (pace.untimed--, pace.shares != 0));
    const double start = timed ? clock_now() : 0;
    team->taking = shared ? team->threads : 1;
    if (shared) team->parallel(function, data, unsigned(team->threads), 0);
    else function(data);
    if (timed) note(pace, (clock_now() - start) / double(count), shared);
}

void summarise(u64 address, i64 count, i64 first, i64 code, i64 flags, const float *table, Row *row, Team *team) {
    Item item{address, count, first, code, row, table, 0, 0};
    if (count > CHUNK) {
        team->items = &item, team->count = 1, team->flags = flags;
        return summarise_all(team);
    }
    RUN((const void *)address, count, first, int(code), int(flags), table, row);
    if (count >= WORTHWHILE) row->sample = sample(address, count, code);
}

bool again(u64 address, i64 count, const Row *known, i64 code, Row *row, Team *team) {
    Row now;
    summarise(address, count, 0, code, 0, nullptr, &now, team);
    if (now.raw != known->raw) return false;
    *row = *known;
    return true;
}

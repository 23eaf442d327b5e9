// The way of a large tensor: whether its memory is known, and which threads share the work.
//
// The interpreter's lock is given away while the kernels run, the summarizer's is not.
#include "large.h"

#include "lock.h"
#include "memory.h"
#include "room.h"

#include <unistd.h>

namespace {

const pid_t START = getpid();  // as in parallel.py: any other process is a fork of this one

// Makes a call in which so many threads may take part, without the interpreter's lock.
template <class Call> bool with_threads(Team *team, i64 threads, Call call) {
    const i64 before = team->threads;
    bool result;
    team->threads = threads;
    Py_BEGIN_ALLOW_THREADS
    result = call();
    Py_END_ALLOW_THREADS
    team->threads = before;
    return result;
}

bool put_off(Later &later, const Item &item) {  // false without memory
    if (!has_room(later.items, later.places, later.count + 1, 64)) return false;
    later.items[later.count++] = item;
    return true;
}

bool summarise_known(const Large &own, const Look &found, i64 flags, Row *row, Later *later) {
    Team *team = own.team;
    const Row *known = flags ? find_known(own.memory, found.address, found.code, found.count) : nullptr;
    if (known && known->sample != sample(found.address, found.count, found.code)) known = nullptr;
    const i64 threads = found.count < SHARED ? 1 : later ? later->threads : threads_of(own);
    auto is_known = [&] { return again(found.address, found.count, known, found.code, row, team); };
    if (known && with_threads(team, threads, is_known)) return true;
    if (later) return put_off(*later, {found.address, found.count, 0, found.code, row, nullptr, 0, 0});
    if (flags) note_known(own.memory, {found.address, found.code, found.count, row});
    return with_threads(team, threads, [&] {
        return summarise(found.address, found.count, 0, found.code, flags, nullptr, row, team), true;
    });
}

}  // namespace

i64 threads_of(const Large &own) {
    if (!own.team->parallel || getpid() != START) return 1;
    const i64 threads = integer(PyObject_CallNoArgs(own.threads));
    return threads > 1 && integer(PyObject_GetAttrString(own.script, "threads")) == threads ? threads : 1;
}

void summarise_later(const Large &own, const Later &later, i64 flags) {
    Team *team = own.team;
    if (later.count) with_threads(team, later.threads, [&] {
        for (i64 first = 0, next = 0; first < later.count; first = next) {  // as many at once as there is room for
            for (i64 room = team->room; next < later.count && later.items[next].count <= room; next++)
                room -= later.items[next].count;
            team->items = later.items + first, team->count = next - first, team->flags = flags;
            summarise_all(team);
        }
        return true;
    });
    for (const Item *it = later.items; flags && it < later.items + later.count; it++)
        note_known(own.memory, {it->address, it->code, it->count, it->row});
}

bool summarise_large(const Large &own, const Look &found, i64 flags, Row *row, Later *later) {
    if (found.count > own.team->room) return false;
    if (later) return summarise_known(own, found, flags, row, later);
    if (!try_take(own.lock)) return false;
    const bool done = summarise_known(own, found, flags, row, nullptr);
    give_back(own.lock);
    return done;
}

// Room for items that become more.
#pragma once
#include "kernels.h"

#include <cstdlib>

// Whether there is room for so many items, now: at first for `first` or more, then for twice as many as before. False without memory.
template <class T, class Count> bool has_room(T *&items, Count &room, i64 wanted, i64 first) {
    if (wanted <= room) return true;
    const i64 more = most<i64>(2 * room, most(wanted, first));
    T *all = (T *)std::realloc(items, size_t(more) * sizeof(T));
    if (all) items = all, room = more;
    return all;
}

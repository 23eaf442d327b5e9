// The short way of a large tensor: what `_plain` of summarizer.py, `Memory` of reuse.py and `Engine` of cpu.py do for it in a
// dozen calls of Python, ten microseconds in all, where nothing has to be decided anew.
//
// The interpreter's lock is given away while the kernels run, the summarizer's is not.
#include "large.h"

#include <cstdlib>
#include <initializer_list>
#include <unistd.h>

namespace {

const pid_t START = getpid();  // as in parallel.py: any other process is a fork of this one

PyObject *THREADS = nullptr, *NOW = nullptr, *BEFORE = nullptr;  // names

PyObject *named(PyObject *&made, const char *text) { return made ? made : made = PyUnicode_InternFromString(text); }

// An integer, a reference of ours; -1 without an exception where there is none.
i64 integer(PyObject *number) {
    i64 value = number ? PyLong_AsLongLong(number) : -1;
    if (number) Py_DecRef(number);
    if (PyErr_Occurred()) PyErr_Clear(), value = -1;
    return value;
}

// Threads that may take part in a call for so many elements; 0 where Python has to decide.
i64 threads_for(const Large &own, i64 count) {
    if (count < SHARED) return 1;
    if (!own.team->parallel) return 0;
    const i64 threads = integer(PyObject_CallNoArgs(own.threads));
    if (threads == 1) return 1;
    if (threads < 1 || getpid() != START || integer(PyObject_GetAttr(own.script, named(THREADS, "threads"))) != threads) return 0;
    return threads;
}

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

PyObject *entries(const Large &own, PyObject *name) {  // a dictionary of the memory's
    PyObject *found = PyObject_GetAttr(own.memory, name);
    if (found && PyDict_Check(found)) return found;
    if (found) Py_DecRef(found);
    return PyErr_Clear(), nullptr;
}

// The row of what may still be at an address, null if there is none: `Memory.find`.
const Row *row_at(PyObject *now, PyObject *before, PyObject *address, const Look &found) {
    PyObject *known = PyDict_GetItemWithError(now, address);
    if (!known && !PyErr_Occurred()) known = PyDict_GetItemWithError(before, address);
    if (!known || !PyTuple_Check(known) || PyTuple_Size(known) != 3) return nullptr;
    u64 own[3];
    for (int i = 0; i < 3; i++) own[i] = PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(known, i));
    if (own[0] != u64(found.code) || own[1] != u64(found.count) || PyErr_Occurred()) return nullptr;
    return PyDict_SetItem(now, address, known) ? nullptr : (const Row *)own[2];
}

bool note(PyObject *now, PyObject *address, const Look &found, const Row *row) {  // `Memory.note`
    PyObject *known = Py_BuildValue("(iLK)", found.code, (long long)found.count, (unsigned long long)row);
    const bool done = known && PyDict_SetItem(now, address, known) == 0;
    if (known) Py_DecRef(known);
    return done;
}

bool put_off(Later &later, const Item &item) {  // false without memory
    if (later.count == later.places) {
        const i64 places = later.places ? 2 * later.places : 64;
        Item *items = (Item *)std::realloc(later.items, size_t(places) * sizeof(Item));
        if (!items) return false;
        later.items = items, later.places = places;
    }
    later.items[later.count++] = item;
    return true;
}

Outcome summarise_known(const Large &own, PyObject *now, PyObject *before, const Look &found, i64 flags, Row *row, Later *later) {
    Team *team = own.team;
    PyObject *address = flags ? PyLong_FromUnsignedLongLong(found.address) : nullptr;
    const Row *known = address ? row_at(now, before, address, found) : nullptr;
    PyErr_Clear();
    const bool seems_known = known && known->sample == sample(found.address, found.count, found.code);
    const i64 threads = later && !seems_known ? 1 : threads_for(own, found.count);
    Outcome outcome = threads && (address || !flags) ? DONE : LONG_WAY;
    bool is_done = false;
    if (outcome == DONE && seems_known)
        is_done = with_threads(team, threads, [&] { return again(found.address, found.count, known, found.code, row, team); });
    if (outcome == DONE && !is_done) {
        const Item item{found.address, found.count, 0, found.code, row, nullptr, 0, 0};
        if (address && !note(now, address, found, row)) outcome = LONG_WAY;
        else if (later) outcome = put_off(*later, item) ? LATER : LONG_WAY;
        else with_threads(team, threads, [&] {
            return summarise(found.address, found.count, 0, found.code, flags, nullptr, row, team), true;
        });
    }
    if (address) Py_DecRef(address);
    PyErr_Clear();
    return outcome;
}

}  // namespace

bool summarise_later(const Large &own, const Later &later, i64 flags) {
    Team *team = own.team;
    i64 total = 0;
    for (const Item *it = later.items; it < later.items + later.count; it++) total += it->count;
    const i64 threads = threads_for(own, total);
    if (!threads) return false;
    return with_threads(team, threads, [&] {
        for (i64 first = 0, next = 0; first < later.count; first = next) {  // as many at once as there is room for
            for (i64 room = team->room; next < later.count && later.items[next].count <= room; next++)
                room -= later.items[next].count;
            team->items = later.items + first, team->count = next - first, team->flags = flags;
            summarise_all(team);
        }
        return true;
    });
}

Outcome summarise_large(const Large &own, const Look &found, i64 flags, Row *row, Later *later) {
    if (found.count > own.team->room) return LONG_WAY;
    // Waiting for a lock, a thread may be interrupted by a handler of the script's: not here, where nothing guards.
    PyObject *held = PyObject_CallFunctionObjArgs(own.acquire, Py_False, nullptr);
    const bool is_held = held && PyObject_IsTrue(held) == 1;
    if (held) Py_DecRef(held);
    PyErr_Clear();
    if (!is_held) return LONG_WAY;
    PyObject *now = entries(own, named(NOW, "now")), *before = entries(own, named(BEFORE, "before"));
    Outcome outcome = now && before ? summarise_known(own, now, before, found, flags, row, later) : LONG_WAY;
    for (PyObject *one : {now, before, PyObject_CallNoArgs(own.release)})
        if (one) Py_DecRef(one);
    PyErr_Clear();
    return outcome;
}

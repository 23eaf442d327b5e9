// Whether a Mersenne twister has moved since it was last looked at, read where it lies. Asking a generator for its
// state copies five kilobytes; this runs twice for every call of a module.
#include "generators.h"

#include "calls.h"

namespace {

constexpr int WORDS = 624, MOST = 4;

struct Twister {
    const u32 *words;     // its state
    const u32 *position;  // how far into the words it is
    const u64 *spare;     // the second of two normal numbers, not yet given; null where there is none
    const char *flag;     // whether the spare is there
    u32 first, last, at;
    u64 kept;
};

Twister TWISTERS[MOST];
int COUNT = 0;

u64 spare(const Twister &t) { return t.flag && *t.flag ? *t.spare | 1 : 0; }
bool moved(const Twister &t) {
    return *t.position != t.at || t.words[0] != t.first || t.words[WORDS - 1] != t.last || spare(t) != t.kept;
}

}  // namespace

PyObject *watch_generator(PyObject *, PyObject *const *a, Py_ssize_t n) {
    u64 w[5];
    if (!integers(a, n, 5, w)) return nullptr;
    if (w[0] >= MOST) return PyErr_Format(PyExc_ValueError, "at most %d generators", MOST);
    Twister &t = TWISTERS[w[0]];
    t = {(const u32 *)w[1], (const u32 *)w[2], (const u64 *)w[3], (const char *)w[4], 0, 0, 0, 0};
    if (int(w[0]) >= COUNT) COUNT = int(w[0]) + 1;
    return Py_NewRef(Py_None);
}

PyObject *generators_moved(PyObject *, PyObject *) {
    long found = 0;
    for (int i = 0; i < COUNT; i++)
        if (TWISTERS[i].words && moved(TWISTERS[i])) found |= 1L << i;
    return PyLong_FromLong(found);
}

PyObject *generator_state(PyObject *, PyObject *number) {
    u64 which = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred()) return nullptr;
    if (which >= u64(COUNT) || !TWISTERS[which].words) return PyErr_Format(PyExc_ValueError, "nothing is watched");
    Twister &t = TWISTERS[which];
    t.first = t.words[0], t.last = t.words[WORDS - 1], t.at = *t.position, t.kept = spare(t);
    u64 hash = mix(t.at + (t.kept ? 1 : 0)) ^ mix(t.kept);
    for (int i = 0; i < WORDS; i++) hash = (hash ^ t.words[i]) * G, hash ^= hash >> 29;
    return PyLong_FromUnsignedLongLong(mix(hash));
}

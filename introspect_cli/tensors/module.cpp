// The compiled kernels as a Python module, in the limited API: which level of the processor runs, chunks and the
// threads that share them, strided copies. Everything takes raw addresses, and writes nowhere but to the rows and the
// team it is given. See kernels.py for what calls mean.
#include "calls.h"
#include "columns.h"
#include "generators.h"
#include "lock.h"
#include "memory.h"
#include "numbers.h"
#include "probes.h"
#include "step.h"
#include "strided.h"
#include "team.h"

#include <cstring>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

// ---- the checksum's tables

namespace {

struct Tables {
    Keys keys[3];
};
template <int SIZE> constexpr void fill(Keys &k) {
    for (i64 j = 0; j < SPAN; j++) {
        k.factor[key_place<SIZE>(j)] = mix(u64(j + 1) * G) >> 32 | 1;
        k.shift[key_place<SIZE>(j)] = mix(u64(j + 1 + SPAN) * G);
    }
}
constexpr Tables TABLES = [] {
    Tables t{};
    fill<1>(t.keys[0]), fill<2>(t.keys[1]), fill<4>(t.keys[2]);
    return t;
}();

}  // namespace

extern HIDDEN const Keys KEYS[3] = {TABLES.keys[0], TABLES.keys[1], TABLES.keys[2]};

// ---- levels of the processor

extern HIDDEN Run *const level_baseline;
#if defined(__x86_64__)
extern HIDDEN Run *const level_v3;
extern HIDDEN Run *const level_v4;
#endif

namespace {

struct Level {
    const char *name;
    Run *run;
};

#if defined(__x86_64__)
struct Features {
    u32 ecx, ebx7, extended, saved;  // of cpuid's leaves 1, 7 and 0x80000001; which registers the system saves
};
Features features() {
    u32 a = 0, b = 0, c = 0, d = 0;
    Features f{};
    if (!__get_cpuid(1, &a, &b, &c, &d)) return f;
    f.ecx = c;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) f.ebx7 = b;
    if (__get_cpuid(0x80000001, &a, &b, &c, &d)) f.extended = c;
    if (f.ecx >> 27 & 1) __asm__("xgetbv" : "=a"(f.saved), "=d"(d) : "c"(0));
    return f;
}
constexpr u32 bits() { return 0; }
template <class... Rest> constexpr u32 bits(int one, Rest... rest) { return u32(1) << one | bits(rest...); }
constexpr bool has(u32 what, u32 wanted) { return (what & wanted) == wanted; }
bool has_v3(const Features &f) {  // avx2, fma, f16c, movbe, popcnt, sse4.2; bmi1, bmi2; lzcnt
    return has(f.ecx, bits(0, 9, 12, 13, 19, 20, 22, 23, 27, 28, 29)) && has(f.ebx7, bits(3, 5, 8)) &&
           has(f.extended, bits(0, 5)) && has(f.saved, bits(1, 2));
}
bool has_v4(const Features &f) {  // avx512f, dq, cd, bw, vl
    return has_v3(f) && has(f.ebx7, bits(16, 17, 28, 30, 31)) && has(f.saved, bits(5, 6, 7));
}
#endif

int levels(Level *found) {  // those that this processor can run, the best one last
    int count = 0;
    found[count++] = {"baseline", level_baseline};
#if defined(__x86_64__)
    Features f = features();
    if (has_v3(f)) found[count++] = {"x86-64-v3", level_v3};
    if (has_v4(f)) found[count++] = {"x86-64-v4", level_v4};
#endif
    return count;
}

Run *best() {
    Level found[3];
    return found[levels(found) - 1].run;
}

}  // namespace

extern HIDDEN Run *RUN;
Run *RUN = best();

// 64 bits of what lies at places spread over some bytes, of all of them if they are few.
u64 glance(const char *bytes, i64 size) {
    constexpr i64 PART = 64, PARTS = 8, FEW = 4096;
    u64 h[4] = {u64(size) * G, 1, 2, 3};  // four, so that no word waits for the one before it
    auto part = [&h](const char *at, i64 count) {
        auto take = [&h, at](i64 i, size_t bytes) __attribute__((always_inline)) {
            u64 word = 0, &own = h[i / 8 % 4];
            std::memcpy(&word, at + i, bytes);
            own = (own ^ word) * 0xBF58476D1CE4E5B9, own ^= own >> 32;
        };
        i64 i = 0;
        for (; i + 8 <= count; i += 8) take(i, 8);
        if (i < count) take(i, size_t(count - i));
    };
    if (size <= FEW) part(bytes, size);
    else for (i64 place = 0; place < PARTS; place++) part(bytes + (size - PART) * place / (PARTS - 1), PART);
    return mix(mix(mix(h[0]) + h[1]) + h[2] * G) + mix(h[3]);
}

namespace {

// ---- the module

PyObject *py_summarise(PyObject *, Arguments a, Py_ssize_t n) {
    return function<8>(a, n, 1, [](const u64 *w) {
        summarise(w[0], i64(w[1]), i64(w[2]), i64(w[3]), i64(w[4]), (const float *)w[5], (Row *)w[6], (Team *)w[7]);
        return i64(0);
    });
}
PyObject *py_merge(PyObject *, Arguments a, Py_ssize_t n) {
    return function<3>(a, n, 1, [](const u64 *w) { return merge((const Row *)w[0], i64(w[1]), (Row *)w[2]), i64(0); });
}
PyObject *py_summarise_strided(PyObject *, Arguments a, Py_ssize_t n) {
    return function<10>(a, n, 1, [](const u64 *w) {
        const Strided tensor{w[0], i64(w[5]), i64(w[6]), (const float *)w[7], i64(w[2]), (const i64 *)w[3], (const i64 *)w[3] + i64(w[2])};
        return i64(summarise_strided(tensor, (char *)w[4], (Row *)w[8], (Team *)w[9]));
    });
}
PyObject *py_glance(PyObject *, Arguments a, Py_ssize_t n) {
    return function<2>(a, n, KEPT, [](const u64 *w) { return i64(glance((const char *)w[0], i64(w[1]))); });
}
PyObject *py_columns(PyObject *, Arguments a, Py_ssize_t n) {
    return function<10>(a, n, KEPT, [](const u64 *w) {
        const auto seen = (const u8 *)w[4], status = (const u8 *)w[5];
        const Records all{(const Row *const *)w[0], i64(w[1]), (const u32 *)w[2], (const u64 *)w[3], seen, status, (const u32 *)w[6], i64(w[7])};
        return columns_of(all, (u32 *)w[8], (void *const *)w[9]);
    });
}
PyObject *py_levels(PyObject *, PyObject *) {
    Level found[3];
    int count = levels(found);
    PyObject *names = PyTuple_New(count);
    for (int i = 0; names && i < count; i++) {
        PyObject *name = PyUnicode_FromString(found[i].name);
        if (!name || PyTuple_SetItem(names, i, name)) return Py_DecRef(names), nullptr;
    }
    return names;
}
PyObject *py_use(PyObject *, PyObject *wanted) {
    Level found[3];
    for (int i = levels(found) - 1; i >= 0; i--)
        if (PyUnicode_Check(wanted) && PyUnicode_CompareWithASCIIString(wanted, found[i].name) == 0) {
            RUN = found[i].run;
            return Py_NewRef(Py_None);
        }
    return PyErr_Format(PyExc_ValueError, "not a level of this processor: %R", wanted);
}

PyMethodDef METHODS[] = {
    FAST(summarise), FAST(merge), FAST(summarise_strided), FAST(glance), FAST(columns),
    {"levels", py_levels, METH_NOARGS, nullptr}, {"use", py_use, METH_O, nullptr},
    {"intake", (PyCFunction)(void (*)())new_intake, METH_FASTCALL, nullptr},
    {"memory", new_memory, METH_O, nullptr}, {"step", new_step, METH_NOARGS, nullptr},
    {"lock", new_lock, METH_NOARGS, nullptr}, {"numbers", new_numbers, METH_NOARGS, nullptr},
    {"gradients", (PyCFunction)(void (*)())new_gradients, METH_FASTCALL, nullptr},
    {"share_sections", (PyCFunction)(void (*)())share_sections, METH_FASTCALL, nullptr},
    {"section_depth", section_depth, METH_NOARGS, nullptr},
    {"record_gradients", (PyCFunction)(void (*)())record_gradients, METH_FASTCALL, nullptr},
    {"record_state", (PyCFunction)(void (*)())record_state, METH_FASTCALL, nullptr},
    {"watch_generator", (PyCFunction)(void (*)())watch_generator, METH_FASTCALL, nullptr},
    {"generators_moved", generators_moved, METH_NOARGS, nullptr}, {"generator_state", generator_state, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_kernels", nullptr, -1, METHODS, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__kernels() {
    PyObject *module = PyModule_Create(&MODULE);
    PyObject *section = module ? new_section_type() : nullptr;
    if (!section || PyModule_AddObjectRef(module, "Section", section) || PyModule_AddStringConstant(module, "SOURCES", SOURCES))
        Py_DecRef(module), module = nullptr;
    return Py_DecRef(section), module;
}

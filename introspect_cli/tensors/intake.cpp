// The short way of an ordinary tensor: looked at and summarised in one call from Python.
//
// A step has thousands of tensors of some hundred elements, which the kernels are done with in half a microsecond;
// asking each for its type, device, layout, shape and address, one Python call after the other, took three. Torch's
// own C functions answer without Python (`tensor.cpp`). Large tensors go through `large.cpp`. Whatever is not plain,
// contiguous and in CPU memory, or has a shape that was not met before, is left to the long way in summarizer.py, which
// answers for all sorts of tensors.
#include "intake.h"
#include "large.h"
#include "lock.h"
#include "memory.h"
#include "numbers.h"
#include "objects.h"
#include "step.h"
#include "team.h"
#include "tensor.h"

#include <cstdlib>

namespace {

enum Held { TENSOR, PARAMETER, MODES, LAYOUTS, ADDRESSES, FUNCTIONS, TEAM, MEMORY, THREADS, SCRIPT, LOCK, HELD };
enum Into { STEP, STEP_LOCK, INTO };  // of a recorder

struct Intake {
    PyObject_HEAD
    const Functions *functions;
    PyObject *held[HELD], *into[INTO];
    i64 flags, limit;
    PyObject *sites, *slots;  // room for those of many tensors; null while it is used
    Objects tensors;          // the same
    Shapes shapes;
    Large large;

    void free() {
        for (PyObject *one : held) Py_DecRef(one);
        for (PyObject *one : into) Py_DecRef(one);
        Py_DecRef(sites), Py_DecRef(slots), tensors.free(), std::free(shapes.table);
    }
};

bool is_plain(const Intake *self, PyObject *tensor) {
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    return type == self->held[TENSOR] || type == self->held[PARAMETER];
}

// What a tensor is, contiguous in CPU memory; false, without an exception, if it goes the long way.
bool look(Intake *self, PyObject *tensor, Look &found) {
    return is_plain(self, tensor) && look_by_handle(self->functions, tensor, found);
}

// Whether no mode of the script's would see what is asked by way of Python: none sees those that torch's C functions answer.
bool unseen(Intake *self) { return integer(PyObject_CallNoArgs(self->held[MODES])) == 0; }

// Whether the elements are there, as they are: no lazy negation, and a storage that nobody has freed under the tensor.
bool is_there(const Look &found) {
    if (found.negated) return false;
    const i64 size = SIZES[found.code];
    bool nowhere = found.address == u64(found.offset * size);  // a storage without memory: functionalised tensors have one
    return (found.offset + found.count) * size <= found.bytes && !((nowhere || !found.address) && found.count);
}

// Room for numbers, which stays for the next time.
struct Room {
    PyObject *&home, *numbers;

    explicit Room(PyObject *&place) : home(place), numbers(place ? place : new_numbers(nullptr, nullptr)) { home = nullptr; }
    ~Room() {
        if (numbers) clear_numbers(numbers);
        if (home) Py_DecRef(numbers);  // somebody else has put other room back meanwhile
        else home = numbers;
    }
};

// Where the row of a slot is. Rows lie in blocks, so only the address of the first of each is asked for.
u64 row_of(const Intake *self, Py_ssize_t slot) {
    constexpr Py_ssize_t BLOCK = 1024;  // ROWS of rows.py
    return PyLong_AsUnsignedLongLongMask(PyList_GetItem(self->held[ADDRESSES], slot / BLOCK * BLOCK)) + u64(slot % BLOCK) * sizeof(Row);
}

// The slot that a tensor's summary is in; -1 if it goes the long way, -2 with an exception.
// With `later`, large tensors that have to be summarised are put there, for their slots. `seen` is what a look at the tensor told,
// where it was looked at before.
i64 add_one(Intake *self, PyObject *tensor, Later *later = nullptr, const Look *seen = nullptr) {
    Look found;
    Py_ssize_t slot = size_of_numbers(self->held[LAYOUTS]);
    if (slot >= PyList_Size(self->held[ADDRESSES]) || !self->shapes.used) return -1;
    if (seen) found = *seen;
    else if (!look(self, tensor, found)) return -1;
    const i64 number = find(self->shapes, found.shape)->layout;
    if (number < 0 || !is_there(found)) return -1;
    const u64 row = row_of(self, slot);
    if (found.count < self->limit) {
        Row own;  // of which nothing but the checksum is looked at where nothing else is wanted: three lines of memory less each
        Row *to = self->flags ? (Row *)row : &own;
        RUN((const void *)found.address, found.count, 0, found.code, int(self->flags), nullptr, to);
        if (to == &own) ((Row *)row)->raw = own.raw;
    } else if (!summarise_large(self->large, found, self->flags, (Row *)row, later)) {
        return -1;
    }
    return add_number(self->held[LAYOUTS], number) ? i64(slot) : -2;
}

PyObject *add(PyObject *object, PyObject *tensor) {
    const i64 slot = add_one((Intake *)object, tensor);
    return slot == -2 ? nullptr : PyLong_FromLongLong(slot);
}

PyObject *set_into(PyObject *object, PyObject *const *arguments, Py_ssize_t given) {
    Intake *self = (Intake *)object;
    if (given != INTO && given) return PyErr_Format(PyExc_TypeError, "%d arguments or none wanted, %zd given", INTO, given);
    if (given && !(is_step(arguments[STEP]) && is_lock(arguments[STEP_LOCK]))) return PyErr_Format(PyExc_TypeError, "a step and a lock wanted");
    for (int i = 0; i < INTO; i++) {
        PyObject *before = self->into[i];
        self->into[i] = given ? Py_NewRef(arguments[i]) : nullptr;
        Py_DecRef(before);
    }
    return Py_NewRef(Py_None);
}

// `record_at` for who has the recorder's lock.
i64 note_one(Intake *self, PyObject *const *sites, Py_ssize_t count, PyObject *tensor) {
    constexpr Py_ssize_t FEW = 8;
    i64 own[FEW];
    if (count > FEW) return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        own[i] = PyLong_AsLongLong(sites[i]);
        if (own[i] < 0 && PyErr_Occurred()) return -2;
        if (times_of(self->into[STEP], own[i])) return -1;  // it came before in this step
        for (Py_ssize_t j = 0; j < i; j++)
            if (own[i] == own[j]) return -1;
    }
    const i64 slot = add_one(self, tensor);
    for (Py_ssize_t i = 0; slot >= 0 && i < count; i++)
        if (!note(self->into[STEP], own[i], slot)) return -2;
    return slot;
}

PyObject *record(PyObject *object, PyObject *const *arguments, Py_ssize_t given) {
    if (given != 2) return PyErr_Format(PyExc_TypeError, "a site and a tensor wanted");
    i64 slot = record_at(object, arguments, 1, arguments[1]);
    return slot == -2 ? nullptr : PyLong_FromLongLong(slot);
}

// Tensors of a list that were looked at before their turn, so that their elements are on the way from memory by then. What was
// seen is good as long as nobody else runs, so it is forgotten after each tensor that is not small.
struct Ahead {
    static constexpr Py_ssize_t SOON = 2, PLACES = 4;
    Look looks[PLACES];
    bool seen[PLACES] = {};

    const Look *at(Py_ssize_t i) const { return seen[i % PLACES] ? &looks[i % PLACES] : nullptr; }
    void look_at(Intake *self, const Objects &tensors, Py_ssize_t i) {
        constexpr i64 LINE = 64, LINES = 8;
        Look &found = looks[i % PLACES];
        if (!(seen[i % PLACES] = i < tensors.count && look(self, tensors.items[i], found))) return;
        const i64 bytes = least(found.count * SIZES[found.code], LINES * LINE);
        for (i64 at = 0; at < bytes; at += LINE) __builtin_prefetch((const char *)found.address + at);
    }
    void begin(Intake *self, const Objects &tensors, Py_ssize_t from) {  // with nothing of what was seen before
        for (Py_ssize_t i = from; i < from + SOON; i++) look_at(self, tensors, i);
    }
};

// Has `one` do something with each tensor, in order, and with what a look at it told, if there was one; false with an exception,
// as `one` says.
template <class One> bool with_each(Intake *self, const Objects &tensors, One one) {
    constexpr Py_ssize_t AHEAD = 8, STORAGE = 5, AT_ONCE = 1024;  // small tensors without giving the interpreter's lock away: a millisecond
    Ahead ahead;
    ahead.begin(self, tensors, 0);
    for (Py_ssize_t i = 0; i < tensors.count; i++) {
        PyObject *next = i + AHEAD < tensors.count ? tensors.items[i + AHEAD] : nullptr;
        if (next && is_plain(self, next)) fetch(self->functions, next);
        PyObject *nearer = i + STORAGE < tensors.count ? tensors.items[i + STORAGE] : nullptr;
        if (nearer && is_plain(self, nearer)) fetch_storage(self->functions, nearer);
        ahead.look_at(self, tensors, i + Ahead::SOON);
        const Look *seen = ahead.at(i);
        const bool is_small = seen && seen->count < self->limit;
        if (!one(tensors.items[i], seen)) return false;
        const bool pauses = i % AT_ONCE == AT_ONCE - 1;
        if (pauses) {
            Py_BEGIN_ALLOW_THREADS
            Py_END_ALLOW_THREADS
        }
        if (!is_small || pauses) ahead.begin(self, tensors, i + 1);
    }
    return true;
}

// The slot of each tensor, -1 for those that go the long way, into numbers; false with an exception. It needs the summarizer's lock.
bool put_slots(Intake *self, const Objects &tensors, PyObject *slots) {
    Later later{threads_of(self->large)};
    const bool done = with_each(self, tensors, [&](PyObject *tensor, const Look *seen) {
        const i64 slot = add_one(self, tensor, &later, seen);
        return slot != -2 && add_number(slots, slot);
    });
    if (done) summarise_later(self->large, later, self->flags);
    return done;
}

PyObject *add_all(PyObject *object, PyObject *list) {
    Intake *self = (Intake *)object;
    if (!PyList_Check(list)) return PyErr_Format(PyExc_TypeError, "a list wanted");
    const Room slots(self->slots);
    Taken tensors(self->tensors);
    const bool done = slots.numbers && tensors.add_list(list) && put_slots(self, tensors, slots.numbers);
    return done ? PySequence_List(slots.numbers) : nullptr;
}

// Takes sites, if there are numbers of that many and none of them has been recorded in this step; false, without an exception,
// if not.
bool take_new(PyObject *step, PyObject *sites, Py_ssize_t count, PyObject *numbers) {
    const bool taken = is_numbers(sites) ? add_numbers(numbers, first_of_numbers(sites), size_of_numbers(sites))
                                         : PyList_Check(sites) && add_list(numbers, sites);
    bool done = taken && size_of_numbers(numbers) == count;
    const i64 *all = first_of_numbers(numbers);
    for (Py_ssize_t i = 0; done && i < count; i++) done = all[i] >= 0 && !times_of(step, all[i]);
    return PyErr_Clear(), done;
}

// Notes slots at new sites, as the recorder does: 1; 0, and nothing is done, where one of the sites or slots is not like the
// others; -1 with an exception.
int note_all(Intake *self, PyObject *sites, PyObject *slots) {
    const i64 *every = first_of_numbers(slots);
    for (Py_ssize_t i = 0; i < size_of_numbers(sites); i++)
        if (every[i] < 0) return 0;
    return note_once(self->into[STEP], first_of_numbers(sites), every, size_of_numbers(sites));
}

PyObject *record_all(PyObject *object, PyObject *const *arguments, Py_ssize_t given) {
    Intake *self = (Intake *)object;
    if (given != 2) return PyErr_Format(PyExc_TypeError, "sites and tensors wanted");
    if (!PyList_Check(arguments[1])) return Py_NewRef(Py_False);
    Taken tensors(self->tensors);
    return tensors.add_list(arguments[1]) ? record_many(object, arguments[0], tensors) : nullptr;
}

PyObject *VERSION = nullptr;  // a name

// Tells whether a tensor was written to or moved, in 64 bits: count of writes, address, a glance at its memory. 0: the long way.
u64 mark_of(Intake *self, PyObject *tensor, const Look *seen) {
    Look found;
    if (seen) found = *seen;
    else if (!look(self, tensor, found)) return 0;
    const i64 writes = integer(PyObject_GetAttr(tensor, VERSION));  // -1 where torch does not count them
    if (writes < 0 || !is_there(found)) return 0;
    return mix(mix(found.address ^ G) + u64(writes)) ^ glance((const char *)found.address, found.count * SIZES[found.code]);
}

// Puts the marks of tensors into a dictionary, by identity, or looks for them there: a list of the tensors that go the long way, and of
// those with another mark.
template <bool KEEPS> PyObject *mark(PyObject *object, PyObject *const *given, Py_ssize_t count) {
    if (count != 2 || !PyList_Check(given[0]) || !PyDict_Check(given[1])) return PyErr_Format(PyExc_TypeError, "a list and a dictionary wanted");
    Intake *self = (Intake *)object;
    Taken tensors(self->tensors);
    PyObject *others = PyList_New(0), *marks = given[1];
    const bool may = unseen(self);
    const bool done = others && tensors.add_list(given[0]) && with_each(self, tensors, [=](PyObject *tensor, const Look *seen) {
        const u64 own = may ? mark_of(self, tensor, seen) : 0;
        if (!own) return !PyList_Append(others, tensor);
        PyObject *key = PyLong_FromVoidPtr(tensor), *made = key && KEEPS ? PyLong_FromUnsignedLongLong(own) : nullptr;
        PyObject *known = key && !KEEPS ? PyDict_GetItemWithError(marks, key) : nullptr;
        const bool same = known && PyLong_Check(known) && PyLong_AsUnsignedLongLongMask(known) == own;
        const bool taken = KEEPS ? made && !PyDict_SetItem(marks, key, made) : !PyErr_Occurred() && (same || !PyList_Append(others, tensor));
        return Py_DecRef(key), Py_DecRef(made), taken;
    });
    if (!done) Py_DecRef(others), others = nullptr;
    return others;
}

PyObject *learn(PyObject *object, PyObject *const *arguments, Py_ssize_t given) {
    Intake *self = (Intake *)object;
    Look found;
    if (given != 2) return PyErr_Format(PyExc_TypeError, "a tensor and its layout wanted");
    i64 layout = PyLong_AsLongLong(arguments[1]);
    if (layout == -1 && PyErr_Occurred()) return nullptr;
    if (look(self, arguments[0], found)) {
        found.shape.layout = layout;
        if (!put(self->shapes, found.shape)) return PyErr_NoMemory();
    }
    return Py_NewRef(Py_None);
}

PyMethodDef METHODS[] = {
    {"add", add, METH_O, nullptr},
    {"add_all", add_all, METH_O, nullptr},
    {"keep_marks", (PyCFunction)(void (*)())mark<true>, METH_FASTCALL, nullptr},
    {"unlike", (PyCFunction)(void (*)())mark<false>, METH_FASTCALL, nullptr},
    {"record_all", (PyCFunction)(void (*)())record_all, METH_FASTCALL, nullptr},
    {"into", (PyCFunction)(void (*)())set_into, METH_FASTCALL, nullptr},
    {"record", (PyCFunction)(void (*)())record, METH_FASTCALL, nullptr},
    {"learn", (PyCFunction)(void (*)())learn, METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot SLOTS[] = {{Py_tp_dealloc, (void *)forget<Intake>}, {Py_tp_methods, METHODS}, {0, nullptr}};
Class CLASS{"introspect_cli.tensors._kernels.Intake", sizeof(Intake), SLOTS};

}  // namespace

i64 record_at(PyObject *object, PyObject *const *sites, Py_ssize_t count, PyObject *tensor) {
    Intake *self = (Intake *)object;
    // Waiting for the lock, a thread may be interrupted by a handler of the script's: not here, where nothing guards.
    PyObject *lock = self->into[STEP_LOCK];
    if (!lock || !try_take(lock)) return -1;
    Py_IncRef(lock);
    const i64 slot = note_one(self, sites, count, tensor);
    give_back(lock);
    Py_DecRef(lock);
    return slot;
}

PyObject *record_many(PyObject *object, PyObject *all_sites, const Objects &tensors) {
    Intake *self = (Intake *)object;
    if (!self->into[STEP]) return Py_NewRef(Py_False);
    const Room sites(self->sites), slots(self->slots);
    if (!sites.numbers || !slots.numbers) return nullptr;
    if (size_of_numbers(self->held[LAYOUTS]) + tensors.count > PyList_Size(self->held[ADDRESSES]) ||
        !take_new(self->into[STEP], all_sites, tensors.count, sites.numbers))
        return Py_NewRef(Py_False);
    if (!try_take(self->large.lock)) return Py_NewRef(Py_False);
    const bool done = put_slots(self, tensors, slots.numbers);
    const int noted = done ? note_all(self, sites.numbers, slots.numbers) : -1;
    give_back(self->large.lock);
    if (done && !noted) return PySequence_List(slots.numbers);
    return noted < 0 ? nullptr : Py_NewRef(Py_True);
}

bool is_seen_by_nobody(PyObject *object, PyObject *tensor) {
    Intake *self = (Intake *)object;
    return is_plain(self, tensor) && unseen(self);
}

Objects &objects_of(PyObject *object) { return ((Intake *)object)->tensors; }

bool is_intake(PyObject *object) { return CLASS.has(object); }

PyObject *new_intake(PyObject *, PyObject *const *arguments, Py_ssize_t given) {
    constexpr int NUMBERS = 3;  // arguments that are not held
    if (given != NUMBERS + HELD) return PyErr_Format(PyExc_TypeError, "%d arguments wanted, %zd given", NUMBERS + HELD, given);
    i64 flags = PyLong_AsLongLong(arguments[0]), limit = PyLong_AsLongLong(arguments[1]);
    Team *team = (Team *)PyLong_AsUnsignedLongLongMask(arguments[2]);
    if (PyErr_Occurred()) return nullptr;
    if (!is_numbers(arguments[NUMBERS + LAYOUTS]) || !PyList_Check(arguments[NUMBERS + ADDRESSES]) ||
        !is_memory(arguments[NUMBERS + MEMORY]) || !is_lock(arguments[NUMBERS + LOCK]))
        return PyErr_Format(PyExc_TypeError, "numbers, a list, a memory and a lock wanted");
    char *bytes = PyBytes_AsString(arguments[NUMBERS + FUNCTIONS]);
    if (!bytes) return nullptr;
    if (PyBytes_Size(arguments[NUMBERS + FUNCTIONS]) != sizeof(Functions))
        return PyErr_Format(PyExc_ValueError, "%d bytes of addresses wanted", int(sizeof(Functions)));
    if (!VERSION && !(VERSION = PyUnicode_InternFromString("_version"))) return nullptr;
    Intake *self = CLASS.make<Intake>();
    if (!self) return nullptr;
    self->functions = (const Functions *)bytes, self->flags = flags, self->limit = limit;
    for (int i = 0; i < HELD; i++) self->held[i] = Py_NewRef(arguments[NUMBERS + i]);
    PyObject **held = self->held;
    self->large = {team, held[MEMORY], held[THREADS], held[SCRIPT], held[LOCK]};
    return (PyObject *)self;
}

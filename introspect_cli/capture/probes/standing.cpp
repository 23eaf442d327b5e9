// Whether modules hold what they held, asked of all of them in each step: their plain attributes, their parameters and buffers,
// the modules inside them. Python asks it in a microsecond for each thing; here it is a look into each dictionary.
//
// Values are compared by identity. Plain ones are held, so that no other object gets theirs; tensors and modules are not.
#include "probes.h"

#include "objects.h"

#include <cstdlib>

namespace {

enum How { IS, SIZE, ENTRIES };

struct Place {  // something in the dictionary of a module, by name
    PyObject *name;
    How how;
    i64 size;          // of a dictionary
    Py_ssize_t first;  // the first of its entries
    PyObject *value;   // what it is; of a dictionary, null
};
struct Entry {
    PyObject *key, *value;  // the second is not held
    bool first;             // whether no entry before has that value
};
struct Owner {
    PyObject *reference;  // to a module, weak
    i64 length;           // of its dictionary, -1 where that does not count
    Py_ssize_t places;    // how many of them are its
};

template <class T> struct Many {
    T *items = nullptr;
    Py_ssize_t count = 0, room = 0;

    bool add(const T &one) {
        if (count == room) {
            const Py_ssize_t more = room ? 2 * room : 64;
            T *all = (T *)std::realloc(items, size_t(more) * sizeof(T));
            if (!all) return false;
            items = all, room = more;
        }
        items[count++] = one;
        return true;
    }
};

struct Standing {
    PyObject_HEAD
    Many<Owner> owners;
    Many<Place> places;
    Many<Entry> entries;
    Py_ssize_t compared;  // entries of which it is known whether they are the first
    bool is_lost;         // whether something could not be taken down: then nothing is what it was
};

bool is_dictionary(PyObject *object) { return object && (PyObject *)Py_TYPE(object) == (PyObject *)&PyDict_Type; }

int visit_all(PyObject *object, visitproc visit, void *arg) {
    Standing *self = (Standing *)object;
    Py_VISIT(Py_TYPE(object));
    for (Py_ssize_t i = 0; i < self->owners.count; i++) Py_VISIT(self->owners.items[i].reference);
    for (Py_ssize_t i = 0; i < self->places.count; i++) Py_VISIT(self->places.items[i].value);
    return 0;
}
int clear_all(PyObject *object) {
    Standing *self = (Standing *)object;
    const Standing was = *self;
    self->owners = {}, self->places = {}, self->entries = {};
    for (Py_ssize_t i = 0; i < was.owners.count; i++) Py_DecRef(was.owners.items[i].reference);
    for (Py_ssize_t i = 0; i < was.places.count; i++) Py_DecRef(was.places.items[i].name), Py_DecRef(was.places.items[i].value);
    for (Py_ssize_t i = 0; i < was.entries.count; i++) Py_DecRef(was.entries.items[i].key);
    std::free(was.owners.items), std::free(was.places.items), std::free(was.entries.items);
    return 0;
}
void free_all(PyObject *object) {
    PyObject *type = (PyObject *)Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear_all(object);
    PyObject_GC_Del(object);
    Py_DecRef(type);
}

// ---- taking it down

bool note_entries(Standing *self, PyObject *dictionary) {
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(dictionary, &at, &key, &value);)
        if (!self->entries.add({Py_NewRef(key), value, true})) return Py_DecRef(key), false;
    return true;
}

bool note_place(Standing *self, PyObject *own, PyObject *name, How how) {
    PyObject *value = PyDict_GetItemWithError(own, name);
    if (!value || (how == ENTRIES && !is_dictionary(value)) || (how == SIZE && !PyDict_Check(value))) return false;
    const i64 size = how == IS ? 0 : i64(PyDict_Size(value));
    if (!self->places.add({Py_NewRef(name), how, size, self->entries.count, how == IS ? Py_NewRef(value) : nullptr}))
        return Py_DecRef(name), false;
    return how != ENTRIES || note_entries(self, value);
}

// One module: a weak reference, the length of its dictionary or -1, and of its names a tuple for each of `How`.
bool note_owner(Standing *self, PyObject *const *given) {
    PyObject *module = PyWeakref_Check(given[0]) ? PyWeakref_GetObject(given[0]) : nullptr;
    PyObject *own = module && module != Py_None ? PyObject_GenericGetDict(module, nullptr) : nullptr;
    if (!own) return false;
    const Py_ssize_t before = self->places.count;
    bool done = PyDict_Check(own);
    for (int how = IS; done && how <= ENTRIES; how++) {
        PyObject *names = given[how + 2];
        done = PyTuple_Check(names);
        for (Py_ssize_t i = 0; done && i < PyTuple_Size(names); i++) done = note_place(self, own, PyTuple_GetItem(names, i), How(how));
    }
    Py_DecRef(own);
    const i64 length = PyLong_AsLongLong(given[1]);
    return done && !PyErr_Occurred() && self->owners.add({Py_NewRef(given[0]), length, self->places.count - before});
}

PyObject *py_add(PyObject *object, PyObject *const *given, Py_ssize_t count) {
    constexpr int PARTS = 5;
    if (count != PARTS) return PyErr_Format(PyExc_TypeError, "%d arguments wanted, %zd given", PARTS, count);
    Standing *self = (Standing *)object;
    self->is_lost |= !note_owner(self, given);
    PyErr_Clear();
    return Py_NewRef(Py_None);
}

// Which values come for the first time; false without memory.
bool note_firsts(Standing *self) {
    PyObject *seen = PySet_New(nullptr);
    bool done = seen;
    for (Py_ssize_t i = 0; done && i < self->entries.count; i++) {
        Entry &entry = self->entries.items[i];
        PyObject *key = PyLong_FromVoidPtr(entry.value);
        const int known = key ? PySet_Contains(seen, key) : -1;
        entry.first = known == 0 && entry.value != Py_None;
        done = known >= 0 && PySet_Add(seen, key) == 0;
        if (key) Py_DecRef(key);
    }
    if (seen) Py_DecRef(seen);
    if (done) self->compared = self->entries.count;
    return done || (PyErr_Clear(), false);
}

// ---- asking

bool has_entries(const Standing *self, const Place &place, PyObject *dictionary) {
    const Entry *entry = self->entries.items + place.first;
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(dictionary, &at, &key, &value); entry++)
        if (entry->key != key || entry->value != value) return false;
    return true;
}

bool stands(const Standing *self, const Place &place, PyObject *own) {
    PyObject *value = PyDict_GetItemWithError(own, place.name);
    if (!value || place.how == IS) return value && value == place.value;
    if (place.how == SIZE ? !PyDict_Check(value) : !is_dictionary(value)) return false;
    return PyDict_Size(value) == place.size && (place.how == SIZE || has_entries(self, place, value));
}

bool is_among(PyObject *name, PyObject *names) {
    bool found = false;
    for (Py_ssize_t i = 0; !found && i < PyTuple_Size(names); i++) found = PyTuple_GetItem(names, i) == name;
    return found;
}

// Whether everything stands; of dictionaries with entries, those of some names, if there are any.
bool holds(const Standing *self, PyObject *names = nullptr) {
    const Place *place = self->places.items;
    bool same = self->owners.count && !self->is_lost;
    for (Py_ssize_t i = 0; same && i < self->owners.count; i++) {
        const Owner &owner = self->owners.items[i];
        PyObject *module = PyWeakref_GetObject(owner.reference);
        PyObject *own = module && module != Py_None ? PyObject_GenericGetDict(module, nullptr) : nullptr;
        same = own && PyDict_Check(own) && (owner.length < 0 || PyDict_Size(own) == owner.length);
        for (const Place *end = place + owner.places; same && place < end; place++)
            same = (names && place->how == ENTRIES && !is_among(place->name, names)) || stands(self, *place, own);
        if (own) Py_DecRef(own);
    }
    PyErr_Clear();
    return same;
}

PyObject *py_holds(PyObject *object, PyObject *) { return PyBool_FromLong(holds((Standing *)object)); }

// What the dictionaries of some names have now, each value once; None where anything in them is not what it was, or anything at all
// if the whole is asked for.
PyObject *values(PyObject *object, PyObject *const *given, Py_ssize_t count) {
    if (count != 2 || !PyTuple_Check(given[0])) return PyErr_Format(PyExc_TypeError, "a tuple of names and a flag wanted");
    Objects all;
    PyObject *list = take_standing(object, given[0], given[1] == Py_True, all) ? PyList_New(all.count) : Py_NewRef(Py_None);
    for (Py_ssize_t i = 0; list && list != Py_None && i < all.count; i++) PyList_SetItem(list, i, Py_NewRef(all.items[i]));
    all.free();
    return list;
}

PyMethodDef METHODS[] = {
    {"add", (PyCFunction)(void (*)())py_add, METH_FASTCALL, nullptr},
    {"holds", py_holds, METH_NOARGS, nullptr},
    {"values", (PyCFunction)(void (*)())values, METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot SLOTS[] = {{Py_tp_dealloc, (void *)free_all}, {Py_tp_traverse, (void *)visit_all}, {Py_tp_clear, (void *)clear_all},
                       {Py_tp_methods, METHODS}, {0, nullptr}};
PyType_Spec SPEC = {
    "introspect_cli.tensors._kernels.Standing", sizeof(Standing), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, SLOTS,
};
PyObject *TYPE = nullptr;

}  // namespace

PyObject *new_standing(PyObject *, PyObject *) {
    if (!TYPE && !(TYPE = PyType_FromSpec(&SPEC))) return nullptr;
    Standing *self = PyObject_GC_New(Standing, (PyTypeObject *)TYPE);
    if (!self) return nullptr;
    self->owners = {}, self->places = {}, self->entries = {};
    self->compared = 0, self->is_lost = false;
    PyObject_GC_Track((PyObject *)self);
    return (PyObject *)self;
}

bool take_standing(PyObject *object, PyObject *names, bool whole, Objects &into) {
    if ((PyObject *)Py_TYPE(object) != TYPE || !PyTuple_Check(names)) return false;
    Standing *self = (Standing *)object;
    bool same = holds(self, whole ? nullptr : names) && (self->compared == self->entries.count || note_firsts(self));
    for (const Place *place = self->places.items, *end = place + self->places.count; same && place < end; place++) {
        const bool wanted = place->how == ENTRIES && is_among(place->name, names);
        const Entry *entry = self->entries.items + place->first, *last = entry + (wanted ? place->size : 0);
        for (; same && entry < last; entry++) same = !entry->first || into.add(entry->value);
    }
    return PyErr_Clear(), same;
}

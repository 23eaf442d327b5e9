// Rows of this step and the last, by the address of the elements they are of.
//
// Only rows used in a step are kept for the next: they are copied together, since the step's own are about to be filled anew.
#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <utility>

namespace {

struct Step {  // what one step knows, in the order in which it came
    Known *known = nullptr;
    i64 count = 0, room = 0;
    i64 *places = nullptr;  // a hash table of open places, half full at most: which of the known, -1 for none
    u64 size = 0;

    i64 *place_of(u64 address) const {  // where it is or could be
        for (u64 at = mix(address);; at++) {
            i64 *place = places + at % size;
            if (*place < 0 || known[*place].address == address) return place;
        }
    }
    const Known *find(u64 address) const {
        const i64 place = count ? *place_of(address) : -1;
        return place < 0 ? nullptr : known + place;
    }
    void clear() {
        if (count) std::memset(places, -1, size * sizeof *places);
        count = 0;
    }
    bool grow() {
        const i64 more = room ? 2 * room : 64;
        Known *all = (Known *)std::realloc(known, size_t(more) * sizeof *all);
        if (all) known = all;
        i64 *anew = all ? (i64 *)std::realloc(places, size_t(2 * more) * sizeof *anew) : nullptr;
        if (!anew) return false;
        places = anew, size = u64(2 * more), room = more;
        std::memset(places, -1, size * sizeof *places);
        for (i64 i = 0; i < count; i++) *place_of(known[i].address) = i;
        return true;
    }
    void put(const Known &one) {
        if (count == room && !grow()) return;
        i64 *place = place_of(one.address);
        if (*place < 0) *place = count++;
        known[*place] = one;
    }
    void free() {
        std::free(known), std::free(places);
        *this = {};
    }
};

struct Memory {
    PyObject_HEAD
    i64 limit;  // rows kept from one step to the next, at most
    Step now, before;
    Row *kept, *spare;  // the rows of the last step; room for those of this one
    i64 kept_room, spare_room;

    void free() {
        now.free(), before.free();
        std::free(kept), std::free(spare);
        kept = spare = nullptr, kept_room = spare_room = 0;
    }
};

// Keeps what this step used for the next one.
PyObject *turn(PyObject *object, PyObject *) {
    Memory *self = (Memory *)object;
    const i64 count = least(self->now.count, self->limit);
    self->before.clear();
    if (count > self->spare_room) {
        std::free(self->spare);
        self->spare = (Row *)std::malloc(size_t(count) * sizeof(Row));
        self->spare_room = self->spare ? count : 0;
    }
    for (i64 i = 0; i < count && self->spare; i++) {
        Known one = self->now.known[i];
        self->spare[i] = *one.row;
        one.row = self->spare + i;
        self->before.put(one);
    }
    std::swap(self->kept, self->spare), std::swap(self->kept_room, self->spare_room);
    return self->now.clear(), Py_NewRef(Py_None);
}

PyObject *clear(PyObject *object, PyObject *) { return ((Memory *)object)->free(), Py_NewRef(Py_None); }

PyMethodDef METHODS[] = {
    {"turn", turn, METH_NOARGS, nullptr}, {"clear", clear, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot SLOTS[] = {{Py_tp_dealloc, (void *)forget<Memory>}, {Py_tp_methods, METHODS}, {0, nullptr}};
Class CLASS{"introspect_cli.tensors._kernels.Memory", sizeof(Memory), SLOTS};

}  // namespace

bool is_memory(PyObject *object) { return CLASS.has(object); }

const Row *find_known(PyObject *memory, u64 address, i64 kind, i64 count) {
    Memory *self = (Memory *)memory;
    const Known *known = self->now.find(address);
    const bool is_new = !known;
    if (is_new) known = self->before.find(address);
    if (!known || known->kind != kind || known->count != count) return nullptr;
    const Known found = *known;
    if (is_new) self->now.put(found);
    return found.row;
}

void note_known(PyObject *memory, const Known &known) { ((Memory *)memory)->now.put(known); }

PyObject *new_memory(PyObject *, PyObject *limit) {
    const i64 rows = PyLong_AsLongLong(limit);
    Memory *self = PyErr_Occurred() ? nullptr : CLASS.make<Memory>();
    if (self) self->limit = rows;
    return (PyObject *)self;
}

// The hooks of a step: by the tensor that each is on, and in dictionaries as nodes of autograd take them.
//
// A dictionary and a list of Python's ask for more room ten times while they grow to hundreds, and do so again in each step. Each
// time, the system's allocator tidies up the small pieces that torch has just given back, and is slow to hand them out again. What is
// here keeps its room, and its dictionaries: every 700 containers that are made and live on cost a round of the garbage collector.
#include "probes.h"

#include <cstdlib>

namespace {

constexpr Py_ssize_t KEPT = 8192;  // dictionaries kept from one step to the next, at most: 3 MB

struct Place {  // of a table of open places, half full at most
    u64 tensor;
    PyObject *hook;  // null where the place is free
};
struct Hooks {
    PyObject_HEAD
    Place *places;
    u64 size, used;
    PyObject **dictionaries;
    Py_ssize_t count, room, taken;  // taken in this step: the first
};
PyObject *TYPE = nullptr;

Place *place_of(const Hooks *self, u64 tensor) {  // where it is or could be; there must be places
    for (u64 at = mix(tensor);; at++) {
        Place *place = self->places + at % self->size;
        if (!place->hook || place->tensor == tensor) return place;
    }
}

bool grow(Hooks *self) {
    Hooks more = *self;
    more.size = self->size ? 2 * self->size : 1024;
    more.places = (Place *)std::calloc(more.size, sizeof(Place));
    if (!more.places) return PyErr_NoMemory(), false;
    for (u64 at = 0; at < self->size; at++)
        if (self->places[at].hook) *place_of(&more, self->places[at].tensor) = self->places[at];
    std::free(self->places);
    self->places = more.places, self->size = more.size;
    return true;
}

void cut(Hooks *self, Py_ssize_t count) {
    while (self->count > count) Py_DecRef(self->dictionaries[--self->count]);
}

void end_step(Hooks *self) {
    for (u64 at = 0; self->used && at < self->size; at++)
        if (PyObject *hook = self->places[at].hook) self->places[at].hook = nullptr, self->used--, Py_DecRef(hook);
    self->taken = 0;
    cut(self, KEPT);
}

PyObject *get(PyObject *object, PyObject *tensor) {
    PyObject *hook = hook_of(object, PyLong_AsUnsignedLongLongMask(tensor));
    return PyErr_Occurred() ? nullptr : Py_NewRef(hook ? hook : Py_None);
}
int assign(PyObject *object, PyObject *tensor, PyObject *hook) {
    const u64 key = PyLong_AsUnsignedLongLongMask(tensor);
    if (PyErr_Occurred() || !hook) return PyErr_Occurred() ? -1 : (PyErr_Format(PyExc_TypeError, "a hook wanted"), -1);
    return set_hook(object, key, hook) ? 0 : -1;
}
PyObject *clear(PyObject *object, PyObject *) { return end_step((Hooks *)object), Py_NewRef(Py_None); }
PyObject *forget(PyObject *object, PyObject *) {
    end_step((Hooks *)object), cut((Hooks *)object, 0);
    return Py_NewRef(Py_None);
}

void free_all(PyObject *object) {
    Hooks *self = (Hooks *)object;
    PyObject *type = (PyObject *)Py_TYPE(object);
    end_step(self), cut(self, 0);
    std::free(self->places), std::free(self->dictionaries);
    PyObject_Free(object);
    Py_DecRef(type);
}

PyMethodDef METHODS[] = {
    {"get", get, METH_O, nullptr}, {"clear", clear, METH_NOARGS, nullptr}, {"forget", forget, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot SLOTS[] = {
    {Py_tp_dealloc, (void *)free_all}, {Py_tp_methods, METHODS}, {Py_mp_ass_subscript, (void *)assign}, {0, nullptr}};
PyType_Spec SPEC = {
    "introspect_cli.tensors._kernels.Hooks", sizeof(Hooks), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, SLOTS,
};

}  // namespace

bool is_hooks(PyObject *object) { return TYPE && (PyObject *)Py_TYPE(object) == TYPE; }

PyObject *hook_of(PyObject *object, u64 tensor) {
    const Hooks *self = (Hooks *)object;
    return self->size ? place_of(self, tensor)->hook : nullptr;
}

bool set_hook(PyObject *object, u64 tensor, PyObject *hook) {
    Hooks *self = (Hooks *)object;
    if (2 * self->used >= self->size && !grow(self)) return false;
    Place *place = place_of(self, tensor);
    PyObject *before = place->hook;
    *place = {tensor, Py_NewRef(hook)};
    if (before) Py_DecRef(before);
    else self->used++;
    return true;
}

PyObject *next_dictionary(PyObject *object) {
    Hooks *self = (Hooks *)object;
    return self->taken < self->count ? self->dictionaries[self->taken] : nullptr;
}

bool take_dictionary(PyObject *object, PyObject *dictionary) {
    Hooks *self = (Hooks *)object;
    if (self->taken == self->room) {
        const Py_ssize_t room = most<Py_ssize_t>(2 * self->room, 1024);
        PyObject **all = (PyObject **)std::realloc(self->dictionaries, size_t(room) * sizeof *all);
        if (!all) return PyErr_NoMemory(), false;
        self->dictionaries = all, self->room = room;
    }
    PyObject *before = self->taken < self->count ? self->dictionaries[self->taken] : nullptr;
    self->dictionaries[self->taken++] = Py_NewRef(dictionary);
    if (before) Py_DecRef(before);
    else self->count++;
    return true;
}

PyObject *new_hooks(PyObject *, PyObject *) {
    if (!TYPE && !(TYPE = PyType_FromSpec(&SPEC))) return nullptr;
    Hooks *self = PyObject_New(Hooks, (PyTypeObject *)TYPE);
    if (!self) return nullptr;
    self->places = nullptr, self->size = self->used = 0;
    self->dictionaries = nullptr, self->count = self->room = self->taken = 0;
    return (PyObject *)self;
}

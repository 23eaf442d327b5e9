// A list of Python's gives its room away when it is cleared, and asks for a little more thirty times while it grows to thousands.
// Each time, the system's allocator tidies up the small pieces that torch has just given back, and is slow to hand them out again.
#include "numbers.h"

#include <cstdlib>

namespace {

struct Numbers {
    PyObject_HEAD
    PyObject **items;
    Py_ssize_t count, room;
};
PyObject *TYPE = nullptr;

bool has_room(Numbers *self, Py_ssize_t more) {
    if (self->count + more <= self->room) return true;
    const Py_ssize_t room = most<Py_ssize_t>(2 * self->room, most<Py_ssize_t>(self->count + more, 1024));
    PyObject **items = (PyObject **)std::realloc(self->items, size_t(room) * sizeof *items);
    if (!items) return PyErr_NoMemory(), false;
    self->items = items, self->room = room;
    return true;
}

void cut(Numbers *self, Py_ssize_t count) {  // numbers have no code of the script's that could run
    while (self->count > count) Py_DecRef(self->items[--self->count]);
}

PyObject *list_of(const Numbers *self, Py_ssize_t begin, Py_ssize_t end) {
    PyObject *list = PyList_New(most<Py_ssize_t>(end - begin, 0));
    for (Py_ssize_t at = begin; list && at < end; at++) PyList_SetItem(list, at - begin, Py_NewRef(self->items[at]));
    return list;
}

PyObject *append(PyObject *object, PyObject *number) { return add_number(object, number) ? Py_NewRef(Py_None) : nullptr; }
PyObject *extend(PyObject *object, PyObject *numbers) {
    PyObject *list = PySequence_List(numbers);
    const bool done = list && add_numbers(object, list);
    if (list) Py_DecRef(list);
    return done ? Py_NewRef(Py_None) : nullptr;
}
PyObject *clear(PyObject *object, PyObject *) { return cut((Numbers *)object, 0), Py_NewRef(Py_None); }
PyObject *copy(PyObject *object, PyObject *) { return list_of((Numbers *)object, 0, ((Numbers *)object)->count); }

Py_ssize_t length(PyObject *object) { return ((Numbers *)object)->count; }

PyObject *item(PyObject *object, Py_ssize_t at) {
    Numbers *self = (Numbers *)object;
    if (at < 0 || at >= self->count) return PyErr_Format(PyExc_IndexError, "no such number");
    return Py_NewRef(self->items[at]);
}

PyObject *subscript(PyObject *object, PyObject *key) {
    Numbers *self = (Numbers *)object;
    if (!PySlice_Check(key)) {
        const Py_ssize_t at = PyNumber_AsSsize_t(key, PyExc_IndexError);
        return at == -1 && PyErr_Occurred() ? nullptr : item(object, at < 0 ? at + self->count : at);
    }
    Py_ssize_t begin, end, step;
    if (PySlice_Unpack(key, &begin, &end, &step) < 0) return nullptr;
    PySlice_AdjustIndices(self->count, &begin, &end, step);
    if (step != 1) return PyErr_Format(PyExc_ValueError, "one after the other, please");
    return list_of(self, begin, end);
}

// Puts another number somewhere, or takes all from one on out.
int assign(PyObject *object, PyObject *key, PyObject *value) {
    Numbers *self = (Numbers *)object;
    if (value && !PySlice_Check(key)) {
        Py_ssize_t at = PyNumber_AsSsize_t(key, PyExc_IndexError);
        if (at == -1 && PyErr_Occurred()) return -1;
        if (at < 0 || at >= self->count) return PyErr_Format(PyExc_IndexError, "no such number"), -1;
        PyObject *before = self->items[at];
        self->items[at] = Py_NewRef(value);
        return Py_DecRef(before), 0;
    }
    Py_ssize_t begin, end, step;
    if (value || !PySlice_Check(key) || PySlice_Unpack(key, &begin, &end, &step) < 0)
        return PyErr_Occurred() ? -1 : (PyErr_Format(PyExc_TypeError, "a place wanted, or an end to take out"), -1);
    PySlice_AdjustIndices(self->count, &begin, &end, step);
    if (step != 1 || end != self->count) return PyErr_Format(PyExc_ValueError, "only an end can be taken out"), -1;
    return cut(self, begin), 0;
}

PyObject *compare(PyObject *object, PyObject *other, int how) {
    if ((how != Py_EQ && how != Py_NE) || !PyList_Check(other)) return Py_NewRef(Py_NotImplemented);
    Numbers *self = (Numbers *)object;
    int same = PyList_Size(other) == self->count;
    for (Py_ssize_t at = 0; same == 1 && at < self->count; at++)
        same = PyObject_RichCompareBool(self->items[at], PyList_GetItem(other, at), Py_EQ);
    return same < 0 ? nullptr : PyBool_FromLong(same == (how == Py_EQ));
}

void forget(PyObject *object) {
    PyObject *type = (PyObject *)Py_TYPE(object);
    cut((Numbers *)object, 0);
    std::free(((Numbers *)object)->items);
    PyObject_Free(object);
    Py_DecRef(type);
}

PyMethodDef METHODS[] = {
    {"append", append, METH_O, nullptr}, {"extend", extend, METH_O, nullptr}, {"clear", clear, METH_NOARGS, nullptr},
    {"copy", copy, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr},
};
PyType_Slot SLOTS[] = {
    {Py_tp_dealloc, (void *)forget}, {Py_tp_methods, METHODS}, {Py_tp_richcompare, (void *)compare},
    {Py_sq_length, (void *)length}, {Py_sq_item, (void *)item}, {Py_mp_length, (void *)length},
    {Py_mp_subscript, (void *)subscript}, {Py_mp_ass_subscript, (void *)assign}, {0, nullptr}};
PyType_Spec SPEC = {
    "introspect_cli.tensors._kernels.Numbers", sizeof(Numbers), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, SLOTS,
};

}  // namespace

bool is_numbers(PyObject *object) { return TYPE && (PyObject *)Py_TYPE(object) == TYPE; }

Py_ssize_t size_of_numbers(PyObject *object) { return ((Numbers *)object)->count; }

bool add_number(PyObject *object, PyObject *number) {
    Numbers *self = (Numbers *)object;
    if (!has_room(self, 1)) return false;
    self->items[self->count++] = Py_NewRef(number);
    return true;
}

bool add_numbers(PyObject *object, PyObject *list) {
    const Py_ssize_t count = PyList_Size(list);
    bool done = has_room((Numbers *)object, count);
    for (Py_ssize_t at = 0; done && at < count; at++) done = add_number(object, PyList_GetItem(list, at));
    return done;
}

PyObject *new_numbers(PyObject *, PyObject *) {
    if (!TYPE && !(TYPE = PyType_FromSpec(&SPEC))) return nullptr;
    Numbers *self = PyObject_New(Numbers, (PyTypeObject *)TYPE);
    if (!self) return nullptr;
    self->items = nullptr, self->count = self->room = 0;
    return (PyObject *)self;
}

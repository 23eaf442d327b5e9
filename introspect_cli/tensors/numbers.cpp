// A list of Python's gives its room away when it is cleared, and asks for a little more thirty times while it grows to thousands.
// Each time, the system's allocator tidies up the small pieces that torch has just given back, and is slow to hand them out again.
#include "numbers.h"

#include "room.h"

#include <cstring>

namespace {

bool has_room_for(Numbers *self, Py_ssize_t more) {  // false with an exception
    return has_room(self->items, self->room, self->count + more, 1024) || (PyErr_NoMemory(), false);
}

bool is_number(PyObject *object, i64 &number) {
    number = PyLong_AsLongLong(object);
    return number != -1 || !PyErr_Occurred();
}

Py_ssize_t length(PyObject *object) { return ((Numbers *)object)->count; }

PyObject *append(PyObject *object, PyObject *number) {
    i64 own;
    return is_number(number, own) && add_number(object, own) ? Py_NewRef(Py_None) : nullptr;
}
PyObject *extend(PyObject *object, PyObject *numbers) {
    PyObject *list = PySequence_List(numbers);
    const bool done = list && add_list(object, list);
    Py_DecRef(list);
    return done ? Py_NewRef(Py_None) : nullptr;
}
PyObject *clear(PyObject *object, PyObject *) { return clear_numbers(object), Py_NewRef(Py_None); }
PyObject *cut(PyObject *object, PyObject *count) {  // all from so many on are taken out
    i64 kept;
    if (!is_number(count, kept)) return nullptr;
    return ((Numbers *)object)->count = least<Py_ssize_t>(most<i64>(kept, 0), length(object)), Py_NewRef(Py_None);
}
PyObject *copy(PyObject *object, PyObject *) {
    const Numbers *self = (Numbers *)object;
    PyObject *made = new_numbers(nullptr, nullptr);
    if (made && !add_numbers(made, self->items, self->count)) Py_DecRef(made), made = nullptr;
    return made;
}

PyObject *item(PyObject *object, Py_ssize_t at) {
    Numbers *self = (Numbers *)object;
    if (at < 0 || at >= self->count) return PyErr_Format(PyExc_IndexError, "no such number");
    return PyLong_FromLongLong(self->items[at]);
}

PyObject *compare(PyObject *object, PyObject *other, int how) {
    const Numbers *self = (Numbers *)object, *them = (Numbers *)other;
    bool same;
    if (how != Py_EQ && how != Py_NE) return Py_NewRef(Py_NotImplemented);
    if (is_numbers(other)) {
        same = them->count == self->count && !std::memcmp(them->items, self->items, size_t(self->count) * sizeof *self->items);
    } else if (PyList_Check(other)) {
        i64 number;
        same = PyList_Size(other) == self->count;
        for (Py_ssize_t at = 0; same && at < self->count; at++)
            same = is_number(PyList_GetItem(other, at), number) && number == self->items[at];
        PyErr_Clear();  // what is no number is no equal one
    } else {
        return Py_NewRef(Py_NotImplemented);
    }
    return PyBool_FromLong(same == (how == Py_EQ));
}

PyMethodDef METHODS[] = {
    {"append", append, METH_O, nullptr}, {"extend", extend, METH_O, nullptr}, {"clear", clear, METH_NOARGS, nullptr},
    {"copy", copy, METH_NOARGS, nullptr}, {"cut", cut, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr},
};
PyType_Slot SLOTS[] = {
    {Py_tp_dealloc, (void *)forget<Numbers>}, {Py_tp_methods, METHODS}, {Py_tp_richcompare, (void *)compare},
    {Py_sq_length, (void *)length}, {Py_sq_item, (void *)item}, {0, nullptr}};
Class CLASS{"introspect_cli.tensors._kernels.Numbers", sizeof(Numbers), SLOTS};

}  // namespace

bool is_numbers(PyObject *object) { return CLASS.has(object); }

bool add_number(PyObject *object, i64 number) {
    Numbers *self = (Numbers *)object;
    if (!has_room_for(self, 1)) return false;
    self->items[self->count++] = number;
    return true;
}

bool add_numbers(PyObject *object, const i64 *first, Py_ssize_t count) {
    Numbers *self = (Numbers *)object;
    if (!has_room_for(self, count)) return false;
    if (count) std::memcpy(self->items + self->count, first, size_t(count) * sizeof *first);
    self->count += count;
    return true;
}

bool add_list(PyObject *object, PyObject *list) {
    const Py_ssize_t count = PyList_Size(list);
    bool done = has_room_for((Numbers *)object, count);
    i64 number;
    for (Py_ssize_t at = 0; done && at < count; at++) done = is_number(PyList_GetItem(list, at), number) && add_number(object, number);
    return done;
}

PyObject *new_numbers(PyObject *, PyObject *) { return (PyObject *)CLASS.make<Numbers>(); }

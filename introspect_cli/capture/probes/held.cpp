// What an optimizer holds, recorded and compared in one call: gradients, the state that it keeps for each parameter, and how
// parameters stood. Lists of hundreds of tensors, keys and identities that Python makes anew for it in each step take longer than the
// summaries, and have the allocator tidy up.
#include "probes.h"

#include "numbers.h"
#include "objects.h"

#include <cstring>

namespace {

bool are(PyObject *const *given, Py_ssize_t count, int wanted) {
    if (count == wanted && is_intake(given[0])) return true;
    return PyErr_Format(PyExc_TypeError, "%d arguments wanted, an intake the first", wanted), false;
}

Name GRAD{"grad"};

// What recording came to; with tensors that go the long way, their slots and all of them.
PyObject *recorded(PyObject *intake, PyObject *sites, const Objects &tensors) {
    PyObject *done = record_many(intake, sites, tensors);
    if (!done || !PyList_Check(done)) return done;
    PyObject *all = PyList_New(tensors.count), *both = all ? PyTuple_New(2) : nullptr;
    for (Py_ssize_t i = 0; all && i < tensors.count; i++) PyList_SetItem(all, i, Py_NewRef(tensors.items[i]));
    if (both) PyTuple_SetItem(both, 0, done), PyTuple_SetItem(both, 1, all);
    else Py_DecRef(done);
    return both;
}

// Takes what an optimizer keeps for its parameters, in their order, if it keeps just that: dictionaries as long as some numbers
// say, with the keys of a list, one after the other, and nothing in them but tensors.
bool take_state(PyObject *parameters, PyObject *state, PyObject *lengths, PyObject *keys, PyObject *tensor, Objects &into) {
    PyObject *parameter, *kept, *key, *value;
    const Py_ssize_t end = PyList_Size(keys), count = PyList_Size(parameters);
    Py_ssize_t which = 0, next = 0;
    bool same = PyDict_Size(state) == count && size_of_numbers(lengths) == count;
    for (Py_ssize_t at = 0; same && PyDict_Next(state, &at, &parameter, &kept); which++) {
        same = parameter == PyList_GetItem(parameters, which) && (PyObject *)Py_TYPE(kept) == (PyObject *)&PyDict_Type &&
               PyDict_Size(kept) == first_of_numbers(lengths)[which];
        for (Py_ssize_t inside = 0; same && PyDict_Next(kept, &inside, &key, &value); next++)
            same = next < end && key == PyList_GetItem(keys, next) && PyType_IsSubtype(Py_TYPE(value), (PyTypeObject *)tensor) &&
                   into.add(value);
    }
    return PyErr_Clear(), same && next == end;
}

// ---- how tensors stood

struct Stood {
    PyObject_HEAD
    PyObject *whose, *marks, *now;  // Numbers: their identities, how they stood; room for how they stand
};
PyObject *TYPE = nullptr;

bool are_same(PyObject *whose, const Objects &tensors) {
    bool same = size_of_numbers(whose) == tensors.count;
    const i64 *all = first_of_numbers(whose);
    for (Py_ssize_t i = 0; same && i < tensors.count; i++) same = all[i] == i64(tensors.items[i]);
    return same;
}
void forget_all(Stood *self) {
    for (PyObject *one : {self->whose, self->marks, self->now}) clear_numbers(one);
}

// Remembers how tensors of a list stand: in the place of the same ones, or, with a flag, where there are none. False where Python
// has to.
PyObject *note(PyObject *object, PyObject *const *given, Py_ssize_t count) {
    Stood *self = (Stood *)object;
    if (!are(given, count, 3)) return nullptr;
    Taken tensors(objects_of(given[0]));
    if (!PyList_Check(given[1]) || !tensors.add_list(given[1])) return PyErr_Clear(), Py_NewRef(Py_False);
    bool done = given[2] == Py_True || are_same(self->whose, tensors);
    if (!done) return Py_NewRef(Py_False);
    forget_all(self);
    for (Py_ssize_t i = 0; done && i < tensors.count; i++) done = add_number(self->whose, i64(tensors.items[i]));
    done = done && marks_of(given[0], tensors, self->marks);
    for (Py_ssize_t i = 0; done && i < tensors.count; i++) done = first_of_numbers(self->marks)[i] != 0;
    if (!done) forget_all(self);
    return PyErr_Clear(), PyBool_FromLong(done);
}

// Whether what modules hold under some names is what is remembered, in that order, and stands as it stood.
PyObject *holds(PyObject *object, PyObject *const *given, Py_ssize_t count) {
    Stood *self = (Stood *)object;
    if (!are(given, count, 4)) return nullptr;
    Taken tensors(objects_of(given[0]));
    bool same = take_standing(given[1], given[2], given[3] == Py_True, tensors) && are_same(self->whose, tensors);
    clear_numbers(self->now);
    same = same && tensors.count && marks_of(given[0], tensors, self->now) &&
           !std::memcmp(first_of_numbers(self->now), first_of_numbers(self->marks), size_t(tensors.count) * sizeof(i64));
    return PyErr_Clear(), PyBool_FromLong(same);
}

// All that is remembered, identities and how they stood, and it is not remembered any more.
PyObject *taken(PyObject *object, PyObject *) {
    Stood *self = (Stood *)object;
    PyObject *whose = list_of_numbers(self->whose), *marks = whose ? PyList_New(PyList_Size(whose)) : nullptr;
    for (Py_ssize_t i = 0; marks && i < PyList_Size(marks); i++) {
        PyObject *mark = PyLong_FromUnsignedLongLong(u64(first_of_numbers(self->marks)[i]));
        if (!mark || PyList_SetItem(marks, i, mark)) Py_DecRef(marks), marks = nullptr;
    }
    PyObject *both = marks ? PyTuple_New(2) : nullptr;
    if (both) PyTuple_SetItem(both, 0, whose), PyTuple_SetItem(both, 1, marks), forget_all(self);
    return both;
}

void free_all(PyObject *object) {
    Stood *self = (Stood *)object;
    PyObject *type = (PyObject *)Py_TYPE(object);
    for (PyObject *one : {self->whose, self->marks, self->now})
        if (one) Py_DecRef(one);
    PyObject_Free(object);
    Py_DecRef(type);
}

PyMethodDef METHODS[] = {
    {"note", (PyCFunction)(void (*)())note, METH_FASTCALL, nullptr}, {"holds", (PyCFunction)(void (*)())holds, METH_FASTCALL, nullptr},
    {"taken", taken, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr},
};
PyType_Slot SLOTS[] = {{Py_tp_dealloc, (void *)free_all}, {Py_tp_methods, METHODS}, {0, nullptr}};
PyType_Spec SPEC = {
    "introspect_cli.tensors._kernels.Stood", sizeof(Stood), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, SLOTS,
};

}  // namespace

PyObject *new_stood(PyObject *, PyObject *) {
    if (!TYPE && !(TYPE = PyType_FromSpec(&SPEC))) return nullptr;
    Stood *self = PyObject_New(Stood, (PyTypeObject *)TYPE);
    if (!self) return nullptr;
    self->whose = new_numbers(nullptr, nullptr), self->marks = new_numbers(nullptr, nullptr), self->now = new_numbers(nullptr, nullptr);
    if (self->whose && self->marks && self->now) return (PyObject *)self;
    return Py_DecRef((PyObject *)self), nullptr;
}

// Whether the objects of a list have these identities, in that order.
PyObject *are_these(PyObject *, PyObject *const *given, Py_ssize_t count) {
    if (count != 2 || !is_numbers(given[0]) || !PyList_Check(given[1]))
        return PyErr_Format(PyExc_TypeError, "numbers and a list wanted");
    bool same = size_of_numbers(given[0]) == PyList_Size(given[1]);
    const i64 *all = first_of_numbers(given[0]);
    for (Py_ssize_t i = 0; same && i < PyList_Size(given[1]); i++) same = all[i] == i64(PyList_GetItem(given[1], i));
    return PyBool_FromLong(same);
}

PyObject *record_gradients(PyObject *, PyObject *const *given, Py_ssize_t count) {
    if (!are(given, count, 3)) return nullptr;
    Taken tensors(objects_of(given[0]));
    bool all = PyList_Check(given[2]);
    for (Py_ssize_t i = 0; all && i < PyList_Size(given[2]); i++) {
        PyObject *gradient = attribute(PyList_GetItem(given[2], i), GRAD);
        all = gradient && gradient != Py_None && tensors.add(gradient);
        if (gradient) Py_DecRef(gradient);
    }
    return all ? recorded(given[0], given[1], tensors) : (PyErr_Clear(), Py_NewRef(Py_False));
}

PyObject *record_state(PyObject *, PyObject *const *given, Py_ssize_t count) {
    enum { PARAMETERS = 2, STATE, LENGTHS, KEYS, TENSOR, ALL };  // after an intake and sites
    if (!are(given, count, ALL)) return nullptr;
    if (!PyList_Check(given[PARAMETERS]) || !PyDict_Check(given[STATE]) || !is_numbers(given[LENGTHS]) || !PyList_Check(given[KEYS]) ||
        !PyType_Check(given[TENSOR]))
        return PyErr_Format(PyExc_TypeError, "parameters, a dictionary, lengths, keys and a class wanted");
    Taken tensors(objects_of(given[0]));
    const bool same = take_state(given[PARAMETERS], given[STATE], given[LENGTHS], given[KEYS], given[TENSOR], tensors);
    return same ? recorded(given[0], given[1], tensors) : Py_NewRef(Py_False);
}

// What an optimizer holds, recorded in one call: gradients, and the state that it keeps for each parameter. Lists of hundreds of
// tensors, keys and identities that Python makes anew for it in each step take longer than the summaries, and have the allocator
// tidy up.
#include "probes.h"

#include "numbers.h"
#include "objects.h"

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
    PyObject *all = PyList_New(tensors.count), *both = all ? PyTuple_Pack(2, done, all) : nullptr;
    for (Py_ssize_t i = 0; all && i < tensors.count; i++) PyList_SetItem(all, i, Py_NewRef(tensors.items[i]));
    return Py_DecRef(done), Py_DecRef(all), both;
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

}  // namespace

PyObject *record_gradients(PyObject *, PyObject *const *given, Py_ssize_t count) {
    if (!are(given, count, 3)) return nullptr;
    Taken tensors(objects_of(given[0]));
    bool all = PyList_Check(given[2]);
    for (Py_ssize_t i = 0; all && i < PyList_Size(given[2]); i++) {
        PyObject *gradient = attribute(PyList_GetItem(given[2], i), GRAD);
        all = gradient && gradient != Py_None && tensors.add(gradient);
        Py_DecRef(gradient);
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

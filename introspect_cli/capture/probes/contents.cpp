// What modules hold, as torch keeps it in their dictionaries: walked at the start of each step, in calls without a frame.
#include "probes.h"

#include <initializer_list>

namespace {

Name PARAMETERS{"_parameters"}, BUFFERS{"_buffers"}, MODULES{"_modules"};

// One of a module's dictionaries, a reference of ours; null without an exception where it is anything else.
PyObject *kept(PyObject *module, Name &name) {
    PyObject *found = attribute(module, name);
    if (found && (PyObject *)Py_TYPE(found) == (PyObject *)&PyDict_Type) return found;
    if (found) Py_DecRef(found);
    return nullptr;
}

// 1 if an object is met for the first time, 0 if not, -1 with an exception.
int is_new(PyObject *seen, PyObject *object) {
    const Py_ssize_t before = PySet_Size(seen);
    PyObject *key = PyLong_FromVoidPtr(object);
    const int failed = !key || PySet_Add(seen, key);
    if (key) Py_DecRef(key);
    return failed ? -1 : PySet_Size(seen) != before;
}

// Takes the next module off the list that waits, puts its children there, and it into `found` if it is an instance of a
// class; without one, if it holds tensors.
bool walk(PyObject *waiting, PyObject *seen, PyObject *found, PyObject *cls) {
    const Py_ssize_t last = PyList_Size(waiting) - 1;
    PyObject *module = Py_NewRef(PyList_GetItem(waiting, last));
    bool done = PyList_SetSlice(waiting, last, last + 1, nullptr) == 0;
    const int fresh = done ? is_new(seen, module) : -1;
    if (fresh == 1) {
        PyObject *own[3] = {kept(module, PARAMETERS), kept(module, BUFFERS), kept(module, MODULES)};
        done = own[0] && own[1] && own[2];
        const int is_one = !done ? 0 : cls ? PyObject_IsInstance(module, cls) : PyDict_Size(own[0]) || PyDict_Size(own[1]);
        done = done && is_one >= 0 && (!is_one || PyList_Append(found, module) == 0);
        PyObject *children = done ? PyDict_Values(own[2]) : nullptr;
        done = done && children;
        for (Py_ssize_t i = done ? PyList_Size(children) : 0; done && i--;)
            if (PyList_GetItem(children, i) != Py_None) done = PyList_Append(waiting, PyList_GetItem(children, i)) == 0;
        for (PyObject *one : {own[0], own[1], own[2], children})
            if (one) Py_DecRef(one);
    }
    Py_DecRef(module);
    return done && fresh >= 0;
}

// Appends those values of a dictionary that are not None and new, and `kind` for each; mixes them and their keys into `stand`.
bool collect(PyObject *group, PyObject *kind, PyObject *seen, PyObject *kinds, PyObject *tensors, u64 &stand) {
    Py_ssize_t at = 0;
    PyObject *key, *value;
    while (PyDict_Next(group, &at, &key, &value)) {
        if (value == Py_None) continue;
        stand = mix(stand ^ u64(PyObject_Hash(key))) ^ u64(value);
        const int fresh = is_new(seen, value);
        if (fresh < 0 || (fresh && (PyList_Append(kinds, kind) || PyList_Append(tensors, value)))) return false;
    }
    return true;
}

// The dictionary of what a weak reference leads to, a reference of ours; null without an exception if there is none.
PyObject *own_of(PyObject *reference) {
    PyObject *module = PyWeakref_GetObject(reference);
    if (!module || module == Py_None) return PyErr_Clear(), nullptr;
    Py_NewRef(module);
    PyObject *own = PyObject_GenericGetDict(module, nullptr);
    Py_DecRef(module);
    if (own && PyDict_Check(own)) return own;
    if (own) Py_DecRef(own);
    return PyErr_Clear(), nullptr;
}

// Of each of some values: whether `holds` says so of it, where it is in the dictionary of its module.
template <class Holds> bool every(PyObject *owns, PyObject *places, PyObject *names, PyObject *wanted, Holds holds) {
    const Py_ssize_t count = PyList_Size(places);
    if (PyList_Size(names) != count || PyList_Size(wanted) != count) return false;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *own = PyList_GetItem(owns, PyLong_AsSsize_t(PyList_GetItem(places, i)));
        PyObject *found = own ? PyDict_GetItemWithError(own, PyList_GetItem(names, i)) : nullptr;
        if (!found || !holds(found, PyList_GetItem(wanted, i))) return PyErr_Clear(), false;
    }
    return true;
}
bool has_size(PyObject *of, PyObject *wanted) { return PyObject_Size(of) == PyLong_AsSsize_t(wanted); }

// The modules in one that `walk` finds; None where a module keeps its own in anything but dictionaries.
PyObject *found_in(PyObject *root, PyObject *cls) {
    PyObject *waiting = PyList_New(0), *seen = PySet_New(nullptr), *found = PyList_New(0);
    bool done = waiting && seen && found && PyList_Append(waiting, root) == 0;
    while (done && PyList_Size(waiting)) done = walk(waiting, seen, found, cls);
    for (PyObject *one : {waiting, seen})
        if (one) Py_DecRef(one);
    if (done || !found) return found;
    Py_DecRef(found);
    return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
}

}  // namespace

PyObject *holders(PyObject *, PyObject *root) { return found_in(root, nullptr); }

PyObject *instances(PyObject *, PyObject *const *arguments, Py_ssize_t given) {
    if (given != 2) return PyErr_Format(PyExc_TypeError, "a module and a class wanted");
    return found_in(arguments[0], arguments[1]);
}

PyObject *tensors_of(PyObject *, PyObject *const *arguments, Py_ssize_t given) {
    if (given != 3 || !PyList_Check(arguments[0])) return PyErr_Format(PyExc_TypeError, "a list and two kinds wanted");
    PyObject *kinds = PyList_New(0), *tensors = PyList_New(0), *seen = PySet_New(nullptr);
    u64 stand = 0;
    bool done = kinds && tensors && seen;
    for (Py_ssize_t i = 0; done && i < PyList_Size(arguments[0]); i++) {
        PyObject *module = PyWeakref_GetObject(PyList_GetItem(arguments[0], i));
        if (!module || module == Py_None) continue;
        Py_NewRef(module);
        stand = mix(stand ^ u64(module));
        for (int which = 0; done && which < 2; which++) {
            if (arguments[1 + which] == Py_None) continue;
            PyObject *group = kept(module, which ? BUFFERS : PARAMETERS);
            done = group && collect(group, arguments[1 + which], seen, kinds, tensors, stand);
            if (group) Py_DecRef(group);
        }
        Py_DecRef(module);
    }
    PyObject *number = done ? PyLong_FromUnsignedLongLong(mix(stand)) : nullptr;
    PyObject *all = number ? PyTuple_Pack(3, kinds, tensors, number) : nullptr;
    for (PyObject *one : {kinds, tensors, seen, number})
        if (one) Py_DecRef(one);
    return all || PyErr_Occurred() ? all : Py_NewRef(Py_None);
}

PyObject *unchanged(PyObject *, PyObject *const *arguments, Py_ssize_t given) {
    bool lists = given == 8;
    for (Py_ssize_t i = 0; lists && i < given; i++) lists = PyList_Check(arguments[i]);
    if (!lists) return PyErr_Format(PyExc_TypeError, "eight lists wanted");
    const Py_ssize_t count = PyList_Size(arguments[0]);
    PyObject *owns = PyList_New(0);
    bool same = owns && PyList_Size(arguments[1]) == count;
    for (Py_ssize_t i = 0; same && i < count; i++) {
        PyObject *own = own_of(PyList_GetItem(arguments[0], i));
        same = own && has_size(own, PyList_GetItem(arguments[1], i)) && PyList_Append(owns, own) == 0;
        if (own) Py_DecRef(own);
    }
    same = same && every(owns, arguments[2], arguments[3], arguments[4], [](PyObject *a, PyObject *b) { return a == b; });
    same = same && every(owns, arguments[5], arguments[6], arguments[7], has_size);
    if (owns) Py_DecRef(owns);
    return PyErr_Occurred() ? nullptr : PyBool_FromLong(same);
}

// Sites are numbered from 0 on, so their counts lie in an array. Where a step begins, nothing is written: a count is of the step
// whose number stands beside it. A dictionary that is filled anew in each step takes ten times as long.
#include "times.h"

#include "numbers.h"

#include <cstdlib>
#include <cstring>

namespace {

constexpr i64 MOST = i64(1) << 32;  // more sites than a store takes

struct Count {
    u32 step, times;
};
struct Times {
    PyObject_HEAD
    Count *counts;
    i64 room;
    u32 step;        // from 1 on
    bool is_begun;  // whether anything has been counted in this step
};
PyObject *TYPE = nullptr;

Count *count_of(Times *self, i64 site) {  // null without memory, or for what is no site, with an exception
    if (site < 0 || site >= MOST) return PyErr_Format(PyExc_ValueError, "%lld is no site", (long long)site), nullptr;
    if (site >= self->room) {
        const i64 more = most<i64>(2 * self->room, most<i64>(site + 1, 1024));
        Count *all = (Count *)std::realloc(self->counts, size_t(more) * sizeof(Count));
        if (!all) return PyErr_NoMemory(), nullptr;
        std::memset(all + self->room, 0, size_t(more - self->room) * sizeof(Count));
        self->counts = all, self->room = more;
    }
    Count *count = self->counts + site;
    if (count->step != self->step) *count = {self->step, 0};
    self->is_begun = true;
    return count;
}

PyObject *py_of(PyObject *object, PyObject *site) {
    const i64 number = PyLong_AsLongLong(site);
    return PyErr_Occurred() ? nullptr : PyLong_FromLongLong(times_of(object, number));
}
PyObject *py_add(PyObject *object, PyObject *const *given, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "a site and a number wanted");
    const i64 site = PyLong_AsLongLong(given[0]), by = PyErr_Occurred() ? 0 : PyLong_AsLongLong(given[1]);
    return PyErr_Occurred() || !add_times(object, site, by) ? nullptr : Py_NewRef(Py_None);
}
PyObject *py_once(PyObject *object, PyObject *sites) {
    if (!PyList_Check(sites)) return PyErr_Format(PyExc_TypeError, "a list wanted");
    PyObject *numbers = new_numbers(nullptr, nullptr);
    const bool are_numbers = numbers && add_list(numbers, sites);
    const int noted = are_numbers ? note_once(object, first_of_numbers(numbers), size_of_numbers(numbers)) : -1;
    if (numbers) Py_DecRef(numbers);
    return noted < 0 ? nullptr : PyBool_FromLong(noted);
}
PyObject *py_clear(PyObject *object, PyObject *) {
    Times *self = (Times *)object;
    self->is_begun = false;
    if (!++self->step) std::memset(self->counts, 0, size_t(self->room) * sizeof(Count)), self->step = 1;
    return Py_NewRef(Py_None);
}
int is_begun(PyObject *object) { return ((Times *)object)->is_begun; }

void forget(PyObject *object) {
    PyObject *type = (PyObject *)Py_TYPE(object);
    std::free(((Times *)object)->counts);
    PyObject_Free(object);
    Py_DecRef(type);
}

PyMethodDef METHODS[] = {
    {"of", py_of, METH_O, nullptr},
    {"add", (PyCFunction)(void (*)())py_add, METH_FASTCALL, nullptr},
    {"once", py_once, METH_O, nullptr},
    {"clear", py_clear, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot SLOTS[] = {{Py_tp_dealloc, (void *)forget}, {Py_tp_methods, METHODS}, {Py_nb_bool, (void *)is_begun},
                       {0, nullptr}};
PyType_Spec SPEC = {
    "introspect_cli.tensors._kernels.Times", sizeof(Times), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, SLOTS,
};

}  // namespace

bool is_times(PyObject *object) { return TYPE && (PyObject *)Py_TYPE(object) == TYPE; }

i64 times_of(PyObject *object, i64 site) {
    const Times *self = (Times *)object;
    if (site < 0 || site >= self->room) return 0;
    return self->counts[site].step == self->step ? self->counts[site].times : 0;
}

bool add_times(PyObject *object, i64 site, i64 by) {
    Count *count = count_of((Times *)object, site);
    if (count) count->times = u32(i64(count->times) + by);
    return count;
}

int note_once(PyObject *object, const i64 *sites, Py_ssize_t count) {
    Py_ssize_t done = 0;
    while (done < count && !times_of(object, sites[done]) && add_times(object, sites[done], 1)) done++;
    if (done == count) return 1;
    while (done--) ((Times *)object)->counts[sites[done]].times = 0;
    return PyErr_Occurred() ? -1 : 0;
}

PyObject *new_times(PyObject *, PyObject *) {
    if (!TYPE && !(TYPE = PyType_FromSpec(&SPEC))) return nullptr;
    Times *self = PyObject_New(Times, (PyTypeObject *)TYPE);
    if (!self) return nullptr;
    self->counts = nullptr, self->room = 0, self->step = 1, self->is_begun = false;
    return (PyObject *)self;
}

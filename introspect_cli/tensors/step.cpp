// Sites are numbered from 0 on, so their counts lie in an array. Where a step begins, nothing is written: a count is of the step
// whose number stands beside it. A dictionary that is filled anew in each step takes ten times as long.
#include "step.h"

#include "numbers.h"
#include "room.h"

#include <structmember.h>

#include <cstddef>
#include <cstring>

namespace {

constexpr i64 MOST = i64(1) << 32;  // more sites than a store takes

struct Count {
    u32 step, times;
};
struct Step {
    PyObject_HEAD
    PyObject *sites, *slots;  // numbers: of each row
    Count *counts;
    i64 room;
    u32 step;  // from 1 on

    void free() { Py_DecRef(sites), Py_DecRef(slots), std::free(counts); }
};

Count *count_of(Step *self, i64 site) {  // null without memory, or for what is no site, with an exception
    if (site < 0 || site >= MOST) return PyErr_Format(PyExc_ValueError, "%lld is no site", (long long)site), nullptr;
    if (site >= self->room) {
        const i64 before = self->room;
        if (!has_room(self->counts, self->room, site + 1, 1024)) return PyErr_NoMemory(), nullptr;
        std::memset(self->counts + before, 0, size_t(self->room - before) * sizeof(Count));
    }
    Count *count = self->counts + site;
    if (count->step != self->step) *count = {self->step, 0};
    return count;
}

PyObject *py_note(PyObject *object, PyObject *const *given, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "a site and a slot wanted");
    const i64 site = PyLong_AsLongLong(given[0]), slot = PyErr_Occurred() ? 0 : PyLong_AsLongLong(given[1]);
    if (PyErr_Occurred()) return nullptr;
    const i64 times = times_of(object, site);
    return note(object, site, slot) ? PyLong_FromLongLong(times) : nullptr;
}
PyObject *py_note_all(PyObject *object, PyObject *const *given, Py_ssize_t count) {
    if (count != 2 || !is_numbers(given[0]) || !is_numbers(given[1]) || size_of_numbers(given[0]) != size_of_numbers(given[1]))
        return PyErr_Format(PyExc_TypeError, "as many numbers of sites as of slots wanted");
    const int noted = note_once(object, first_of_numbers(given[0]), first_of_numbers(given[1]), size_of_numbers(given[0]));
    return noted < 0 ? nullptr : PyBool_FromLong(noted);
}
PyObject *py_uncount(PyObject *object, PyObject *site) {
    Count *count = count_of((Step *)object, PyLong_AsLongLong(site));
    return count ? count->times--, Py_NewRef(Py_None) : nullptr;
}
PyObject *py_clear(PyObject *object, PyObject *) {
    Step *self = (Step *)object;
    clear_numbers(self->sites), clear_numbers(self->slots);
    if (!++self->step) std::memset(self->counts, 0, size_t(self->room) * sizeof(Count)), self->step = 1;
    return Py_NewRef(Py_None);
}

PyMemberDef MEMBERS[] = {
    {"sites", T_OBJECT, offsetof(Step, sites), READONLY, nullptr}, {"slots", T_OBJECT, offsetof(Step, slots), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyMethodDef METHODS[] = {
    {"note", (PyCFunction)(void (*)())py_note, METH_FASTCALL, nullptr},
    {"note_all", (PyCFunction)(void (*)())py_note_all, METH_FASTCALL, nullptr},
    {"uncount", py_uncount, METH_O, nullptr}, {"clear", py_clear, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot SLOTS[] = {{Py_tp_dealloc, (void *)forget<Step>}, {Py_tp_members, MEMBERS}, {Py_tp_methods, METHODS}, {0, nullptr}};
Class CLASS{"introspect_cli.tensors._kernels.Step", sizeof(Step), SLOTS};

}  // namespace

bool is_step(PyObject *object) { return CLASS.has(object); }

i64 times_of(PyObject *object, i64 site) {
    const Step *self = (Step *)object;
    if (site < 0 || site >= self->room) return 0;
    return self->counts[site].step == self->step ? self->counts[site].times : 0;
}

bool note(PyObject *object, i64 site, i64 slot) {
    Step *self = (Step *)object;
    Count *count = count_of(self, site);
    return count && (count->times++ || (add_number(self->sites, site) && add_number(self->slots, slot)));
}

int note_once(PyObject *object, const i64 *sites, const i64 *slots, Py_ssize_t count) {
    Step *self = (Step *)object;
    Py_ssize_t done = 0;
    for (Count *own; done < count && !times_of(object, sites[done]) && (own = count_of(self, sites[done])); done++) own->times = 1;
    if (done == count) return add_numbers(self->sites, sites, count) && add_numbers(self->slots, slots, count) ? 1 : -1;
    while (done--) self->counts[sites[done]].times = 0;
    return PyErr_Occurred() ? -1 : 0;
}

PyObject *new_step(PyObject *, PyObject *) {
    Step *self = CLASS.make<Step>();
    if (!self) return nullptr;
    self->sites = new_numbers(nullptr, nullptr), self->slots = new_numbers(nullptr, nullptr), self->step = 1;
    return self->sites && self->slots ? (PyObject *)self : (Py_DecRef((PyObject *)self), nullptr);
}

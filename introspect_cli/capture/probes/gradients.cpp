// The hook of gradients.py that a tensor's gradient is given to: it records without a frame of Python, so that no handler of the
// script's comes in between, and a backward pass of hundreds of modules is not slowed down.
#include "probes.h"

#include <structmember.h>

#include <cstddef>

namespace {

enum Held { RECORD, GUARDED, RECORDER, INTAKE, HELD };
using Gradients = Holder<HELD>;

Name ON{"on"}, WANTED{"wanted"};
PyObject *TYPE = nullptr, *HOOK = nullptr;

struct Hook {  // no list unless there are several sites: what the garbage collector counts costs the script its rounds
    PyObject_HEAD
    PyObject *gradients, *site, *more, *number;
};

PyObject *sites_of(PyObject *object, void *) {
    Hook *self = (Hook *)object;
    PyObject *sites = PyList_New(1);
    if (!sites) return nullptr;
    PyList_SetItem(sites, 0, Py_NewRef(self->site));
    if (self->more && PyList_SetSlice(sites, 1, 1, self->more)) return Py_DecRef(sites), nullptr;
    return sites;
}

PyObject *add(PyObject *object, PyObject *site) {
    Hook *self = (Hook *)object;
    if (!self->more && !(self->more = PyList_New(0))) return nullptr;
    return PyList_Append(self->more, site) ? nullptr : Py_NewRef(Py_None);
}

constexpr Py_ssize_t FEW = 8;

PyObject *call_hook(PyObject *object, PyObject *arguments, PyObject *) {
    Hook *self = (Hook *)object;
    Gradients *own = (Gradients *)self->gradients;
    if (PyTuple_Size(arguments) != 1) return PyErr_Format(PyExc_TypeError, "a gradient wanted");
    PyObject *gradient = PyTuple_GetItem(arguments, 0), *sites[FEW];
    if (gradient == Py_None || !own->held[GUARDED] || !attribute_is(own->held[GUARDED], ON, Py_True) ||
        !attribute_is(own->held[RECORDER], WANTED, Py_True))
        return Py_NewRef(Py_None);
    const Py_ssize_t count = 1 + (self->more ? PyList_Size(self->more) : 0);
    if (count <= FEW && own->held[INTAKE] != Py_None) {
        for (Py_ssize_t i = 0; i < count; i++) sites[i] = Py_NewRef(i ? PyList_GetItem(self->more, i - 1) : self->site);
        i64 slot = record_at(own->held[INTAKE], sites, count, gradient);
        for (Py_ssize_t i = 0; i < count; i++) Py_DecRef(sites[i]);
        if (slot >= 0) return Py_NewRef(Py_None);
        PyErr_Clear();  // what is wrong comes up again on the long way, where it is guarded
    }
    PyObject *every = sites_of(object, nullptr);
    PyObject *done = every ? PyObject_CallFunctionObjArgs(own->held[RECORD], every, gradient, nullptr) : nullptr;
    if (every) Py_DecRef(every);
    return done;
}

PyObject *hook(PyObject *gradients, PyObject *site) {
    Hook *made = PyObject_New(Hook, (PyTypeObject *)HOOK);
    if (!made) return nullptr;
    made->gradients = Py_NewRef(gradients), made->site = Py_NewRef(site), made->more = nullptr, made->number = Py_NewRef(Py_None);
    return (PyObject *)made;
}

void free_hook(PyObject *object) {
    Hook *self = (Hook *)object;
    PyObject *type = (PyObject *)Py_TYPE(object);
    for (PyObject *one : {self->gradients, self->site, self->number, self->more})
        if (one) Py_DecRef(one);
    PyObject_Free(object);
    Py_DecRef(type);
}

PyMemberDef MEMBERS[] = {
    {"number", T_OBJECT_EX, offsetof(Hook, number), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyGetSetDef GETTERS[] = {{"sites", sites_of, nullptr, nullptr, nullptr}, {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyMethodDef HOOK_METHODS[] = {{"add", add, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyType_Slot HOOK_SLOTS[] = {
    {Py_tp_dealloc, (void *)free_hook}, {Py_tp_call, (void *)call_hook}, {Py_tp_members, MEMBERS},
    {Py_tp_getset, GETTERS}, {Py_tp_methods, HOOK_METHODS}, {0, nullptr}};
PyType_Spec HOOK_SPEC = {
    "introspect_cli.tensors._kernels.Hook", sizeof(Hook), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, HOOK_SLOTS,
};

PyMethodDef METHODS[] = {{"hook", hook, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};

}  // namespace

PyObject *new_gradients(PyObject *, PyObject *const *arguments, Py_ssize_t given) {
    if (!Gradients::define(TYPE, "introspect_cli.tensors._kernels.Gradients", METHODS)) return nullptr;
    if (!HOOK) {
        PyObject *made = PyType_FromSpec(&HOOK_SPEC);
        // pickling a tensor warns of hooks that get lost, unless they are meant to be
        if (!made || PyObject_SetAttrString(made, "__torch_unserializable__", Py_True)) return nullptr;
        HOOK = made;
    }
    if (given == HELD && arguments[INTAKE] != Py_None && !is_intake(arguments[INTAKE]))
        return PyErr_Format(PyExc_TypeError, "an intake wanted");
    return Gradients::make(TYPE, arguments, given);
}

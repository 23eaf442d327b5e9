// The hooks of gradients.py for tensors that autograd nodes made: registered and answered without a frame of Python.
#include "probes.h"
#include "tensor.h"

#include <structmember.h>

#include <cstddef>
#include <initializer_list>

namespace {

enum Held { RECORD, GUARDED, RECORDER, INTAKE, WATCHED, ELSEWHERE, HELD };
using Gradients = Holder<HELD>;

Slot ON{{"on"}}, WANTED{{"wanted"}};
Name NODE{"grad_fn"}, NUMBER{"_sequence_nr"},
    GIVE{"_register_hook_dict"}, HOOKS{"_backward_hooks"};

PyObject *TYPE = nullptr, *HOOK = nullptr;

// ---- the hook: `_Hook` of gradients.py

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
bool add_site(Hook *self, PyObject *site) {
    if (!self->more && !(self->more = PyList_New(0))) return false;
    return PyList_Append(self->more, site) == 0;
}
PyObject *py_add(PyObject *object, PyObject *site) {
    return add_site((Hook *)object, site) ? Py_NewRef(Py_None) : nullptr;
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
    if (count <= FEW) {
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

void put(PyObject *&place, PyObject *value) {
    PyObject *before = place;
    place = Py_NewRef(value);
    if (before) Py_DecRef(before);
}

Hook *make_hook(PyObject *gradients, PyObject *site) {
    Hook *hook = PyObject_New(Hook, (PyTypeObject *)HOOK);
    if (!hook) return nullptr;
    hook->gradients = Py_NewRef(gradients), hook->site = Py_NewRef(site), hook->more = nullptr;
    hook->number = Py_NewRef(Py_None);
    return hook;
}

void free_hook(PyObject *object) {
    Hook *self = (Hook *)object;
    PyObject *type = (PyObject *)Py_TYPE(object);
    for (PyObject *one : {self->gradients, self->site, self->number}) Py_DecRef(one);
    if (self->more) Py_DecRef(self->more);
    PyObject_Free(object);
    Py_DecRef(type);
}

PyMemberDef MEMBERS[] = {
    {"number", T_OBJECT_EX, offsetof(Hook, number), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyGetSetDef GETTERS[] = {{"sites", sites_of, nullptr, nullptr, nullptr}, {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyMethodDef HOOK_METHODS[] = {{"add", py_add, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyType_Slot HOOK_SLOTS[] = {
    {Py_tp_dealloc, (void *)free_hook}, {Py_tp_call, (void *)call_hook}, {Py_tp_members, MEMBERS},
    {Py_tp_getset, GETTERS}, {Py_tp_methods, HOOK_METHODS}, {0, nullptr}};
PyType_Spec HOOK_SPEC = {
    "introspect_cli.tensors._kernels.Hook", sizeof(Hook), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, HOOK_SLOTS,
};

// ---- watching

// What tells a node from others: its number in the thread that asks; null without an exception where it has none.
PyObject *number_of(PyObject *node) {
    PyObject *number = PyObject_CallMethodObjArgs(node, NUMBER.get(), nullptr);
    const u64 thread = mix(u64(PyThread_get_thread_ident()) * G);
    PyObject *both = number ? PyLong_FromUnsignedLongLong(thread + PyLong_AsUnsignedLongLongMask(number)) : nullptr;
    if (number) Py_DecRef(number);
    return both ? both : (PyErr_Clear(), nullptr);
}

// A dictionary with one hook, a new reference: one whose graph is gone, else a new one.
PyObject *hooks_with(Gradients *self, PyObject *site, Hook *&hook) {
    PyObject *key = PyLong_FromLong(0), *hooks = key ? next_dictionary(self->held[WATCHED]) : nullptr;
    hook = hooks && Py_REFCNT(hooks) == 1 ? (Hook *)PyDict_GetItemWithError(hooks, key) : nullptr;
    if (hook && Py_REFCNT((PyObject *)hook) == 1) {  // no graph has it any more
        put(hook->site, site);
        if (hook->more) Py_DecRef(hook->more), hook->more = nullptr;
        Py_NewRef(hooks);
    } else {
        hooks = key && (hook = make_hook((PyObject *)self, site)) ? PyDict_New() : nullptr;
        const bool done = hooks && PyDict_SetItem(hooks, key, (PyObject *)hook) == 0;
        if (hook) Py_DecRef((PyObject *)hook);
        if (!done && hooks) Py_DecRef(hooks), hooks = nullptr;
    }
    if (key) Py_DecRef(key);
    return hooks;
}

// Gives hooks to a node and leaves no trace of them on the tensor: `private_api.add_hook`. The node takes them from where the tensor
// has its own. To set them there by name is to add them to the tensor first, and to take them off.
bool add_hooks(const Functions *torch, PyObject *tensor, PyObject *node, PyObject *hooks) {
    if (torch->hooks >= 0) {
        PyObject **place = (PyObject **)((char *)tensor + torch->hooks), *own = *place;
        *place = Py_NewRef(hooks);
        PyObject *done = PyObject_CallMethodObjArgs(node, GIVE.get(), tensor, nullptr);
        *place = own;
        Py_DecRef(hooks);
        if (done) Py_DecRef(done);
        return done || (PyErr_Clear(), false);
    }
    PyObject *give = attribute(node, GIVE), *own = give ? attribute(tensor, HOOKS) : nullptr;
    bool given = false;
    if (own && PyObject_SetAttr(tensor, HOOKS.get(), hooks) == 0) {
        PyObject *done = PyObject_CallFunctionObjArgs(give, tensor, nullptr);
        given = done != nullptr;
        if (done) Py_DecRef(done);
        else PyErr_Clear();
        PyObject_SetAttr(tensor, HOOKS.get(), own);
    }
    PyErr_Clear();
    for (PyObject *one : {give, own})
        if (one) Py_DecRef(one);
    return given;
}

bool watch_made(Gradients *self, PyObject *tensor, PyObject *site, PyObject *node) {
    PyObject *known = hook_of(self->held[WATCHED], u64(tensor)), *number = number_of(node);
    Hook *same = known && (PyObject *)Py_TYPE(known) == HOOK ? (Hook *)known : nullptr;
    bool done = false;
    if (number && same && PyObject_RichCompareBool(same->number, number, Py_EQ) == 1) {
        done = add_site(same, site);
    } else if (number) {
        Hook *hook;
        PyObject *hooks = hooks_with(self, site, hook);
        if (hooks) {
            put(hook->number, number);
            done = add_hooks(functions_of(self->held[INTAKE]), tensor, node, hooks) && set_hook(self->held[WATCHED], u64(tensor), (PyObject *)hook) &&
                   take_dictionary(self->held[WATCHED], hooks);
            Py_DecRef(hooks);
        }
    }
    if (number) Py_DecRef(number);
    return done;
}

PyObject *watch(PyObject *object, PyObject *const *arguments, Py_ssize_t given) {
    if (given != 2) return PyErr_Format(PyExc_TypeError, "a tensor and a site wanted");
    return PyBool_FromLong(watch_gradient(object, arguments[0], arguments[1]));
}

PyObject *number(PyObject *, PyObject *node) {
    PyObject *found = number_of(node);
    return found ? found : Py_NewRef(Py_None);
}

PyObject *hook(PyObject *object, PyObject *site) { return (PyObject *)make_hook(object, site); }

PyMethodDef METHODS[] = {
    {"watch", (PyCFunction)(void (*)())watch, METH_FASTCALL, nullptr},
    {"hook", hook, METH_O, nullptr},
    {"number", number, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool watch_gradient(PyObject *object, PyObject *tensor, PyObject *site) {
    Gradients *self = (Gradients *)object;
    if (!self->held[WATCHED] || PyDict_Size(self->held[ELSEWHERE])) return false;
    PyObject *node = attribute(tensor, NODE);
    const bool done = node && node != Py_None && watch_made(self, tensor, site, node);
    if (node) Py_DecRef(node);
    PyErr_Clear();
    return done;
}

bool is_gradients(PyObject *object) { return TYPE && (PyObject *)Py_TYPE(object) == TYPE; }

PyObject *new_gradients(PyObject *, PyObject *const *arguments, Py_ssize_t given) {
    if (!Gradients::define(TYPE, "introspect_cli.tensors._kernels.Gradients", METHODS)) return nullptr;
    if (!HOOK) {
        PyObject *made = PyType_FromSpec(&HOOK_SPEC);
        // pickling a tensor warns of hooks that get lost, unless they are meant to be
        if (!made || PyObject_SetAttrString(made, "__torch_unserializable__", Py_True)) return nullptr;
        HOOK = made;
    }
    if (given == HELD && !(is_intake(arguments[INTAKE]) && is_hooks(arguments[WATCHED]) && PyDict_Check(arguments[ELSEWHERE])))
        return PyErr_Format(PyExc_TypeError, "an intake, hooks and a dictionary wanted");
    return Gradients::make(TYPE, arguments, given);
}

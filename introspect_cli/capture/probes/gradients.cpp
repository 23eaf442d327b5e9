// The hook of gradients.py that a tensor's gradient is given to: it records without a frame of Python, so that no handler of the
// script's comes in between, and a backward pass of hundreds of modules is not slowed down.
#include "probes.h"

#include <structmember.h>

#include <cstddef>

namespace {

enum Held { RECORD, GUARDED, RECORDER, INTAKE, WATCHED, WATCH_LEAF, ENABLED, BACKWARD, RECOMPUTE, HELD };
struct Gradients {  // known to the garbage collector
    PyObject_HEAD
    PyObject *held[HELD];
};

Name ON{"on"}, WANTED{"wanted"}, NODE{"grad_fn"}, HOOKS{"_backward_hooks"}, NUMBER{"_sequence_nr"}, REGISTER{"_register_hook_dict"},
    REQUIRES{"requires_grad"};

struct Hook {  // no list unless there are several sites: what the garbage collector counts costs the script its rounds
    PyObject_HEAD
    PyObject *gradients, *site, *more;
    unsigned long thread;  // with the number, which autograd node it is on; 0 on a leaf, where the number is the hook's
    long long number;

    void free() { Py_DecRef(gradients), Py_DecRef(site), Py_DecRef(more); }
};

PyObject *sites_of(PyObject *object) {
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
    PyObject *every = sites_of(object);
    PyObject *done = every ? PyObject_CallFunctionObjArgs(own->held[RECORD], every, gradient, nullptr) : nullptr;
    Py_DecRef(every);
    return done;
}

PyMemberDef MEMBERS[] = {
    {"number", T_LONGLONG, offsetof(Hook, number), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyMethodDef HOOK_METHODS[] = {{"add", add, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyType_Slot HOOK_SLOTS[] = {
    {Py_tp_dealloc, (void *)forget<Hook>}, {Py_tp_call, (void *)call_hook}, {Py_tp_members, MEMBERS},
    {Py_tp_methods, HOOK_METHODS}, {0, nullptr}};
Class HOOK{"introspect_cli.tensors._kernels.Hook", sizeof(Hook), HOOK_SLOTS};

PyObject *hook(PyObject *gradients, PyObject *site) {
    Hook *made = HOOK.make<Hook>();
    if (made) made->gradients = Py_NewRef(gradients), made->site = Py_NewRef(site), made->number = -1;
    return (PyObject *)made;
}

// Has an autograd node keep a hook, and leaves none on its tensor, where the script could see it; false with an exception.
bool put_on_node(PyObject *tensor, PyObject *node, PyObject *hook) {
    PyObject *before = PyObject_GetAttr(tensor, HOOKS.get()), *alone = before ? PyDict_New() : nullptr, *done = nullptr;
    if (alone && !PyObject_SetItem(alone, Py_False, hook) && !PyObject_SetAttr(tensor, HOOKS.get(), alone)) {
        done = PyObject_CallMethodObjArgs(node, REGISTER.get(), tensor, nullptr);
        PyObject *kind, *error, *trace;
        PyErr_Fetch(&kind, &error, &trace);
        if (PyObject_SetAttr(tensor, HOOKS.get(), before)) PyErr_Clear();
        PyErr_Restore(kind, error, trace);
    }
    for (PyObject *one : {before, alone, done}) Py_DecRef(one);
    return done;
}

// Has the gradient of a tensor with a node recorded at a site: by the hook that it has, or a new one. False with an exception.
bool watch_node(PyObject *gradients, PyObject *tensor, PyObject *node, PyObject *site, bool is_recomputed) {
    PyObject *watched = ((Gradients *)gradients)->held[WATCHED], *asked = PyObject_CallMethodObjArgs(node, NUMBER.get(), nullptr);
    PyObject *key = asked ? PyLong_FromVoidPtr(tensor) : nullptr;
    if (!key) return asked ? Py_DecRef(asked) : void(), false;
    const long long number = PyLong_AsLongLong(asked);
    const unsigned long thread = PyThread_get_thread_ident();
    Hook *known = (Hook *)PyDict_GetItemWithError(watched, key);
    PyObject *done = nullptr;
    if (PyErr_Occurred()) {
    } else if (known && known->thread == thread && known->number == number) {
        done = is_recomputed ? Py_NewRef(Py_None) : add((PyObject *)known, site);
    } else if ((done = hook(gradients, site))) {
        ((Hook *)done)->thread = thread, ((Hook *)done)->number = number;
        if (PyObject_SetItem(watched, key, done) || !put_on_node(tensor, node, done)) Py_DecRef(done), done = nullptr;
    }
    for (PyObject *one : {asked, key, done}) Py_DecRef(one);
    return done;
}

bool watch_at(PyObject *object, PyObject *tensor, PyObject *site, bool is_recomputed) {
    PyObject *node = PyObject_GetAttr(tensor, NODE.get());
    if (!node) {  // a view of which autograd no longer knows the maker, since its base was written over, has no gradient
        const bool is_given_up = PyErr_ExceptionMatches(PyExc_RuntimeError);
        if (is_given_up) PyErr_Clear();
        return is_given_up;
    }
    bool done;
    if (node == Py_None) {
        PyObject *recomputed = is_recomputed ? Py_True : Py_False;
        PyObject *answer = PyObject_CallFunctionObjArgs(((Gradients *)object)->held[WATCH_LEAF], tensor, site, recomputed, nullptr);
        done = answer, Py_DecRef(answer);
    } else {
        done = watch_node(object, tensor, node, site, is_recomputed);
    }
    Py_DecRef(node);
    return done;
}

PyObject *watch(PyObject *object, PyObject *const *given, Py_ssize_t count) {
    if (count != 3) return PyErr_Format(PyExc_TypeError, "a tensor, a site and whether it is recomputed wanted");
    return watch_at(object, given[0], given[1], given[2] == Py_True) ? Py_NewRef(Py_None) : nullptr;
}

// The number of a site among those of a module, borrowed; null, perhaps with an exception, where it has none.
PyObject *site_in(PyObject *sites, PyObject *phase, PyObject *kind, PyObject *path, PyObject *call) {
    PyObject *key = PyTuple_Pack(4, phase, kind, path, call), *site = key ? PyDict_GetItemWithError(sites, key) : nullptr;
    Py_DecRef(key);
    return site;
}

// What is done with a plain tensor that goes into a module or comes out, where its sites are known: it is recorded, and its gradient
// will be. 0, and nothing is done, where it goes the long way; -1 with an exception.
int take_one(PyObject *object, PyObject *value, PyObject *sites, PyObject *phase, PyObject *kinds, PyObject *path, PyObject *call) {
    Gradients *own = (Gradients *)object;
    if (own->held[INTAKE] == Py_None || !is_seen_by_nobody(own->held[INTAKE], value)) return 0;
    PyObject *kind = PyTuple_GetItem(kinds, 0), *gradient = PyTuple_GetItem(kinds, 1);
    bool goes_back = gradient != Py_None && attribute_is(value, REQUIRES, Py_True);
    if (goes_back) {
        PyObject *enabled = PyObject_CallNoArgs(own->held[ENABLED]);
        if (!enabled) return -1;
        goes_back = enabled == Py_True;
        Py_DecRef(enabled);
    }
    const bool records = kind != Py_None;
    PyObject *at = records ? site_in(sites, phase, kind, path, call) : nullptr;
    PyObject *back = goes_back ? site_in(sites, own->held[BACKWARD], gradient, path, call) : nullptr;
    if ((records && !at) || (goes_back && !back)) return PyErr_Occurred() ? -1 : 0;
    if (records && record_at(own->held[INTAKE], &at, 1, value) < 0) return PyErr_Clear(), 0;
    return !back || watch_at(object, value, back, phase == own->held[RECOMPUTE]) ? 1 : -1;
}

// The number of values that were taken before the first that goes the long way.
PyObject *take(PyObject *object, PyObject *const *given, Py_ssize_t count) {
    enum { VALUES, PATHS, SITES, PHASE, KINDS, CALL, ALL };
    if (count != ALL || !PyTuple_Check(given[VALUES]) || !PyTuple_Check(given[PATHS]) || !PyDict_Check(given[SITES]) ||
        !PyTuple_Check(given[KINDS]) || PyTuple_Size(given[KINDS]) != 2)
        return PyErr_Format(PyExc_TypeError, "values, paths, sites, a phase, two kinds and a call wanted");
    const Py_ssize_t all = least(PyTuple_Size(given[VALUES]), PyTuple_Size(given[PATHS]));
    Py_ssize_t done = 0;
    for (int taken = 1; done < all; done++) {
        taken = take_one(object, PyTuple_GetItem(given[VALUES], done), given[SITES], given[PHASE], given[KINDS],
                         PyTuple_GetItem(given[PATHS], done), given[CALL]);
        if (taken < 0) return nullptr;
        if (!taken) break;
    }
    return PyLong_FromSsize_t(done);
}

int visit_all(PyObject *object, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(object));
    for (PyObject *one : ((Gradients *)object)->held) Py_VISIT(one);
    return 0;
}
int clear_all(PyObject *object) {
    for (PyObject *&one : ((Gradients *)object)->held) {
        PyObject *before = one;
        one = nullptr;
        Py_DecRef(before);
    }
    return 0;
}
void free_all(PyObject *object) {
    PyObject *type = (PyObject *)Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear_all(object);
    PyObject_GC_Del(object);
    Py_DecRef(type);
}

PyMethodDef METHODS[] = {
    {"hook", hook, METH_O, nullptr},
    {"watch", (PyCFunction)(void (*)())watch, METH_FASTCALL, nullptr},
    {"take", (PyCFunction)(void (*)())take, METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot SLOTS[] = {{Py_tp_dealloc, (void *)free_all}, {Py_tp_traverse, (void *)visit_all}, {Py_tp_clear, (void *)clear_all},
                       {Py_tp_methods, METHODS}, {0, nullptr}};
Class CLASS{"introspect_cli.tensors._kernels.Gradients", sizeof(Gradients), SLOTS, Py_TPFLAGS_HAVE_GC};

}  // namespace

PyObject *new_gradients(PyObject *, PyObject *const *arguments, Py_ssize_t given) {
    // pickling a tensor warns of hooks that get lost, unless they are meant to be
    if (!HOOK.get() || PyObject_SetAttrString(HOOK.made, "__torch_unserializable__", Py_True)) return nullptr;
    if (given != HELD || (arguments[INTAKE] != Py_None && !is_intake(arguments[INTAKE])) || !PyDict_Check(arguments[WATCHED]))
        return PyErr_Format(PyExc_TypeError, "%d arguments wanted, an intake and a dictionary among them", HELD);
    Gradients *self = CLASS.make<Gradients>();
    for (int i = 0; self && i < HELD; i++) self->held[i] = Py_NewRef(arguments[i]);
    return (PyObject *)self;
}

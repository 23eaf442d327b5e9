// What the compiled twins of probes share. They do what their Python does for what is plain, in one call and without a
// frame of introspect's, so that no signal handler and no compiler comes in between; whatever is not plain they leave to it.
#pragma once
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include "intake.h"

#include <initializer_list>

HIDDEN PyObject *new_gradients(PyObject *, PyObject *const *arguments, Py_ssize_t given);
HIDDEN PyObject *new_modules(PyObject *, PyObject *const *arguments, Py_ssize_t given);
HIDDEN PyObject *new_operators(PyObject *, PyObject *const *arguments, Py_ssize_t given);
HIDDEN PyObject *new_standing(PyObject *, PyObject *);
HIDDEN PyObject *new_stood(PyObject *, PyObject *);
HIDDEN PyObject *are_these(PyObject *, PyObject *const *arguments, Py_ssize_t given);
HIDDEN PyObject *record_gradients(PyObject *, PyObject *const *arguments, Py_ssize_t given);
HIDDEN PyObject *record_state(PyObject *, PyObject *const *arguments, Py_ssize_t given);

// Takes what modules hold under some names, each value once; false, without an exception, where `values` of standing.cpp has None.
HIDDEN bool take_standing(PyObject *standing, PyObject *names, bool whole, Objects &into);

// Has the gradient of a tensor recorded at a site; false, and nothing is done, where Python has to. Never an exception.
HIDDEN bool watch_gradient(PyObject *gradients, PyObject *tensor, PyObject *site);
HIDDEN bool is_gradients(PyObject *object);

// The hooks of a step, by the tensor that each is on: borrowed, or null.
HIDDEN PyObject *new_hooks(PyObject *, PyObject *);
HIDDEN bool is_hooks(PyObject *object);
HIDDEN PyObject *hook_of(PyObject *hooks, u64 tensor);
HIDDEN bool set_hook(PyObject *hooks, u64 tensor, PyObject *hook);  // false with an exception
// The dictionary that is next to be taken, if nobody else refers to it: borrowed, null where there is none.
HIDDEN PyObject *next_dictionary(PyObject *hooks);
HIDDEN bool take_dictionary(PyObject *hooks, PyObject *dictionary);  // in its place; false with an exception

inline u64 HOLDERS = 0;  // made so far

// An object of introspect's that holds N others and is known to the garbage collector.
template <int N> struct Holder {
    PyObject_HEAD
    u64 number;  // which no other has had
    PyObject *held[N];

    static int visit_all(PyObject *object, visitproc visit, void *arg) {
        Py_VISIT(Py_TYPE(object));
        for (PyObject *one : ((Holder *)object)->held) Py_VISIT(one);
        return 0;
    }
    static int clear_all(PyObject *object) {
        for (PyObject *&one : ((Holder *)object)->held) {
            PyObject *before = one;
            one = nullptr;
            if (before) Py_DecRef(before);
        }
        return 0;
    }
    static void free_all(PyObject *object) {
        PyObject *type = (PyObject *)Py_TYPE(object);
        PyObject_GC_UnTrack(object);
        clear_all(object);
        PyObject_GC_Del(object);
        Py_DecRef(type);
    }
    // The type of these objects, made when it is first asked for; the name and the methods stay where they are.
    static PyObject *define(PyObject *&type, const char *name, PyMethodDef *methods) {
        PyType_Slot slots[] = {{Py_tp_dealloc, (void *)free_all}, {Py_tp_traverse, (void *)visit_all},
                               {Py_tp_clear, (void *)clear_all}, {Py_tp_methods, (void *)methods}, {0, nullptr}};
        PyType_Spec spec = {name, sizeof(Holder), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
        return type ? type : type = PyType_FromSpec(&spec);
    }
    static PyObject *make(PyObject *type, PyObject *const *arguments, Py_ssize_t given) {
        if (given != N) return PyErr_Format(PyExc_TypeError, "%d arguments wanted, %zd given", N, given);
        Holder *self = PyObject_GC_New(Holder, (PyTypeObject *)type);
        if (!self) return nullptr;
        self->number = ++HOLDERS;
        for (int i = 0; i < N; i++) self->held[i] = Py_NewRef(arguments[i]);
        PyObject_GC_Track((PyObject *)self);
        return (PyObject *)self;
    }
};

// A name that attributes are asked for by, made once.
struct Name {
    const char *text;
    PyObject *made = nullptr;
    PyObject *get() { return made ? made : made = PyUnicode_InternFromString(text); }
};

// A name that attributes of this package's objects are asked for by. Most are slots, and are read where they lie: asking by name
// takes ten times as long, and a call of a module asks for forty. Nothing promises the place, so it is looked for in an object
// that is made for that; a class where it is not found is asked by name.
struct Slot {
    static constexpr int CLASSES = 4;
    Name name;
    struct {
        PyObject *type;
        Py_ssize_t at;  // 0 where it is no slot
    } met[CLASSES] = {};
    int count = 0;

    static Py_ssize_t find(PyObject *type, PyObject *name) {
        PyObject *member = PyObject_GetAttr(type, name), *size = PyObject_GetAttrString(type, "__basicsize__");
        const Py_ssize_t bytes = size ? PyLong_AsSsize_t(size) : 0;
        const bool is_slot = member && (PyObject *)Py_TYPE(member) == (PyObject *)&PyMemberDescr_Type;
        PyObject *mark = is_slot ? PyList_New(0) : nullptr;
        PyObject *made = mark ? PyObject_CallMethod((PyObject *)&PyBaseObject_Type, "__new__", "O", type) : nullptr;
        Py_ssize_t found = 0;
        if (made && PyObject_SetAttr(made, name, mark) == 0)
            for (Py_ssize_t at = sizeof(PyObject); at + Py_ssize_t(sizeof mark) <= bytes; at += sizeof mark)
                if (*(PyObject **)((char *)made + at) == mark) found = found ? -1 : at;
        for (PyObject *one : {member, size, mark, made})
            if (one) Py_DecRef(one);
        PyErr_Clear();
        return found > 0 ? found : 0;
    }
    // Where an object has it; null where it has to be asked by name.
    PyObject **in(PyObject *of) {
        PyObject *type = (PyObject *)Py_TYPE(of);
        for (int i = 0; i < count; i++)
            if (met[i].type == type) return met[i].at ? (PyObject **)((char *)of + met[i].at) : nullptr;
        if (count < CLASSES) {
            const Py_ssize_t at = find(type, name.get());
            if (count < CLASSES) met[count] = {Py_NewRef(type), at}, count++;
        }
        return nullptr;
    }
};

// An attribute, or null without an exception.
INLINE PyObject *attribute(PyObject *of, Name &name) {
    PyObject *found = PyObject_GetAttr(of, name.get());
    if (!found) PyErr_Clear();
    return found;
}
INLINE PyObject *attribute(PyObject *of, Slot &slot) {
    PyObject **place = slot.in(of);
    if (!place) return attribute(of, slot.name);
    return *place ? Py_NewRef(*place) : nullptr;
}
INLINE bool attribute_is(PyObject *of, Name &name, PyObject *wanted) {
    PyObject *found = attribute(of, name);
    if (found) Py_DecRef(found);
    return found == wanted;
}
INLINE bool attribute_is(PyObject *of, Slot &slot, PyObject *wanted) {
    PyObject **place = slot.in(of);
    return place ? *place == wanted : attribute_is(of, slot.name, wanted);
}
template <class Asked> INLINE i64 integer(PyObject *of, Asked &name) {  // an attribute that is a number, none of which is -2
    PyObject *found = attribute(of, name);
    i64 value = found ? PyLong_AsLongLong(found) : -2;
    if (found) Py_DecRef(found);
    return PyErr_Occurred() ? (PyErr_Clear(), -2) : value;
}
INLINE bool set_attribute(PyObject *of, Slot &slot, PyObject *value) {  // false with an exception
    PyObject **place = slot.in(of);
    if (!place) return PyObject_SetAttr(of, slot.name.get(), value) == 0;
    PyObject *before = *place;
    *place = Py_NewRef(value);
    if (before) Py_DecRef(before);
    return true;
}

// What this thread has in a `threading.local`: asking for it takes longer than all that is then looked at. It lives as long as
// the thread and what holds the local do; `of` is the number of the latter.
struct Local {
    u64 of;
    PyObject *values;
};
// A borrowed dictionary; null with an exception, which is the script's: python makes what a thread has when it first asks.
template <int N> INLINE PyObject *values_of(Holder<N> *self, int local, Local &last, Name &dictionary) {
    if (last.of == self->number) return last.values;
    PyObject *values = PyObject_GetAttr(self->held[local], dictionary.get());
    if (!values) return nullptr;
    Py_DecRef(values);  // the thread has it
    last = {self->number, values};
    return values;
}
INLINE PyObject *value_of(PyObject *values, Name &name) {  // borrowed, or null without an exception
    PyObject *found = PyDict_GetItemWithError(values, name.get());
    if (!found) PyErr_Clear();
    return found;
}
// The integer that a function without arguments returns; -2 for anything else.
INLINE i64 answered(PyObject *callable) {
    PyObject *answer = PyObject_CallNoArgs(callable);
    i64 value = answer ? PyLong_AsLongLong(answer) : -2;
    if (answer) Py_DecRef(answer);
    return PyErr_Occurred() ? (PyErr_Clear(), -2) : value;
}
INLINE bool answer_is(PyObject *callable, PyObject *wanted) {
    PyObject *answer = PyObject_CallNoArgs(callable);
    if (answer) Py_DecRef(answer);
    else PyErr_Clear();
    return answer == wanted;
}

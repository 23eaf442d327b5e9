// The call of a module that is nothing but a call: known, called by another module in an ordinary forward pass, given
// tensors and returning one. It is what `recorded` of module_calls.py does; whatever is different goes there.
#include "probes.h"

namespace {

enum Held {
    PROBE, VALUES, CALLED, LEFT, LEARN, BY_HAND, ORIGINAL, GUARDED, STACK, STATES, RECORDER, DRAWS, FORWARD, TENSOR, GRAPH_TASK,
    TRACING, MODES, GRAD_MODE, COMPILED_CALL, SEQUENTIAL, SEQUENTIAL_FORWARD, SEQUENTIAL_ITER, INTAKE, GRADIENTS, HELD
};
using Modules = Holder<HELD>;

Name CALLS{"calls"}, PHASE{"phase"}, RUN{"forward"}, NEEDS{"requires_grad"}, CALL{"__call__"}, ITER{"__iter__"},
    MODULES{"_modules"}, DICTIONARY{"__dict__"};
Slot COUNTS{{"calls"}}, WANTED{{"wanted"}}, STEP{{"step"}}, REFERENCE{{"reference"}}, PLAIN{{"plain"}}, COMPILED{{"compiled"}},
    ON_VALUE{{"on_value"}}, OUTPUTS{{"outputs"}}, MOVED{{"moved"}}, WATCHED{{"watched"}}, PER_CALL{{"forward"}}, INPUTS{{"inputs"}},
    OUTPUT{{"output"}}, ON{{"on"}}, ENTRY{{"entry"}};
thread_local Local stack{};

// ---- what a sequence hands on
//
// `nn.Sequential` gives each module what the one before it returned, and runs nothing in between. Such a tensor is not read
// again: its input is noted with the summary that its output has.

PyObject *innermost(PyObject *calls) {  // of the calls under way, the state of the last; null where there is none
    const Py_ssize_t depth = PyList_Size(calls);
    return depth > 0 ? PyList_GetItem(calls, depth - 1) : nullptr;
}

struct Handed {  // what a module of a sequence has just returned in this thread; it refers to nothing
    const Modules *by;
    const PyObject *tensor, *module, *sequence;  // the last: the state of the sequence
    i64 writes, slot, table;
    Py_ssize_t place;  // of the module in the sequence, -1 if not known
};
thread_local Handed handed{};

bool is_ours(Modules *self, PyObject *type) {  // whether calls of a class's modules come to us, and to nobody before us
    PyObject *entry = attribute(self->held[PROBE], ENTRY), *call = entry ? attribute(type, CALL) : nullptr;
    const bool same = entry && entry != Py_None && entry == call;
    for (PyObject *one : {entry, call})
        if (one) Py_DecRef(one);
    return same;
}

// The modules of a module that called, if it is a sequence that runs torch's own code: a new reference, or null.
PyObject *sequence_of(Modules *self, PyObject *state) {
    if (!attribute_is(state, PLAIN, self->held[SEQUENTIAL]) || self->held[SEQUENTIAL_FORWARD] == Py_None) return nullptr;
    if (!attribute_is(self->held[SEQUENTIAL], RUN, self->held[SEQUENTIAL_FORWARD]) ||
        !attribute_is(self->held[SEQUENTIAL], ITER, self->held[SEQUENTIAL_ITER]))
        return nullptr;
    PyObject *reference = attribute(state, REFERENCE), *module = reference ? PyWeakref_GetObject(reference) : nullptr;
    PyObject *own = nullptr, *modules = nullptr;
    if (module && (PyObject *)Py_TYPE(module) == self->held[SEQUENTIAL]) own = PyObject_GenericGetDict(module, nullptr);
    if (own && PyDict_Check(own) && !PyDict_GetItemWithError(own, RUN.get()))
        modules = PyDict_GetItemWithError(own, MODULES.get());
    if (modules && (PyObject *)Py_TYPE(modules) == (PyObject *)&PyDict_Type) Py_NewRef(modules);
    else modules = nullptr;
    for (PyObject *one : {own, reference})
        if (one) Py_DecRef(one);
    PyErr_Clear();
    return modules;
}

// Where in a dictionary the one entry is that has a module, -1 where there is none, or several: what `PyDict_Next` is told.
Py_ssize_t place_of(PyObject *modules, const PyObject *module) {
    Py_ssize_t at = 0, before = 0, found = -1;
    PyObject *key, *value;
    for (; PyDict_Next(modules, &at, &key, &value); before = at)
        if (value == module) {
            if (found >= 0) return -1;
            found = before;
        }
    return found;
}

// Where in a dictionary a module is, if it comes right after another; -1 if not. A sequence of thousands is gone through in its
// order: `place`, where the other one was called from, spares looking for it.
Py_ssize_t next_place(PyObject *modules, const PyObject *one, const PyObject *other, Py_ssize_t place) {
    PyObject *key, *value;
    Py_ssize_t at = place;
    if (place < 0 || !PyDict_Next(modules, &at, &key, &value) || value != one) {
        if ((at = place_of(modules, one)) < 0 || !PyDict_Next(modules, &at, &key, &value)) return -1;
    }
    const Py_ssize_t next = at;
    return PyDict_Next(modules, &at, &key, &value) && value == other ? next : -1;
}

// ---- a call

// Whether nothing but the recorder would notice what we ask tensors, and nothing has been drawn since it last looked.
bool is_quiet(Modules *self) {
    if (!attribute_is(self->held[VALUES], ON_VALUE, Py_None) || answered(self->held[MODES])) return false;
    PyObject *moved = attribute(self->held[DRAWS], MOVED);
    PyObject *answer = moved && PyCFunction_Check(moved) ? PyObject_CallNoArgs(moved) : nullptr;  // no frame of introspect's
    int has_moved = answer ? PyObject_IsTrue(answer) : 1;
    if (moved) Py_DecRef(moved);
    if (answer) Py_DecRef(answer);
    PyErr_Clear();
    return !has_moved;
}

struct Call {
    PyObject *module, *arguments;
    PyObject *values;          // of this thread, in the stack: borrowed
    PyObject *calls, *state;   // owned
    i64 number;
    Py_ssize_t place;  // of the module in the sequence that calls it, -1 if not known
};

// Remembers what a module returns to the one that called it.
void hand_on(Modules *self, const Call &call, PyObject *tensor, i64 slot) {
    PyObject *state = slot >= 0 ? innermost(call.calls) : nullptr;
    if (!state || !attribute_is(state, PLAIN, self->held[SEQUENTIAL]) || !is_ours(self, (PyObject *)Py_TYPE(call.module))) return;
    handed = {self, tensor, call.module, state, writes_of(self->held[INTAKE], tensor), slot, table_of(self->held[INTAKE]), call.place};
}

// Whether what goes into a module is what the one before it in its sequence returned; the place of the module is known then.
bool is_handed(Modules *self, const Handed &last, Call &call, PyObject *tensor) {
    if (last.by != self || last.tensor != tensor || last.writes < 0 || writes_of(self->held[INTAKE], tensor) != last.writes) return false;
    PyObject *state = innermost(call.calls);
    if (!state || state != last.sequence || !is_ours(self, (PyObject *)Py_TYPE(call.module))) return false;
    PyObject *modules = sequence_of(self, state);
    call.place = modules ? next_place(modules, last.module, call.module, last.place) : -1;
    if (modules) Py_DecRef(modules);
    return call.place >= 0;
}

// The sites of the call, borrowed from the module's state; null without an exception where there are none yet.
PyObject *sites_of(const Call &call) {
    PyObject *every = attribute(call.state, PER_CALL), *found = nullptr;
    if (every && PyList_Check(every) && call.number < PyList_Size(every)) found = PyList_GetItem(every, call.number);
    if (every) Py_DecRef(every);
    return found;
}

// Whether the module is known to be plain, and so are the sites of what goes into this call: `found` becomes a list of their
// pairs, a new reference, or null where nothing of it is recorded.
bool is_known(Modules *self, const Call &call, PyObject *&found) {
    if (!attribute_is(call.state, PLAIN, (PyObject *)Py_TYPE(call.module))) return false;
    if (!attribute_is(self->held[VALUES], INPUTS, Py_True) || !attribute_is(call.state, WATCHED, Py_True)) return true;
    PyObject *sites = sites_of(call), *inputs = sites ? attribute(sites, INPUTS) : nullptr;
    const bool known = inputs && PyList_Check(inputs) && PyList_Size(inputs) >= PyTuple_Size(call.arguments);
    if (known) found = inputs;
    else if (inputs) Py_DecRef(inputs);
    return known;
}

// Has Python look at a call that is met for the first time: `_learn` of modules.py. 1 if it may be plain after that, 0 if not, -1
// with an exception, which is the script's.
int learn(Modules *self, const Call &call) {
    PyObject *answer = PyObject_CallFunctionObjArgs(self->held[LEARN], call.module, call.state, call.arguments, nullptr);
    if (answer) Py_DecRef(answer);
    return answer ? answer == Py_True : -1;
}

// Looks whether a call is plain, if the module is, and which of the module it is in this step.
bool is_plain(Modules *self, Call &call) {
    if (!attribute_is(self->held[RECORDER], WANTED, Py_True) || answered(self->held[GRAPH_TASK]) != -1) return false;
    for (Py_ssize_t i = 0; i < PyTuple_Size(call.arguments); i++)
        if ((PyObject *)Py_TYPE(PyTuple_GetItem(call.arguments, i)) != self->held[TENSOR]) return false;
    PyObject *caller = innermost(call.calls);
    if (!caller || caller == Py_None) return false;
    if (value_of(call.values, PHASE) != self->held[FORWARD]) return false;
    PyObject *key = PyLong_FromVoidPtr(call.module);
    call.state = key ? PyDict_GetItemWithError(self->held[STATES], key) : nullptr;
    if (key) Py_DecRef(key);
    if (!call.state) return false;
    Py_NewRef(call.state);
    PyObject *reference = attribute(call.state, REFERENCE);
    const bool is_of = reference && PyWeakref_GetObject(reference) == call.module;
    if (reference) Py_DecRef(reference);
    if (!is_of || !attribute_is(call.state, COMPILED, Py_False) || !is_quiet(self)) return false;
    if (!answer_is(self->held[TRACING], Py_None)) return false;
    PyObject *counts = attribute(call.state, COUNTS);
    if (!counts) return false;
    PyObject *count = integer(call.state, STEP) == integer(self->held[RECORDER], STEP)
                          ? PyDict_GetItemWithError(counts, self->held[FORWARD]) : nullptr;
    call.number = count ? PyLong_AsLongLong(count) : 0;
    Py_DecRef(counts);
    return !PyErr_Occurred() && call.number >= 0;
}

// Counts the call: `ModuleState.next_call`.
bool counted(Modules *self, const Call &call) {
    PyObject *counts = attribute(call.state, COUNTS), *step = attribute(self->held[RECORDER], STEP);
    PyObject *next = PyLong_FromLongLong(call.number + 1);
    bool done = counts && step && next;
    if (done && integer(call.state, STEP) != PyLong_AsLongLong(step)) {
        // what stands alone is overwritten: making it anew takes longer
        if (PyDict_Size(counts) != 1 || !PyDict_GetItemWithError(counts, self->held[FORWARD])) PyDict_Clear(counts);
        done = set_attribute(call.state, STEP, step);
    }
    done = done && PyDict_SetItem(counts, self->held[FORWARD], next) == 0;
    for (PyObject *one : {counts, step, next})
        if (one) Py_DecRef(one);
    return done;
}

// Records a tensor, which `known` has where a sequence hands it on, and has its gradient watched: its slot, -1 where it was
// not recorded, or -2 with an exception, which is the script's.
i64 record(Modules *self, PyObject *value, PyObject *sites, const Handed *known = nullptr) {
    PyObject *site = PyTuple_GetItem(sites, 0), *gradient = PyTuple_GetItem(sites, 1);
    if (!site || !gradient) return PyErr_Clear(), -1;
    i64 slot = -1;
    PyObject *none = PyLong_FromLong(-1), *left_site = none, *left_gradient = none;
    if (PyLong_AsLongLong(site) >= 0) {
        if (known && note_again(self->held[INTAKE], site, known->slot, known->table)) slot = known->slot;
        else if ((slot = record_at(self->held[INTAKE], &site, 1, value)) < 0) left_site = site;
    }
    PyErr_Clear();
    if (PyLong_AsLongLong(gradient) >= 0 && answer_is(self->held[GRAD_MODE], Py_True)) {
        // What is left to Python is done there in the same order.
        const bool done = left_site == none && watch_gradient(self->held[GRADIENTS], value, gradient);
        if (!done && attribute_is(value, NEEDS, Py_True)) left_gradient = gradient;
    }
    PyErr_Clear();
    PyObject *done = left_site == none && left_gradient == none
                         ? Py_NewRef(Py_None)
                         : PyObject_CallFunctionObjArgs(self->held[BY_HAND], value, left_site, left_gradient, nullptr);
    if (none) Py_DecRef(none);
    if (!done) return -2;
    if (PyLong_Check(done)) slot = PyLong_AsLongLong(done);
    Py_DecRef(done);
    return slot;
}

// Records what has come out; the result, a reference that is taken, or null with an exception, which is the script's.
PyObject *leave(Modules *self, const Call &call, PyObject *result) {
    if (!attribute_is(self->held[GUARDED], ON, Py_True)) return result;
    PyObject *own = PyObject_GenericGetDict(call.module, nullptr);
    PyObject *compiled = own ? PyDict_GetItemWithError(own, self->held[COMPILED_CALL]) : nullptr;
    bool plain = own && (!compiled || compiled == Py_None) && (PyObject *)Py_TYPE(result) == self->held[TENSOR] &&
                 attribute_is(call.state, PLAIN, (PyObject *)Py_TYPE(call.module)) &&
                 value_of(call.values, PHASE) == self->held[FORWARD] && is_quiet(self);
    if (own) Py_DecRef(own);
    PyErr_Clear();
    bool done = true;
    if (plain && attribute_is(self->held[VALUES], OUTPUTS, Py_True) && attribute_is(call.state, WATCHED, Py_True)) {
        PyObject *sites = sites_of(call), *pair = sites ? attribute(sites, OUTPUT) : nullptr;
        plain = pair && PyTuple_Check(pair);
        if (plain) {
            const i64 slot = record(self, result, pair);
            done = slot != -2;
            if (done) hand_on(self, call, result, slot);
        }
        if (pair) Py_DecRef(pair);
    }
    if (!plain) {
        PyObject *number = PyLong_FromLongLong(call.number);
        PyObject *left = PyObject_CallFunctionObjArgs(self->held[LEFT], call.module, call.state, number, result, nullptr);
        if (number) Py_DecRef(number);
        if (left) Py_DecRef(left);
        done = left;
    }
    if (done) return result;
    Py_DecRef(result);
    return nullptr;
}

// Calls the original with the module before the arguments.
PyObject *call_original(Modules *self, PyObject *module, PyObject *arguments, PyObject *keywords) {
    const Py_ssize_t given = PyTuple_Size(arguments);
    PyObject *all = PyTuple_New(given + 1);
    if (!all) return nullptr;
    PyTuple_SetItem(all, 0, Py_NewRef(module));
    for (Py_ssize_t i = 0; i < given; i++) PyTuple_SetItem(all, i + 1, Py_NewRef(PyTuple_GetItem(arguments, i)));
    PyObject *result = PyObject_Call(self->held[ORIGINAL], all, keywords);
    Py_DecRef(all);
    return result;
}

// Runs the module, on the stack of calls meanwhile.
PyObject *run(Modules *self, const Call &call, PyObject *keywords) {
    const Py_ssize_t depth = PyList_Size(call.calls);
    PyObject *result = PyList_Append(call.calls, call.state) ? nullptr : call_original(self, call.module, call.arguments, keywords);
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyList_SetSlice(call.calls, depth, PY_SSIZE_T_MAX, nullptr);
    PyErr_Restore(type, value, traceback);
    return result;
}

PyObject *plain_call(Modules *self, Call &call, PyObject *keywords, PyObject *inputs, const Handed &last) {
    for (Py_ssize_t i = 0; inputs && i < PyTuple_Size(call.arguments); i++) {
        PyObject *pair = Py_NewRef(PyList_GetItem(inputs, i)), *value = PyTuple_GetItem(call.arguments, i);
        const bool done = record(self, value, pair, is_handed(self, last, call, value) ? &last : nullptr) != -2;
        Py_DecRef(pair);
        if (!done) return nullptr;
        if (!attribute_is(self->held[GUARDED], ON, Py_True)) break;
    }
    PyObject *result = run(self, call, keywords);
    return result ? leave(self, call, result) : nullptr;
}

// Whether a call within another is none of the recorder's business: in a step that it does not want, or in a module that it
// leaves out. 1 if so, 0 if not, -1 with an exception that came while Python made a thread's stack, and is the script's.
int is_passed(Modules *self, Call &call) {
    if (!(call.values = values_of(self, STACK, stack, DICTIONARY))) return -1;
    PyObject *calls = value_of(call.values, CALLS);
    if (!calls || !PyList_Check(calls)) return 0;
    call.calls = Py_NewRef(calls);
    PyObject *caller = innermost(call.calls);
    return caller && (caller == Py_None || attribute_is(self->held[RECORDER], WANTED, Py_False));
}

PyObject *called(PyObject *object, PyObject *const *arguments, Py_ssize_t given) {
    Modules *self = (Modules *)object;
    if (given != 3 || !PyTuple_Check(arguments[1]) || !PyDict_Check(arguments[2]))
        return PyErr_Format(PyExc_TypeError, "a module, a tuple and a dictionary wanted");
    const Handed last = handed;
    handed = {};
    Call call{arguments[0], arguments[1], nullptr, nullptr, nullptr, 0, -1};
    const int passed = is_passed(self, call);
    if (passed) {
        if (call.calls) Py_DecRef(call.calls);
        return passed < 0 ? nullptr : call_original(self, arguments[0], arguments[1], arguments[2]);
    }
    bool plain = call.calls && !PyDict_Size(arguments[2]) && is_plain(self, call);
    PyObject *inputs = nullptr, *result = nullptr;
    PyErr_Clear();
    const int learnt = !plain || is_known(self, call, inputs) ? 1 : learn(self, call);
    if (learnt >= 0) {
        plain = plain && learnt && (inputs || is_known(self, call, inputs)) && counted(self, call);
        PyErr_Clear();
        result = plain ? plain_call(self, call, arguments[2], inputs, last)
                       : PyObject_CallFunctionObjArgs(self->held[CALLED], self->held[ORIGINAL], arguments[0], arguments[1],
                                                      arguments[2], nullptr);
    }
    for (PyObject *one : {inputs, call.calls, call.state})
        if (one) Py_DecRef(one);
    return result;
}

PyMethodDef METHODS[] = {
    {"called", (PyCFunction)(void (*)())called, METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyObject *TYPE = nullptr;

}  // namespace

PyObject *new_modules(PyObject *, PyObject *const *arguments, Py_ssize_t given) {
    if (!Modules::define(TYPE, "introspect_cli.tensors._kernels.Modules", METHODS)) return nullptr;
    if (given == HELD && !(PyDict_Check(arguments[STATES]) && is_intake(arguments[INTAKE]) && is_gradients(arguments[GRADIENTS])))
        return PyErr_Format(PyExc_TypeError, "states, an intake and gradients wanted");
    return Modules::make(TYPE, arguments, given);
}

// Operators as a dispatch mode is called with them, and the results of one that did the same a step ago: run by the same module,
// or by a node that was made for a known operator, and given what the same sites wrote. It is what `OpMode` and `record_results` of
// probe.py do; whatever is different goes there.
#include "probes.h"
#include "tensor.h"

namespace {

enum Held {
    PROBE, LEFT, BY_HAND, OF_PARAMETER, OVERLOAD, ORDER, RECORDER, ROWS, INTAKE, STACK, CALLS, OURS, FACTS, SCOPES, BY_NODE, SITES, PARAMETERS, NAMES, FLOATS, COMPILER, NODE, NEXT, GRAD_MODE, TRACING,
    BEGIN, TENSOR, PARAMETER, BACKWARD, OPTIMIZER, HELD
};
using Operators = Holder<HELD>;

Name RUN_BY{"_op"}, UNDER_WAY{"calls"}, PHASE{"phase"}, NUMBER{"_sequence_nr"}, DTYPE{"dtype"}, NO_PATH{""}, DICTIONARY{"__dict__"}, OWN_PARAMETERS{"_parameters"},
    EVAL_FRAME{"torch._dynamo.eval_frame"};
Slot LIVE{{"live"}}, WANTED{{"wanted"}}, STEP{{"step"}}, RECORDED{{"recorded"}}, UNWRITTEN{{"unwritten"}}, EACH{{"each"}}, WRITTEN{{"written"}},
    BETWEEN{{"between"}}, WATCHED{{"watched"}}, FQN{{"fqn"}}, OPERATORS{{"operators"}}, COUNT{{"count"}}, BY_NUMBER{{"calls"}},
    CHANGES{{"changes"}}, OWN_SITES{{"sites"}}, KNOWN{{"known"}}, GIVEN{{"given"}}, ALL_GIVEN{{"given"}};
thread_local Local stack{};

struct Ref {  // an owned reference, or null; no exception is left set
    PyObject *held;
    explicit Ref(PyObject *own) : held(own) {
        if (!own) PyErr_Clear();
    }
    Ref(const Ref &) = delete;
    ~Ref() {
        if (held) Py_DecRef(held);
    }
    operator PyObject *() const { return held; }
};

struct Operator {  // one that has run, and what was raised meanwhile by code of the script's
    PyObject *func, *args, *kwargs, *result;
    PyFrameObject *frame;  // of who called it; null in a thread of autograd's own
    PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
};

PyObject *item(PyObject *dictionary, PyObject *key) {  // borrowed, or null without an exception
    PyObject *found = key && dictionary && PyDict_Check(dictionary) ? PyDict_GetItemWithError(dictionary, key) : nullptr;
    if (!found) PyErr_Clear();
    return found;
}
PyObject *kept(PyObject *found) { return found ? Py_NewRef(found) : nullptr; }

// Whether code that is known to be none of this package's has called the operator, or autograd.
bool is_others(Operators *self, PyFrameObject *frame) {
    if (!frame) return true;
    Ref code((PyObject *)PyFrame_GetCode(frame)), key(PyLong_FromVoidPtr(code));
    PyObject *judged = item(self->held[OURS], key);
    return judged && PyTuple_GetItem(judged, 1) == Py_False;
}

// Whether a region may run that `torch.compile` made: `compiled_entries` of private_api.py.
bool may_be_compiled(Operators *self) {
    PyObject *found = self->held[COMPILER], *backend, *key;
    if (!PyList_Size(found)) return item(PyImport_GetModuleDict(), EVAL_FRAME.get());
    PyObject *backends = PyTuple_GetItem(PyList_GetItem(found, 0), 0);
    if (!backends || !PyDict_Check(backends)) return PyErr_Clear(), true;
    Py_ssize_t at = 0;
    return PyDict_Size(backends) > 1 || (PyDict_Next(backends, &at, &key, &backend) && backend != Py_None);
}

bool is_float(Operators *self, PyObject *tensor) {
    if (const int floats = floats_by_handle(functions_of(self->held[INTAKE]), tensor); floats >= 0) return floats;
    Ref dtype(attribute(tensor, DTYPE));
    const bool is = dtype && PySet_Contains(self->held[FLOATS], dtype) == 1;
    return PyErr_Clear(), is;
}

// Where a tensor's memory begins, as a number of Python's: a new reference, or null with an exception.
PyObject *memory_of(Operators *self, PyObject *tensor) {
    const u64 begin = begin_by_handle(functions_of(self->held[INTAKE]), tensor);
    return begin ? PyLong_FromUnsignedLongLong(begin) : PyObject_CallFunctionObjArgs(self->held[BEGIN], tensor, nullptr);
}

// The site of a parameter that a module holds, as it was looked up before: null, without an exception, where Python has to.
PyObject *site_of_parameter(Operators *self, PyObject *tensor) {
    enum Known { ITS_SITE, MODULE, ATTRIBUTE, LOOKED_UP };
    Ref key(PyLong_FromVoidPtr(tensor));
    PyObject *known = item(self->held[PARAMETERS], key);
    if (!known || integer(self->held[NAMES], CHANGES) != PyLong_AsLongLong(PyTuple_GetItem(known, LOOKED_UP))) return nullptr;
    PyObject *module = PyWeakref_GetObject(PyTuple_GetItem(known, MODULE));
    Ref own(module && module != Py_None ? PyObject_GenericGetDict(module, nullptr) : nullptr);
    PyObject *held = item(item(own, OWN_PARAMETERS.get()), PyTuple_GetItem(known, ATTRIBUTE));
    return held == tensor ? PyTuple_GetItem(known, ITS_SITE) : nullptr;
}

// The site that wrote a tensor's memory last, of a parameter its own, -1 where there is none: `Writers.of`. -2 if something was raised.
i64 writer_of(Operators *self, Operator &ran, PyObject *tensor) {
    Ref memory(memory_of(self, tensor));
    PyObject *site = item(self->held[SITES], memory);
    if (site) return PyLong_AsLongLong(site);
    if ((PyObject *)Py_TYPE(tensor) != self->held[PARAMETER]) return -1;
    if ((site = site_of_parameter(self, tensor)) && memory && PyDict_SetItem(self->held[SITES], memory, site) == 0)
        return PyLong_AsLongLong(site);
    PyErr_Clear();
    PyObject *found = PyObject_CallFunctionObjArgs(self->held[OF_PARAMETER], tensor, nullptr);
    if (!found) return PyErr_Fetch(&ran.type, &ran.value, &ran.traceback), -2;
    const i64 own = PyLong_AsLongLong(found);
    Py_DecRef(found);
    return own;
}

// Whether an operator is given a plain tensor first, which is no parameter.
bool is_of_tensor(Operators *self, const Operator &ran) {
    return PyTuple_Size(ran.args) && (PyObject *)Py_TYPE(PyTuple_GetItem(ran.args, 0)) == self->held[TENSOR];
}

// Notes what a view is of: a view of a parameter is known by its memory from here on. False where Python has to.
bool is_noted(Operators *self, Operator &ran) {
    PyObject *first = PyTuple_Size(ran.args) ? PyTuple_GetItem(ran.args, 0) : Py_None, *type = (PyObject *)Py_TYPE(first);
    if (type == self->held[PARAMETER]) return writer_of(self, ran, first) != -2;
    return !PyType_IsSubtype((PyTypeObject *)type, (PyTypeObject *)self->held[TENSOR]);
}

// ---- what an operator is given

struct Inputs {  // compared with the sites that were named a step ago, one after the other
    static constexpr int MOST = 63;
    PyObject *before;
    i64 sites[MOST];
    int count = 0;
};

bool is_next(Inputs &inputs, i64 site) {  // whether a site is named already, or is the next that was
    for (int i = 0; i < inputs.count; i++)
        if (inputs.sites[i] == site) return true;
    if (inputs.count >= Inputs::MOST || inputs.count >= PyList_Size(inputs.before)) return false;
    if (PyLong_AsLongLong(PyList_GetItem(inputs.before, inputs.count)) != site) return false;
    inputs.sites[inputs.count++] = site;
    return true;
}

// Goes on with what a value is: `Writers._collect`.
bool goes_on(Operators *self, Operator &ran, Inputs &inputs, PyObject *value) {
    PyObject *type = (PyObject *)Py_TYPE(value);
    if (type == self->held[TENSOR] || type == self->held[PARAMETER]) {
        if (!is_float(self, value)) return true;
        const i64 site = writer_of(self, ran, value);
        return site != -2 && is_next(inputs, site);
    }
    if (PyTuple_Check(value) || PyList_Check(value)) {
        const bool is_tuple = PyTuple_Check(value);
        for (Py_ssize_t i = 0; i < (is_tuple ? PyTuple_Size(value) : PyList_Size(value)); i++)
            if (!goes_on(self, ran, inputs, is_tuple ? PyTuple_GetItem(value, i) : PyList_GetItem(value, i))) return false;
        return true;
    }
    return !PyType_IsSubtype((PyTypeObject *)type, (PyTypeObject *)self->held[TENSOR]);
}

// Whether the operator was given what it was a step ago, and belongs to the same forward operator: `_given`.
bool is_given_the_same(Operators *self, PyObject *call, PyObject *origin, Operator &ran) {
    Ref known(attribute(call, KNOWN));
    if (!known || !PyTuple_Check(known) || PyTuple_GetItem(known, 1) != (origin ? origin : Py_None)) return false;
    Inputs inputs{PyTuple_GetItem(known, 0)};
    if (!inputs.before || !PyList_Check(inputs.before) || !goes_on(self, ran, inputs, ran.args)) return false;
    PyObject *key, *value;
    for (Py_ssize_t at = 0; ran.kwargs != Py_None && PyDict_Next(ran.kwargs, &at, &key, &value);)
        if (!goes_on(self, ran, inputs, value)) return false;
    return inputs.count == PyList_Size(inputs.before);
}

bool is_one_result(Operators *self, PyObject *facts, PyObject *result) {
    if ((PyObject *)Py_TYPE(result) != self->held[TENSOR] || !attribute_is(facts, EACH, Py_False)) return false;
    Ref written(attribute(facts, WRITTEN));
    return written && PyTuple_Check(written) && !PyTuple_Size(written) && is_float(self, result);
}

// ---- which call it is

struct Place {  // where an operator runs: null what is not known
    PyObject *fqn = nullptr, *phase = nullptr, *origin = nullptr;
    ~Place() {
        for (PyObject *one : {fqn, phase, origin})
            if (one) Py_DecRef(one);
    }
};

// Finds the module and phase that an operator runs in, where it is a module's forward pass or a node that was made in one.
bool find_place(Operators *self, PyObject *node, Place &place) {
    PyObject *values = values_of(self, STACK, stack, DICTIONARY);
    if (!values) return PyErr_Clear(), false;
    Ref calls(kept(value_of(values, UNDER_WAY)));
    const Py_ssize_t depth = calls && PyList_Check(calls) ? PyList_Size(calls) : -1;
    if (depth < 0 || (depth > 0) == (node != Py_None)) return false;
    if (depth > 0) {
        PyObject *state = PyList_GetItem(calls, depth - 1);
        if (state == Py_None || !attribute_is(state, WATCHED, Py_True) || !answer_is(self->held[TRACING], Py_None)) return false;
        place.fqn = attribute(state, FQN), place.phase = kept(value_of(values, PHASE));
    } else {
        Ref ask(attribute(node, NUMBER)), number(ask ? PyObject_CallNoArgs(ask) : nullptr);
        PyObject *origin = item(self->held[BY_NODE], number);
        if (!origin || origin == Py_None) return false;
        place.origin = Py_NewRef(origin), place.fqn = attribute(origin, FQN), place.phase = Py_NewRef(self->held[BACKWARD]);
    }
    return place.fqn && place.phase;
}

enum Met { FUNC, NAME, IN_PHASE, REPEATED, COUNTED, CALL, SITE, MET };  // what is kept of a call that was met
struct Order {  // how far the operators of a step have come, by position
    const Operators *of;
    i64 step;
    Py_ssize_t at;
} order{};

i64 count_in(PyObject *repeated, i64 step) { return integer(repeated, STEP) == step ? integer(repeated, COUNT) : 0; }

// Which call of an operator this is in its module, where it was met before: a new reference to a tuple, or null without an
// exception. Most steps run the same operators in the same order, so the one that came next a step ago is looked at first.
PyObject *find_call(Operators *self, PyObject *func, PyObject *facts, const Place &place, PyObject *step) {
    const i64 now = PyLong_AsLongLong(step);
    if (order.of != self || order.step != now) order = {self, now, 0};
    PyObject *all = self->held[ORDER];
    const Py_ssize_t at = order.at++;
    if (at < PyList_Size(all)) {
        PyObject *met = PyList_GetItem(all, at);
        if (PyTuple_GetItem(met, FUNC) == func && PyTuple_GetItem(met, NAME) == place.fqn && PyTuple_GetItem(met, IN_PHASE) == place.phase &&
            PyLong_AsLongLong(PyTuple_GetItem(met, COUNTED)) == count_in(PyTuple_GetItem(met, REPEATED), now))
            return Py_NewRef(met);
    }
    Ref pair(PyTuple_Pack(2, place.fqn, place.phase)), scope(kept(item(self->held[SCOPES], pair)));
    Ref operators(scope ? attribute(scope, OPERATORS) : nullptr), repeated(kept(item(operators, facts)));
    Ref calls(repeated ? attribute(repeated, BY_NUMBER) : nullptr), counted(repeated ? PyLong_FromLongLong(count_in(repeated, now)) : nullptr);
    Ref call(kept(item(calls, counted))), sites(call ? attribute(call, OWN_SITES) : nullptr);
    if (!sites) return nullptr;
    PyObject *site = item(sites, NO_PATH.get());
    PyObject *met = PyTuple_Pack(MET, func, place.fqn, place.phase, (PyObject *)repeated, (PyObject *)counted, (PyObject *)call,
                                 site ? site : Py_None);
    if (met && (at < PyList_Size(all) ? PyList_SetItem(all, at, Py_NewRef(met)) : PyList_Append(all, met))) PyErr_Clear();
    return met ? met : (PyErr_Clear(), nullptr);
}

// Records a result, and notes that its memory has it. False with an exception, which is the script's.
bool record(Operators *self, PyObject *site, PyObject *given, PyObject *result) {
    Ref all(attribute(self->held[ROWS], ALL_GIVEN));
    if (!all || !PyDict_Check(all) || record_given(self->held[INTAKE], site, result, all, given) < 0) {
        PyErr_Clear();
        PyObject *done = PyObject_CallFunctionObjArgs(self->held[BY_HAND], site, result, given, nullptr);
        if (!done) return false;
        Py_DecRef(done);
    }
    Ref memory(memory_of(self, result));
    if (memory && PyObject_IsTrue(memory) == 1) PyDict_SetItem(self->held[SITES], memory, site);
    return PyErr_Clear(), true;
}

// Counts the call of an operator, and has the autograd node that was made last be its own: `Calls.of`.
void count(Operators *self, PyObject *repeated, PyObject *step, i64 number, PyObject *node_number, PyObject *call) {
    Ref next(PyLong_FromLongLong(number + 1));
    if (!next || !set_attribute(repeated, STEP, step) || !set_attribute(repeated, COUNT, next)) PyErr_Clear();
    if (node_number && !item(self->held[BY_NODE], node_number) && PyDict_SetItem(self->held[BY_NODE], node_number, call)) PyErr_Clear();
}

// The operators met last, by address. What is known of one holds it, so that nothing else comes to its place.
struct Kept {
    u64 of;  // the number of who knows it
    PyObject *func, *facts, *run_by;
};
Kept &kept_of(PyObject *func) {
    constexpr size_t PLACES = 256;
    static Kept all[PLACES] = {};
    return all[mix(u64(func)) % PLACES];
}

PyObject *facts_of(Operators *self, PyObject *func) {  // borrowed; null without an exception where Python has to look at it first
    Kept &place = kept_of(func);
    if (place.of == self->number && place.func == func) return place.facts;
    Ref key(PyLong_FromVoidPtr(func));
    PyObject *known = item(self->held[FACTS], key), *facts = known ? PyTuple_GetItem(known, 1) : nullptr;
    if (!facts || PyTuple_GetItem(known, 0) != func) return PyErr_Clear(), nullptr;
    Ref by((PyObject *)Py_TYPE(func) == self->held[OVERLOAD] ? attribute(func, RUN_BY) : nullptr);
    place = {self->number, func, facts, by ? (PyObject *)by : func};  // the operator has it
    return facts;
}

// 1 if the operator has been dealt with, 0 if Python has to, and nothing is done; -1 with an exception, which is the script's.
int is_dealt_with(Operators *self, Operator &ran) {
    if (!attribute_is(self->held[RECORDER], WANTED, Py_True)) return 0;
    Ref facts(kept(facts_of(self, ran.func)));
    if (!facts) return 0;
    const bool recorded = attribute_is(facts, RECORDED, Py_True);
    const bool is_after = attribute_is(self->held[CALLS], BETWEEN, self->held[OPTIMIZER]);  // as it is once autograd runs
    const bool is_plain = !recorded && attribute_is(facts, UNWRITTEN, Py_False) && is_of_tensor(self, ran);
    // In a backward pass that makes no graph, no node is made that will ever run: the number of the last one says nothing.
    const bool may_be_backward = is_after && answer_is(self->held[GRAD_MODE], Py_False);
    Ref early(may_be_backward ? PyObject_CallNoArgs(self->held[NODE]) : nullptr);
    const bool makes_none = may_be_backward && early && early != Py_None;
    if (is_plain && makes_none) return 1;
    Ref next(makes_none ? nullptr : PyObject_CallNoArgs(self->held[NEXT]));
    Ref last(next ? PyLong_FromLongLong(PyLong_AsLongLong(next) - 1) : nullptr);
    if (!makes_none && !last) return 0;
    if (is_plain && is_after && item(self->held[BY_NODE], last)) return 1;  // of which call it is, nothing more comes
    Ref node(early ? Py_NewRef(early) : PyObject_CallNoArgs(self->held[NODE]));
    if (!node || (node != Py_None && !is_after) || !is_others(self, ran.frame)) return 0;
    if (!recorded && !is_plain && (!attribute_is(facts, UNWRITTEN, Py_False) || !is_noted(self, ran))) return 0;
    if (!recorded && (makes_none || item(self->held[BY_NODE], last))) return 1;
    Place place;
    if (!find_place(self, node, place) || may_be_compiled(self)) return 0;
    Ref step(attribute(self->held[RECORDER], STEP)), met(step ? find_call(self, ran.func, facts, place, step) : nullptr);
    if (!met) return 0;
    PyObject *call = PyTuple_GetItem(met, CALL), *site = PyTuple_GetItem(met, SITE);
    if (recorded) {
        if (site == Py_None || !is_one_result(self, facts, ran.result) || !is_given_the_same(self, call, place.origin, ran)) return 0;
    }
    count(self, PyTuple_GetItem(met, REPEATED), step, PyLong_AsLongLong(PyTuple_GetItem(met, COUNTED)), last, call);
    Ref given(recorded ? attribute(call, GIVEN) : nullptr);
    return !given || record(self, site, given, ran.result) ? 1 : -1;
}

// Records what an operator gave; false with an exception, which is the script's.
bool recorded(Operators *self, Operator &ran) {
    const int done = is_dealt_with(self, ran);
    if (done < 0) return false;
    PyErr_Clear();
    if (ran.type) return PyErr_Restore(ran.type, ran.value, ran.traceback), false;
    if (done) return true;
    PyObject *frame = ran.frame ? (PyObject *)ran.frame : Py_None;
    PyObject *left = PyObject_CallFunctionObjArgs(self->held[LEFT], ran.func, ran.args, ran.kwargs, ran.result, frame, nullptr);
    if (left) Py_DecRef(left);
    return left;
}

// Runs an operator, without the frame of Python that torch has around it.
PyObject *run(Operators *self, PyObject *func, PyObject *args, PyObject *kwargs) {
    const bool is_overload = (PyObject *)Py_TYPE(func) == self->held[OVERLOAD];
    Ref by(facts_of(self, func) ? Py_NewRef(kept_of(func).run_by) : is_overload ? attribute(func, RUN_BY) : nullptr);
    PyObject *result = PyObject_Call(by ? by : func, args, kwargs == Py_None ? nullptr : kwargs);
    if (result) return result;
    PyObject *type, *value, *traceback;  // whose frames are not there when nobody watches
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_Restore(type, value, nullptr);
    if (traceback) Py_DecRef(traceback);
    return nullptr;
}

// `__torch_dispatch__` of a mode: given the mode, an operator, types, positional and keyword arguments.
PyObject *dispatch(PyObject *object, PyObject *const *given, Py_ssize_t count) {
    Operators *self = (Operators *)object;
    PyObject *kwargs = count == 5 ? given[4] : Py_None;
    if (count < 4 || count > 5 || !PyTuple_Check(given[3]) || !(kwargs == Py_None || PyDict_Check(kwargs)))
        return PyErr_Format(PyExc_TypeError, "a mode, an operator, types, a tuple and a dictionary wanted");
    PyObject *result = run(self, given[1], given[3], kwargs);
    if (!result || !attribute_is(self->held[PROBE], LIVE, Py_True)) return result;
    Operator ran{given[1], given[3], kwargs, result, PyEval_GetFrame()};
    if (recorded(self, ran)) return result;
    Py_DecRef(result);
    return nullptr;
}

PyMethodDef METHODS[] = {
    {"dispatch", (PyCFunction)(void (*)())dispatch, METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyObject *TYPE = nullptr;

}  // namespace

PyObject *new_operators(PyObject *, PyObject *const *arguments, Py_ssize_t given) {
    if (!Operators::define(TYPE, "introspect_cli.tensors._kernels.Operators", METHODS)) return nullptr;
    if (given == HELD && !(is_intake(arguments[INTAKE]) && PyDict_Check(arguments[BY_NODE]) && PyDict_Check(arguments[SITES]) &&
                           PyList_Check(arguments[COMPILER]) && PyList_Check(arguments[ORDER])))
        return PyErr_Format(PyExc_TypeError, "an intake, dictionaries and lists wanted");
    return Operators::make(TYPE, arguments, given);
}

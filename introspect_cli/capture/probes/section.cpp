// Both ends of a section of a capture's code (guard.py), without a frame of Python: a call of a module has two sections.
#include "probes.h"

namespace {

Name ASKED{"asked"}, TAKEN{"taken"}, BEGIN{"begin"}, END{"end"}, FAILED{"failed"};
// Of the process: its main thread, sections that this is in, handlers of signals that wait for the end of the outermost, what takes
// Dynamo's callback off.
unsigned long MAIN = 0;
long long DEPTH = 0;
PyObject *WAITING = nullptr, *PAUSE = nullptr;

bool is_main() { return PyThread_get_thread_ident() == MAIN; }

bool is_any_taken() {
    PyObject *taken = attribute(PAUSE, TAKEN);
    const bool any = taken && PyDict_Size(taken) > 0;
    Py_DecRef(taken);
    return any;
}

bool call(PyObject *object, Name &name) {  // a method without arguments; false with an exception
    PyObject *done = PyObject_CallMethodObjArgs(object, name.get(), nullptr);
    Py_DecRef(done);
    return done;
}

bool begin_pause() {
    PyObject *asked = is_any_taken() ? Py_NewRef(Py_True) : PyObject_CallMethodObjArgs(PAUSE, ASKED.get(), nullptr);
    const bool done = asked && (asked == Py_None || call(PAUSE, BEGIN));
    Py_DecRef(asked);
    return done;
}

// Leaves a section; the end of the main thread's outermost one runs the handlers that wait. False with an exception.
bool leave() {
    if (!is_main()) return true;
    DEPTH--;
    while (!DEPTH && PyList_Size(WAITING) > 0) {
        PyObject *handler = Py_NewRef(PyList_GetItem(WAITING, 0));
        PyObject *done = PyList_SetSlice(WAITING, 0, 1, nullptr) ? nullptr : PyObject_CallNoArgs(handler);
        Py_DecRef(handler);
        if (!done) return false;
        Py_DecRef(done);
    }
    return true;
}

PyObject *enter(PyObject *, PyObject *) {
    if (!PAUSE) return PyErr_Format(PyExc_RuntimeError, "no sections yet");
    if (is_main()) DEPTH++;
    if (begin_pause()) return Py_NewRef(Py_None);
    if (is_main()) DEPTH--;
    return nullptr;
}

PyObject *exit(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    if (count != 3) return PyErr_Format(PyExc_TypeError, "a class, an error and a traceback wanted");
    PyObject *swallowed = is_any_taken() && !call(PAUSE, END) ? nullptr
                          : given[1] == Py_None               ? Py_NewRef(Py_False)
                                                              : PyObject_CallMethodObjArgs(self, FAILED.get(), given[1], nullptr);
    PyObject *kind, *error, *trace;
    PyErr_Fetch(&kind, &error, &trace);
    if (leave()) return PyErr_Restore(kind, error, trace), swallowed;
    for (PyObject *one : {kind, error, trace, swallowed}) Py_DecRef(one);
    return nullptr;
}

PyMethodDef METHODS[] = {
    {"__enter__", enter, METH_NOARGS, "Begin a section."},
    {"__exit__", (PyCFunction)(void (*)())exit, METH_FASTCALL, "End it: `failed(error)` says whether an error is swallowed."},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot SLOTS[] = {{Py_tp_methods, METHODS}, {0, nullptr}};
PyType_Spec SPEC = {"introspect_cli.tensors._kernels.Section", 0, 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, SLOTS};

}  // namespace

PyObject *new_section_type() { return PyType_FromSpec(&SPEC); }

PyObject *share_sections(PyObject *, PyObject *const *given, Py_ssize_t count) {
    if (count != 3 || !PyList_Check(given[1])) return PyErr_Format(PyExc_TypeError, "a thread, a list and a pause wanted");
    MAIN = PyLong_AsUnsignedLong(given[0]);
    if (PyErr_Occurred()) return nullptr;
    for (PyObject *before : {WAITING, PAUSE}) Py_DecRef(before);
    WAITING = Py_NewRef(given[1]), PAUSE = Py_NewRef(given[2]);
    return Py_NewRef(Py_None);
}

PyObject *section_depth(PyObject *, PyObject *) { return PyLong_FromLongLong(DEPTH); }

// Python's own takes part in no call of less than 60 ns, which is as long as summarising a small tensor. This one is one of the
// system's, with its owner beside it, who only changes while the interpreter's lock is held.
#include "lock.h"

namespace {

struct Lock {
    PyObject_HEAD
    PyThread_type_lock lock;
    unsigned long owner;
    i64 count;  // how often its owner has taken it

    void free() {
        if (count) PyThread_release_lock(lock);
        if (lock) PyThread_free_lock(lock);
    }
};

bool is_mine(const Lock *self) { return self->count && self->owner == PyThread_get_thread_ident(); }

// Waits until it is free; false with an exception, which a signal's handler has raised.
bool take(Lock *self) {
    if (try_take((PyObject *)self)) return true;
    for (;;) {
        PyLockStatus status;
        Py_BEGIN_ALLOW_THREADS
        status = PyThread_acquire_lock_timed(self->lock, -1, 1);
        Py_END_ALLOW_THREADS
        if (status == PY_LOCK_ACQUIRED) break;
        if (Py_MakePendingCalls() < 0) return false;
    }
    self->owner = PyThread_get_thread_ident(), self->count = 1;
    return true;
}

PyObject *enter(PyObject *object, PyObject *) { return take((Lock *)object) ? Py_NewRef(Py_True) : nullptr; }

PyObject *leave(PyObject *object, PyObject *const *, Py_ssize_t) {
    if (!is_mine((Lock *)object)) return PyErr_Format(PyExc_RuntimeError, "this thread does not have the lock");
    return give_back(object), Py_NewRef(Py_None);
}

PyMethodDef METHODS[] = {
    {"__enter__", enter, METH_NOARGS, nullptr},
    {"__exit__", (PyCFunction)(void (*)())leave, METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot SLOTS[] = {{Py_tp_dealloc, (void *)forget<Lock>}, {Py_tp_methods, METHODS}, {0, nullptr}};
Class CLASS{"introspect_cli.tensors._kernels.Lock", sizeof(Lock), SLOTS};

}  // namespace

bool is_lock(PyObject *object) { return CLASS.has(object); }

bool try_take(PyObject *object) {
    Lock *self = (Lock *)object;
    if (is_mine(self)) return self->count++, true;
    if (self->count || !PyThread_acquire_lock(self->lock, NOWAIT_LOCK)) return false;
    self->owner = PyThread_get_thread_ident(), self->count = 1;
    return true;
}

void give_back(PyObject *object) {
    Lock *self = (Lock *)object;
    if (!--self->count) PyThread_release_lock(self->lock);
}

PyObject *new_lock(PyObject *, PyObject *) {
    Lock *self = CLASS.make<Lock>();
    if (!self || (self->lock = PyThread_allocate_lock())) return (PyObject *)self;
    return Py_DecRef((PyObject *)self), PyErr_NoMemory();
}

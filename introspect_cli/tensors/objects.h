// Objects that are looked at together, in room that stays from one step to the next: see numbers.cpp for what a list costs.
#pragma once
#include "kernels.h"
#include "limited.h"
#include "room.h"

struct Objects {
    PyObject **items = nullptr;
    Py_ssize_t count = 0, room = 0;

    bool add(PyObject *one) {  // takes another reference to it; false with an exception
        if (!has_room(items, room, count + 1, 256)) return PyErr_NoMemory(), false;
        items[count++] = Py_NewRef(one);
        return true;
    }
    bool add_list(PyObject *list) {
        bool done = true;
        for (Py_ssize_t i = 0; done && i < PyList_Size(list); i++) done = add(PyList_GetItem(list, i));
        return done;
    }
    void clear() {
        while (count) Py_DecRef(items[--count]);
    }
    void free() { clear(), std::free(items), *this = {}; }
};

// The room of some place while it is used. Whoever comes meanwhile has other room.
struct Taken : Objects {
    Objects &home;

    explicit Taken(Objects &place) : Objects(place), home(place) { place = {}; }
    ~Taken() {
        clear();
        if (home.items) free();
        else home = *this;
    }
};

// Large tensors in the short way of the intake: what is known of their memory, and the threads that share the work.
#pragma once
#include "team.h"
#include "tensor.h"

#include <cstdlib>

struct Large {  // of a summarizer, borrowed
    Team *team;
    PyObject *memory;             // of reuse.py
    PyObject *threads, *script;   // torch.get_num_threads; what parallel.py knows of the script's threads
    PyObject *acquire, *release;  // the summarizer's lock
};

struct Later {  // tensors that are summarised together, so that threads are woken once
    Item *items = nullptr;
    i64 count = 0, places = 0;
    ~Later() { std::free(items); }
};

enum Outcome { LONG_WAY, DONE, LATER };

// Fills a row with the summary of a large tensor. LONG_WAY, and nothing is done: Python has to decide which threads
// take part. With `later`, what has to be summarised is put there: LATER. Never an exception.
HIDDEN Outcome summarise_large(const Large &own, const Look &found, i64 flags, Row *row, Later *later);
// Summarises those put off; false, and nothing is done, where Python has to decide which threads take part.
HIDDEN bool summarise_later(const Large &own, const Later &later, i64 flags);

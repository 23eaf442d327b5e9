// Large tensors in the short way of the intake: what is known of their memory, and the threads that share the work.
#pragma once
#include "team.h"
#include "tensor.h"

#include <cstdlib>

struct Large {  // of a summarizer, borrowed
    Team *team;
    PyObject *memory;             // what new_memory of reuse.py made
    PyObject *threads, *script;   // torch.get_num_threads; what parallel.py knows of the script's threads
    PyObject *lock;               // the summarizer's
};

// Threads that may take part where there is work for several; 1 where torch's workers may not be called, see parallel.py.
HIDDEN i64 threads_of(const Large &own);

struct Later {  // tensors that are summarised together, so that threads are woken once; for who has the lock
    i64 threads;
    Item *items = nullptr;
    i64 count = 0, places = 0;
    ~Later() { std::free(items); }
};

// Fills a row with the summary of a large tensor, or has that done later, together with others. False, and nothing is done, where
// there is no room for its chunks, or another thread has the lock. Never an exception.
HIDDEN bool summarise_large(const Large &own, const Look &found, i64 flags, Row *row, Later *later);
// Summarises those put off.
HIDDEN void summarise_later(const Large &own, const Later &later, i64 flags);

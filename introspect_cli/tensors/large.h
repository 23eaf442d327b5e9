// Large tensors in the short way of the intake: what is known of their memory, and the threads that share the work.
#pragma once
#include "team.h"
#include "tensor.h"

struct Large {  // of a summarizer, borrowed
    Team *team;
    PyObject *memory;             // of reuse.py
    PyObject *threads, *script;   // torch.get_num_threads; what parallel.py knows of the script's threads
    PyObject *acquire, *release;  // the summarizer's lock
};

enum Outcome { LONG_WAY, DONE, LATER };

// Fills a row with the summary of a large tensor. LONG_WAY, and nothing is done: Python has to decide which threads
// take part. With `may_wait`, what has to be summarised is left to others: LATER. Never an exception.
HIDDEN Outcome summarise_large(const Large &own, const Look &found, i64 flags, Row *row, bool may_wait);

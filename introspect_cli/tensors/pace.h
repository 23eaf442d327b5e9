// Whether sharing a call among threads pays at the moment.
#pragma once
#include "kernels.h"

struct Pace {  // of calls of one kind; kernels.py has its size
    i64 untimed, shares;  // calls that may still go on, shared or not as it was said last, before the clock is looked at again
    i64 strikes, pause, calls;
    double alone;  // nanoseconds that an element takes in one thread, 0 if not known
};

HIDDEN bool pays(Pace &pace);                           // whether to share the next call, of which `note` wants to hear
HIDDEN void note(Pace &pace, double took, bool shared);  // nanoseconds for an element
HIDDEN double clock_now();                              // in nanoseconds; it only goes forward

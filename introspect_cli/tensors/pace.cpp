// Whether sharing a call among threads pays at the moment.
//
// With more work than cores, or in a container with fewer cores than it shows, threads that share a call wait for each other
// until the system has given all of them a turn: milliseconds instead of microseconds. So what is done alone and what is shared
// is timed; after a few shared calls that took longer than the same would have taken alone, nothing is shared for a while.
#include "pace.h"

#include <time.h>

namespace {

constexpr double SLACK = 1.5;  // what was done alone may have been in the cache, and what is shared not
constexpr i64 STRIKES = 3;     // slow shared calls, less the quick ones since, before a pause
constexpr i64 UNTIMED = 9;     // calls after a timed one that are done without a look at the clock
constexpr i64 PAUSE = 100 / (1 + UNTIMED);         // timed calls done alone then
constexpr i64 CALIBRATION = 200 / (1 + UNTIMED);  // one in so many timed calls is done alone, to know what that takes

}  // namespace

bool pays(Pace &pace) {
    pace.calls++;
    if (pace.pause) return pace.pause--, false;
    return pace.calls % CALIBRATION != 1;
}

void note(Pace &pace, double took, bool shared) {
    if (!shared) {
        // a call may be interrupted, none is quicker than it can be: forget slow ones sooner than quick ones
        pace.alone = pace.alone > 0 ? least(took, 0.9 * pace.alone + 0.1 * took) : took;
    } else if (took <= SLACK * pace.alone) {
        pace.strikes = most<i64>(0, pace.strikes - 1);
    } else if (++pace.strikes == STRIKES) {
        pace.strikes = 0, pace.pause = PAUSE;
    }
    pace.shares = pace.alone > 0 && !pace.pause;
    // in doubt, every call is timed
    pace.untimed = pace.pause || (shared && !pace.strikes) ? UNTIMED : 0;
}

double clock_now() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e9 * double(now.tv_sec) + double(now.tv_nsec);
}

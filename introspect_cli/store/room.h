// A step that is read into memory in which the step before lies.
#pragma once
#include "kernels.h"

// What the bytes of a piece must be, as compiled.py has it: those at an address; or float64 or float32 that are not
// infinite and, where NEVER_NEGATIVE is added, not negative.
enum Must { BE_THE_SAME, BE_DOUBLES, BE_FLOATS, NEVER_NEGATIVE = 4 };
struct Piece {
    i64 start, end;  // in bytes
    i64 must;
    const u8 *same;
};

enum Found { UNREAD, OTHER, ALIKE };
// Reads bytes of a file that have a CRC, and looks whether all pieces are what they must be.
HIDDEN Found read_again(int file, i64 offset, i64 length, u32 crc, u8 *room, const Piece *pieces, i64 count);

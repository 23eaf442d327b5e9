// Strided tensors: transposes, slices, images with their channels last.
//
// What is not contiguous is copied in logical order before it is summarised, in pieces that stay in the second-level
// cache. Pieces depend on shape and strides alone and their rows are merged in order, so the result does not depend on
// the number of threads.
#include "strided.h"

#include "intake.h"

#include <cstring>

namespace {

// ---- strided copies
//
// Reading a transposed matrix in logical order touches a cache line for each element. Where some dimension is closer
// together in the source than the one that is contiguous in the target, both are walked in tiles of 16 by 16, so that
// lines are read and written whole. cpu.py orders the dimensions: one of the last two is contiguous in the target.

template <class T>
void copy_matrix(const T *a, T *b, i64 rows, i64 columns, i64 step, i64 within, i64 out, i64 stride) {
    if (stride == 1 && within == 1) {
        for (i64 i = 0; i < rows; i++) std::memcpy(b + i * out, a + i * step, size_t(columns) * sizeof(T));
    } else if (stride == 1) {
        for (i64 i = 0; i < rows; i++)
            for (i64 j = 0; j < columns; j++) b[i * out + j] = a[i * step + j * within];
    } else {
        for (i64 top = 0; top < rows; top += 16)
            for (i64 left = 0; left < columns; left += 16) {
                i64 height = least<i64>(16, rows - top), width = least<i64>(16, columns - left);
                const T *from = a + top * step + left * within;
                T *to = b + left * stride + top, tile[16][16];
                if (height == 16 && width == 16 && within == 1) {
                    for (int i = 0; i < 16; i++) std::memcpy(tile[i], from + i * step, sizeof tile[i]);
                    for (int j = 0; j < 16; j++)
                        for (int i = 0; i < 16; i++) to[j * stride + i] = tile[i][j];
                } else {
                    for (i64 j = 0; j < width; j++)
                        for (i64 i = 0; i < height; i++) to[j * stride + i] = from[i * step + j * within];
                }
            }
    }
}

constexpr int MAX_DIMS = 16, PLAN = 3 * MAX_DIMS;

}  // namespace

void copy(const char *source, i64 dims, i64 size, const i64 *plan, char *target) {
    const i64 *sizes = plan, *in = plan + MAX_DIMS, *out = plan + 2 * MAX_DIMS;
    const i64 a = dims - 2, b = dims - 1;
    i64 at[MAX_DIMS] = {}, boxes = 1;
    for (i64 d = 0; d < a; d++) boxes *= sizes[d];
    auto box = [&](auto type) {
        using T = decltype(type);
        copy_matrix((const T *)source, (T *)target, sizes[a], sizes[b], in[a], in[b], out[a], out[b]);
    };
    while (boxes--) {
        if (size == 8) box(u64());
        else if (size == 4) box(u32());
        else if (size == 2) box(u16());
        else box(u8());
        for (i64 d = a - 1; d >= 0; d--) {
            at[d]++, source += in[d] * size, target += out[d] * size;
            if (at[d] < sizes[d]) break;
            source -= sizes[d] * in[d] * size, target -= sizes[d] * out[d] * size, at[d] = 0;
        }
    }
}

namespace {

struct Work {  // what threads that share a tensor know of it
    const Strided *tensor;
    Row *parts;
    char *blocks;
    const Team *team;
    i64 next;
};

void take_pieces(void *data) {
    Work *work = (Work *)data;
    const Strided &own = *work->tensor;
    const i64 size = SIZES[own.code], thread = work->team->taking > 1 && work->team->number ? work->team->number() : 0;
    char *block = work->blocks + thread * CHUNK * size;
    for (i64 i; (i = __atomic_fetch_add(&work->next, 1, __ATOMIC_ACQ_REL)) < own.number;) {
        const Piece &piece = own.pieces[i];
        copy((const char *)own.address + piece.place * size, piece.dims, size, own.plans + piece.plan * PLAN, block);
        RUN(block, piece.count, piece.first, int(own.code), int(own.flags), own.table, work->parts + i);
    }
}

}  // namespace

void summarise_strided(const Strided &tensor, Row *parts, char *blocks, Row *row, Team *team) {
    Work work{&tensor, parts, blocks, team, 0};
    i64 count = 0;
    for (const Piece *piece = tensor.pieces; piece < tensor.pieces + tensor.number; piece++) count += piece->count;
    share(team, take_pieces, &work, count, tensor.flags);
    if (tensor.number == 1) *row = *parts;
    else merge(parts, tensor.number, row);
}

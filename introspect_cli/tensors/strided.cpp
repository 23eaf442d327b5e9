// Strided tensors: transposes, slices, images with their channels last.
//
// What is not contiguous is copied in logical order before it is summarised, in pieces that stay in the second-level
// cache. Pieces depend on shape and strides alone and their rows are merged in order, so the result does not depend on
// the number of threads.
#include "strided.h"

#include "intake.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace {

// ---- strided copies
//
// Reading a transposed matrix in logical order touches a cache line for each element. Where some dimension is closer
// together in the source than the one that is contiguous in the target, both are walked in tiles of 16 by 16, so that
// lines are read and written whole. One of the last two dimensions is contiguous in the target.

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

constexpr int MAX_DIMS = 16;

struct Dim {
    i64 size, in, out;  // stride in the source, and in the target
};

// The dimensions of a box from the first that is cut, of which there are `rows`, in the order in which they are walked. The one that is
// contiguous in the target goes last; or, if another has a smaller stride in the source, last but one, and that one last. The others go
// by falling strides in the source.
int in_order(const Strided &own, i64 cut, i64 rows, Dim *dims) {
    Dim inner{1, 1, 1};
    int count = 1;
    i64 step = 1;
    dims[0] = {1, 0, 0};
    for (i64 d = own.dims - 1; d >= cut; d--) {
        const Dim dim{d == cut ? rows : own.sizes[d], own.strides[d], step};
        if (dim.size == 1) continue;
        if (step == 1) inner = dim;
        else dims[count++] = dim;
        step *= dim.size;
    }
    std::sort(dims + 1, dims + count, [](const Dim &a, const Dim &b) { return a.in > b.in; });
    int close = count - 1;
    while (close > 0 && !dims[close].in) close--;
    dims[count++] = inner;
    if (close > 0 && dims[close].in < inner.in) std::rotate(dims + close, dims + close + 1, dims + count);
    return count;
}

void copy(const char *source, const Dim *dims, int count, i64 size, char *target) {
    const Dim a = dims[count - 2], b = dims[count - 1];
    i64 at[MAX_DIMS] = {}, boxes = 1;
    for (int d = 0; d < count - 2; d++) boxes *= dims[d].size;
    auto box = [&](auto type) {
        using T = decltype(type);
        copy_matrix((const T *)source, (T *)target, a.size, b.size, a.in, b.in, a.out, b.out);
    };
    while (boxes--) {
        if (size == 8) box(u64());
        else if (size == 4) box(u32());
        else if (size == 2) box(u16());
        else box(u8());
        for (int d = count - 3; d >= 0; d--) {
            const Dim &dim = dims[d];
            at[d]++, source += dim.in * size, target += dim.out * size;
            if (at[d] < dim.size) break;
            source -= dim.size * dim.in * size, target -= dim.size * dim.out * size, at[d] = 0;
        }
    }
}

struct Work {  // what threads that share a tensor know of it
    const Strided *tensor;
    i64 cut, inner, rows, number;  // the dimension that is cut, elements in each of its rows, rows of a piece, pieces
    Row *parts;
    char *blocks;
    const Team *team;
    i64 next;
};

void take_pieces(void *data) {
    Work *work = (Work *)data;
    const Strided &own = *work->tensor;
    const i64 size = SIZES[own.code], thread = work->team->taking > 1 && work->team->number ? work->team->number() : 0;
    const i64 height = own.sizes[work->cut], each = (height + work->rows - 1) / work->rows;
    char *block = work->blocks + thread * CHUNK * size;
    for (i64 i; (i = __atomic_fetch_add(&work->next, 1, __ATOMIC_ACQ_REL)) < work->number;) {
        i64 box = i / each, top = i % each * work->rows, place = top * own.strides[work->cut];
        const i64 rows = least(work->rows, height - top), first = (box * height + top) * work->inner;
        for (i64 d = work->cut - 1; d >= 0; d--) place += box % own.sizes[d] * own.strides[d], box /= own.sizes[d];
        Dim dims[MAX_DIMS];
        copy((const char *)own.address + place * size, dims, in_order(own, work->cut, rows, dims), size, block);
        RUN(block, rows * work->inner, first, int(own.code), int(own.flags), own.table, work->parts + i);
    }
}

}  // namespace

bool summarise_strided(const Strided &tensor, char *blocks, Row *row, Team *team) {
    Work work{&tensor, 0, 1, 0, 1, row, blocks, team, 0};
    i64 count = 1, cut = tensor.dims - 1;
    for (i64 d = 0; d < tensor.dims; d++) count *= tensor.sizes[d];
    for (; cut > 0 && work.inner * tensor.sizes[cut] <= CHUNK; cut--) work.inner *= tensor.sizes[cut];
    work.cut = cut, work.rows = least(tensor.sizes[cut], CHUNK / work.inner);
    work.number = count / work.inner / tensor.sizes[cut] * ((tensor.sizes[cut] + work.rows - 1) / work.rows);
    if (work.number > 1 && !(work.parts = (Row *)std::malloc(size_t(work.number) * sizeof(Row)))) return false;
    share(team, take_pieces, &work, count, tensor.flags);
    if (work.number == 1) return true;
    merge(work.parts, work.number, row);
    std::free(work.parts);
    return true;
}

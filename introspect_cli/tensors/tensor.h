// What a plain tensor is: type, sizes, where its elements lie and how much memory is theirs.
#pragma once
#include "kernels.h"
#include "limited.h"

constexpr int DIMS = 6;  // of a tensor that is looked at in one call

struct Shape {
    i64 sizes[DIMS];
    u32 type, ndim;  // a number for the element type, the same in one process
    i64 layout;      // index among the summarizer's layouts; -1 for an empty place
};
static_assert(sizeof(Shape) == 8 * (DIMS + 2));

struct Look {
    Shape shape;
    u64 address;
    i64 count, offset, bytes;  // the last two, of its storage: elements before its own, and bytes
    int code;
    bool negated;  // whether its elements are yet to be negated
};

// Torch's own C functions, as `intake.py` found them. They answer in nanoseconds, make no object, and leave lazy copies lazy.
struct Functions {
    i64 place;      // of the tensor in its Python object
    i64 keys;       // of its dispatch keys in the tensor
    u64 negation;   // the key of those whose elements are yet to be negated
    int (*layout)(void *, i32 *), (*device)(void *, i32 *), (*type)(void *, i32 *), (*dims)(void *, i64 *);
    int (*sizes)(void *, i64 **), (*strides)(void *, i64 **);
    int (*bytes)(void *, i64 *), (*offset)(void *, i64 *), (*address)(void *, const void **);
};

// Fills in what a tensor is; false, without an exception, unless it is contiguous in CPU memory and of a known type.
HIDDEN bool look_by_handle(const Functions *functions, PyObject *tensor, Look &found);
HIDDEN void fetch(const Functions *functions, PyObject *tensor);  // into the cache, before it is looked at
HIDDEN void fetch_storage(const Functions *functions, PyObject *tensor);  // the same of its storage, once it is there itself

// The layouts of tensors met before, by shape and element type.
struct Shapes {  // a hash table of open places, at most half full
    Shape *table = nullptr;
    size_t places = 0, used = 0;
};

HIDDEN Shape *find(const Shapes &shapes, const Shape &shape);  // where it is or could be; there must be some
HIDDEN bool put(Shapes &shapes, const Shape &shape);           // false without memory

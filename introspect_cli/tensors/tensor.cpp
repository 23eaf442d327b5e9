// A look at a plain tensor without a method of Python's for each question.
//
// Since 2.10 torch has C functions that answer single questions of a tensor (its "shim", meant to stay as it is): they
// take the address of the tensor that lies in the Python object.
#include "tensor.h"

#include <cstddef>
#include <cstdlib>
#include <cstring>

namespace {

int code_of_torch(i32 type) {  // of torch's numbers of types; intake.py compares them with what python says
    constexpr int CODES[] = {U8, I8, I16, I32, I64, F16, F32, F64, -1, -1, -1, U8, -1, -1, -1, BF16};
    return type >= 0 && type < 16 ? CODES[type] : -1;
}

// Takes sizes over; whether elements with those strides are contiguous.
bool measure(const i64 *sizes, const i64 *strides, i64 dims, u32 type, Look &found) {
    i64 count = 1;
    found.shape = {{}, type, u32(dims), -1};
    bool contiguous = true;
    for (i64 dim = dims - 1; dim >= 0; dim--) {
        contiguous &= sizes[dim] == 1 || !strides || strides[dim] == count;
        count *= found.shape.sizes[dim] = sizes[dim];
    }
    found.count = count;
    return contiguous || count == 0;
}

}  // namespace

bool look_by_handle(const Functions *torch, PyObject *tensor, Look &found) {
    void *handle = (char *)tensor + torch->place;
    i32 layout, device, type;
    i64 dims, *sizes, *strides;
    const void *address;
    if (torch->layout(handle, &layout) || layout || torch->device(handle, &device) || device) return false;
    if (torch->type(handle, &type) || (found.code = code_of_torch(type)) < 0) return false;
    if (torch->dims(handle, &dims) || dims > DIMS) return false;
    if (torch->sizes(handle, &sizes) || torch->strides(handle, &strides)) return false;
    if (!measure(sizes, strides, dims, u32(type), found)) return false;
    if (torch->bytes(handle, &found.bytes) || torch->offset(handle, &found.offset)) return false;
    if (torch->address(handle, &address)) return false;
    found.address = u64(address);
    found.negated = (*(const u64 *)(*(const char **)handle + torch->keys) & torch->negation) != 0;
    return true;
}

void fetch(const Functions *torch, PyObject *tensor) {
    constexpr int SIZE = 192, LINE = 64;
    const char *own = *(const char **)((char *)tensor + torch->place);
    for (int at = 0; at < SIZE; at += LINE) __builtin_prefetch(own + at);
}

void fetch_storage(const Functions *torch, PyObject *tensor) {
    constexpr int PLACE = 16, SIZE = 128, LINE = 64;  // after what every object of torch's begins with; elsewhere it does no harm
    const char *own = *(const char **)((char *)tensor + torch->place), *storage = *(const char *const *)(own + PLACE);
    for (int at = 0; at < SIZE; at += LINE) __builtin_prefetch(storage + at);
}

// ---- layouts of tensors met before

namespace {

u64 hash(const Shape &shape) {
    u64 h = shape.type * G + shape.ndim;
    for (i64 size : shape.sizes) h = (h ^ u64(size)) * 0xBF58476D1CE4E5B9, h ^= h >> 32;
    return h;
}

}  // namespace

Shape *find(const Shapes &shapes, const Shape &shape) {
    for (size_t at = hash(shape);; at++) {
        Shape *place = shapes.table + at % shapes.places;
        if (place->layout < 0 || std::memcmp(place, &shape, offsetof(Shape, layout)) == 0) return place;
    }
}

bool put(Shapes &shapes, const Shape &shape) {
    if (2 * shapes.used >= shapes.places) {
        Shapes more;
        more.places = shapes.places ? 2 * shapes.places : 64;
        more.table = (Shape *)std::malloc(more.places * sizeof(Shape));
        if (!more.table) return false;
        for (size_t i = 0; i < more.places; i++) more.table[i].layout = -1;
        for (size_t i = 0; i < shapes.places; i++)
            if (shapes.table[i].layout >= 0) *find(more, shapes.table[i]) = shapes.table[i];
        more.used = shapes.used;
        std::free(shapes.table);
        shapes = more;
    }
    Shape *place = find(shapes, shape);
    shapes.used += place->layout < 0;
    *place = shape;
    return true;
}

// Two ways to look at a plain tensor without a method of Python's for each question.
//
// Since 2.10 torch has C functions that answer single questions of a tensor (its "shim", meant to stay as it is): they
// take the address of the tensor that lies in the Python object. Before that there is the exchange API of DLPack, which
// tells all but the storage, and gives a lazy copy memory of its own.
#include "tensor.h"

struct DLTensor {  // of the DLPack specification, version 1
    void *data;
    i32 device_type, device_id, ndim;
    struct {
        u8 code, bits;
        u16 lanes;
    } dtype;
    i64 *shape, *strides;
    u64 byte_offset;
};
struct ExchangeAPI {
    u32 major, minor;
    void *older, *allocate, *to_managed, *from_managed;
    int (*look)(void *tensor, DLTensor *out);
};

namespace {

int code_of_dlpack(int code, int bits) {  // type code; -1 for what goes the long way
    constexpr int INT = 0, UINT = 1, FLOAT = 2, BFLOAT = 4, BOOL = 6;
    switch (code << 8 | bits) {
    case FLOAT << 8 | 32: return F32;
    case FLOAT << 8 | 64: return F64;
    case FLOAT << 8 | 16: return F16;
    case BFLOAT << 8 | 16: return BF16;
    case INT << 8 | 64: return I64;
    case INT << 8 | 32: return I32;
    case INT << 8 | 16: return I16;
    case INT << 8 | 8: return I8;
    case UINT << 8 | 8: return U8;
    case BOOL << 8 | 8: return U8;
    default: return -1;
    }
}

int code_of_torch(i32 type) {  // of torch's numbers of types; handles.py compares them with what python says
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
    found.address = u64(address), found.negated = -1;
    if (torch->keys >= 0) found.negated = (*(const u64 *)(*(const char **)handle + torch->keys) & torch->negation) != 0;
    return true;
}

bool look_by_dlpack(const ExchangeAPI *torch, PyObject *tensor, Look &found) {
    constexpr int ON_CPU = 1;
    DLTensor t;
    if (torch->look(tensor, &t)) return PyErr_Clear(), false;  // no memory of its own, or none that DLPack knows
    found.code = code_of_dlpack(t.dtype.code, t.dtype.bits);
    if (t.device_type != ON_CPU || t.dtype.lanes != 1 || found.code < 0 || t.ndim > DIMS) return false;
    found.address = u64(t.data) + t.byte_offset, found.bytes = found.offset = found.negated = -1;
    return measure(t.shape, t.strides, t.ndim, u32(t.dtype.code) << 8 | t.dtype.bits, found);
}

void fetch(const Functions *torch, PyObject *tensor) {
    constexpr int SIZE = 192, LINE = 64;
    const char *own = *(const char **)((char *)tensor + torch->place);
    for (int at = 0; at < SIZE; at += LINE) __builtin_prefetch(own + at);
}

const ExchangeAPI *exchange_api(PyObject *capsule) {
    auto *torch = (const ExchangeAPI *)PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (torch && torch->major != 1) PyErr_Format(PyExc_ValueError, "DLPack is of version %d, not 1", int(torch->major));
    return torch && torch->major == 1 ? torch : nullptr;
}

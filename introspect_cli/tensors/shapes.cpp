// The layouts of tensors met before, by shape and element type.
#include "shapes.h"

#include <cstddef>
#include <cstdlib>
#include <cstring>

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

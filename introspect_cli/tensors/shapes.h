// The layouts of tensors met before, by shape and element type.
#pragma once
#include "tensor.h"

struct Shapes {  // a hash table of open places, at most half full
    Shape *table = nullptr;
    size_t places = 0, used = 0;
};

HIDDEN Shape *find(const Shapes &shapes, const Shape &shape);  // where it is or could be; there must be some
HIDDEN bool put(Shapes &shapes, const Shape &shape);           // false without memory

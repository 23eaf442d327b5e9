"""Files of arrays as other tools write them."""

from __future__ import annotations

import json
import struct

import numpy as np


def as_safetensors(place, arrays, codes=None):
    header, data = {}, b""
    for name, value in arrays.items():
        raw = np.ascontiguousarray(value).tobytes()
        code = (codes or {}).get(name) or {"float32": "F32", "int64": "I64", "float64": "F64"}[str(value.dtype)]
        shape = list(value.shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps({"__metadata__": {"format": "np"}, **header}).encode()
    path = place.with_suffix(".safetensors")
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path

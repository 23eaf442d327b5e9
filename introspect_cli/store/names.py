"""Names of the files of a store, and the format's number.

Apart from `format`, which needs numpy: a capture makes its directory before the script may have loaded numpy itself.
"""

from __future__ import annotations

RUNS = "introspect-runs"
"""Where runs are kept that were given no directory."""

REDACTED = "<redacted>"
"""What stands in a setting for a value that is nobody else's business."""

FORMAT = 1
"""What this version writes, and the newest it reads."""

MANIFEST = "manifest.yaml"
SETTINGS = "settings"
TENSORS = "tensors"
LOCK = ".lock"
INDEX = "index.bin"
RECORDS = "records.arrow"
SITES = "sites.arrow"
LAYOUTS = "layouts.arrow"
MODULES = "modules.arrow"
STREAMS = (SITES, LAYOUTS, MODULES, RECORDS)

LIMIT_DOCUMENT = 4 << 20
"""Bytes of a YAML document."""

"""The store: a directory a run is written to while it goes on and read from at any time.

What was recorded must survive the death of the process at any instant, be read by other tools, and be safe to read when
it comes from a stranger. So a rank appends frames to one log, each with its own checks; what is not whole does not
exist. The bytes are described in `docs/reference/store-format.md`.

The folders are `files`, `format`, `remote`, `write`, `read` and `ranks`; each imports only from itself and those named
before it.

Whatever cannot be read or written raises `StoreError` with one sentence, `DamageError` where bytes are not as they were
written. Functions name what else they raise.
"""

"""Which steps are meant: as people write them, and as rules that compose, `first(10) | every(100) | last(50)`."""

"""Which steps are meant: as people write them, and as rules that compose, `First(10) | Every(100) | Last(50)`."""

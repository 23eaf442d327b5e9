"""One diverging step of both runs: lookups, evidence, sizes and outcome."""

"""Terms of a comparison: sites, names, table, evidence, findings, result."""

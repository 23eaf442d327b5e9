"""The passes of a comparison, each a function from table to table."""

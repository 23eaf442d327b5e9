"""Which module, parameter or value of one run is which of the other.

Sites with equal names are one. For the rest, each of these files is a question or part of its answer:

- `holdings`: what the names of a run hold, as far as it can prove anything.
- `candidates`: names that hold equal values, or near ones; from these one partner for each name, or none.
- `by_value`: from these, roots, parameters, the modules above them, and modules without parameters.
- `correspondence`: all of these in their order, and names that mean one module in a and another in b; what a comparison
  asks (`correspond`).
- `parameters`: which parameters hold the same numbers, those included that are several in one run and one in the other.
- `flow`: two implementations that share hardly a name.

Names as text, renamed as asked for, are in `terms.names`.
"""

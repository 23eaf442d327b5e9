"""Which module, parameter or value of one run is which of the other."""

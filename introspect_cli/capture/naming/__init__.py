"""Names for modules and tensors that two runs of a script agree on."""

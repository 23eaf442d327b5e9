"""One run as data: overview, module tree, history, data flow."""

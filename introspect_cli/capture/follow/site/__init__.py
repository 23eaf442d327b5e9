"""A directory for PYTHONPATH: python imports `sitecustomize` from it when it starts."""

"""The verbs, one a file: options in, exit code out."""

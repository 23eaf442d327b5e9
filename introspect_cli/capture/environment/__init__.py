"""What can differ between two runs without being a tensor: settings, sources, secrets left out."""

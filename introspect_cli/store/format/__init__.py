"""What the bytes of a store are: encoded from plain data and decoded to it, without a directory."""

"""Runs that lie elsewhere: in object storage, or packed into one file."""

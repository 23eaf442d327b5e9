"""The version of this package, where every file can have it without importing the rest."""

__version__ = "0.1.0"

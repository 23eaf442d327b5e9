"""Descriptors, directories and locks: how a file of a store is opened so that nothing outside can be reached."""

"""Probes that need nothing but what all probes share.

Each is a file, which names its class in `PROBE`; a new file is found by itself.
"""

"""Reasons of a divergence: evidence, findings, and the sentence."""

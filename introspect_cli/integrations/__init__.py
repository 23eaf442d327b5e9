"""Thin adapters to training frameworks."""

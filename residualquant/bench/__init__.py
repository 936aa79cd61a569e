"""Timings, each beside the ceiling that was expected before measuring."""

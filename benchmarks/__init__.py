"""Timings, apart from tests: each script writes what it measured, with the command that made it, to ``results/``."""

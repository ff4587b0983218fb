"""Measures: each command here makes its numbers again from a clean checkout."""

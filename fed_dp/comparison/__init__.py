"""Comparing mechanisms: all their runs, what came of them, and one report."""

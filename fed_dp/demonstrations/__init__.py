"""Demonstrations: what a curious server sees of what sites upload, in pictures."""

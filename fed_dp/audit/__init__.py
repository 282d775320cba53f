"""Audits: lower bounds on the privacy that is really lost, beside what is stated.

A bound above the statement refutes it in this configuration. A bound below it proves nothing: another attack
may do better.
"""

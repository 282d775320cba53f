"""The networks: those of the papers, with DSSGD's exact parameter counts, and small ones.

One module for each network, or for those of one family. Every network ends in log-probabilities (train with
the negative log-likelihood) and has no layer that mixes records (no BatchNorm), so that a per-record gradient
exists.
"""

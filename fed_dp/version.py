"""The version of fed_dp."""

__version__ = "0.1.0"

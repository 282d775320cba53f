"""The known data sets, one module for each, and a user's own folder."""

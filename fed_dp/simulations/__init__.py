"""Federated simulations: our Grid in process and on Ray, studies, progress, report."""

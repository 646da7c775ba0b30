"""Runs over datasets: records, metrics and the report."""

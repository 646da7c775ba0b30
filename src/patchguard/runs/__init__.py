"""The engine of `certify`, `predict` and `attack`: plan, records, resume, shards, metrics."""

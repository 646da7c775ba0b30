"""Kinds of guards, each keeping the contract of guard.py: `local` (cells of small fields), `interval` (bounds)."""

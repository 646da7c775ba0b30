"""Attacks: what tries to refute a certificate."""

"""The pages that show runs."""

"""One module per command: its options, its output, and nothing that `patchguard` does not show."""

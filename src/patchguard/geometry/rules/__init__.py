"""How the entries of a tensor depend on pixels, operation by operation; `patchguard.geometry.trace` walks them."""

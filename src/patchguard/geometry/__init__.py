"""Which cells or masks a patch reaches, from source pixels through preprocessing and network."""

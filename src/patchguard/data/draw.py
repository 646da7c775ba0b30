"""`spread`: a seeded choice that is even over a sorted list."""

import numpy as np

from patchguard.errors import InputError
from patchguard.runtime import derive_seed


def spread(count: int, total: int, seed: int = 0) -> list[int]:
    """Choose `count` of the places 0 .. total - 1, in order.

    Rule.  Cut the places into `count` runs, the i-th from floor(i total / count) to before floor((i+1) total / count),
           and draw one place from each.

    Over images sorted by class, each class gets its share up to one image. The choice depends on the three numbers
    alone.
    """
    if not 0 <= count <= total:
        raise InputError(f"`count` must be a whole number from 0 to {total}, the images there are; got {count}.")
    edges = [place * total // count for place in range(count + 1)] if count else [0]
    draws = np.random.default_rng(derive_seed(seed, total, count)).random(count)
    return [start + int(draw * (stop - start)) for start, stop, draw in zip(edges[:-1], edges[1:], draws, strict=True)]

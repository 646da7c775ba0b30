"""`InputError`: the one exception for input that a user can mend."""


class InputError(ValueError):
    """Says which input is wrong, what it must be, what it was, and what to do about it."""


class NoFieldError(InputError):
    """A network whose field cannot be derived: it may still answer, but nothing can be proved about its answers."""


def nearest(name: str, known: list[str]) -> str:
    """Return a hint that names the known word closest to `name`, or all of them."""
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."

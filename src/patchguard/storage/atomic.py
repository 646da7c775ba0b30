"""Files that are whole or absent: written under another name, then renamed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a draft beside `path`; it takes that name if all went well, and is removed otherwise."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        yield draft
        os.replace(draft, path)
    finally:
        with suppress(OSError):
            draft.unlink()


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write a file, all or nothing; `durable` waits until it would survive a power failure, too."""
    with replace_file(path) as draft, open(draft, "wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())

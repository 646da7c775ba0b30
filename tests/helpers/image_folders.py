"""Small folders of images, written on the spot."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write images at names below the test's folder; the shade of an image is its place in the call."""

    def write(*names: str, size: tuple[int, int] = (6, 8)) -> Path:
        for shade, name in enumerate(names):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((*size, 3), shade, np.uint8)).save(path, "PNG")
        return tmp_path

    return write

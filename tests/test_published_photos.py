"""The published model of large photos answers as it always did: all 500 images of the sample, enlarged.

In a file of its own: it takes minutes, and files are what processes share among them.
"""

import hashlib

import pytest
from helpers.published_record import PHOTOS, RECORD, check_values, images_for
from helpers.published_record import one_thread as one_thread


def test_the_enlarged_images_are_the_recorded_ones() -> None:
    """A test of resizing: the values of imagenette_bn17 mean nothing on other images."""
    content = images_for(PHOTOS, 60).numpy().tobytes()
    assert hashlib.sha256(content).hexdigest() == RECORD["enlarged_images"]


@pytest.mark.slow
def test_all_labels_and_margins_of_enlarged_images_are_the_recorded_ones() -> None:
    check_values(PHOTOS, 500)

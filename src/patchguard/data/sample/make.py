"""Write the embedded sample anew from the official files of CIFAR-10, byte for byte.

    python -m patchguard.data.sample.make ROOT [FILE]

ROOT holds the official files. FILE is by default the file in the package.
"""

import io
import sys
import zipfile
from pathlib import Path

import numpy as np

from patchguard.data import cifar10
from patchguard.data.catalog import CIFAR10_CLASSES
from patchguard.data.dataset import sample_evenly
from patchguard.data.sample import FILE

PER_CLASS = 50
SEED = 0


def sample(root: Path) -> dict[str, np.ndarray]:
    """Return images, targets and numbers in the test set of the chosen images.

    Rule.  Of the numbers of each class in the official test set, in order, take `sample_evenly(50, 1000, seed=0)`.
    """
    images, targets = cifar10.read(root, cifar10.TEST)
    classes = [np.flatnonzero(targets == target) for target in range(len(CIFAR10_CLASSES))]
    index = np.sort(np.concatenate([numbers[sample_evenly(PER_CLASS, len(numbers), SEED)] for numbers in classes]))
    return {
        "images": images[index],
        "targets": targets[index].astype(np.uint8),
        "index": index.astype(np.uint16),
    }


def write(arrays: dict[str, np.ndarray], path: Path) -> None:
    """Write an npz file that depends on the arrays alone.

    The times of day are fixed. The compression is bzip2, whose output, unlike that of deflate, is the same in every
    version of the library.
    """
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, array, version=(1, 0), allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system = 3
            archive.writestr(entry, content.getvalue(), zipfile.ZIP_BZIP2, compresslevel=9)


if __name__ == "__main__":
    write(sample(Path(sys.argv[1])), Path(sys.argv[2]) if len(sys.argv) > 2 else FILE)

"""Names of classes, in the order of their numbers: the one home of each list."""

CIFAR10 = ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

# Folders are named by WordNet number, and their sorted order is the order of the classes.
IMAGENETTE_BY_WORDNET = {
    "n01440764": "tench",
    "n02102040": "English springer",
    "n02979186": "cassette player",
    "n03000684": "chain saw",
    "n03028079": "church",
    "n03394916": "French horn",
    "n03417042": "garbage truck",
    "n03425413": "gas pump",
    "n03445777": "golf ball",
    "n03888257": "parachute",
}
IMAGENETTE = tuple(IMAGENETTE_BY_WORDNET.values())
FLOWERS = ("daisy", "dandelion", "roses", "sunflowers", "tulips")
CATS_VS_DOGS = ("Cat", "Dog")

"""The experiments of the paper by name: `patchguard reproduce NAME`. Importing this imports no torch."""

from patchguard.experiments.paper.experiment import Experiment, late

PHOTOS = ("imagenette", "imagenet")
ALL = ("imagenette", "imagenet", "cifar10")
DETAILED = ("imagenette", "cifar10")

# In the order of the paper.
EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            name="main",
            title="Clean and provable robust accuracy of different defenses",
            where=("tab-huge-provable",),
            sets=ALL,
            run=late("main_table"),
        ),
    )
}

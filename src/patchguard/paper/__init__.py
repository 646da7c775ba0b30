"""The experiments of the paper by name: `patchguard reproduce NAME`. Importing this imports no torch."""

from collections.abc import Sequence

from patchguard.errors import InputError, nearest
from patchguard.paper.experiment import Experiment, import_later

ALL = ("imagenette", "imagenet", "cifar10")
DETAILED = ("imagenette", "cifar10")

# Name, title, tables and figures of the paper, datasets, function. In the order of the paper; our own come last.
_ROWS: tuple[tuple[str, str, str, tuple[str, ...], str], ...] = (
    (
        "local_attack",
        "Section 3.1: local predictions and large logits of an undefended ResNet under attack",
        "tab-local-attack, fig-hist-net, fig-hist-nette, fig-hist-cifar",
        ALL,
        "local_attack",
    ),
    ("main", "Clean and provable robust accuracy of different defenses", "tab-huge-provable", ALL, "main_table"),
    ("vanilla", "Clean accuracy of ResNet and BagNet", "tab-huge-vanilla", ALL, "clean_accuracy:vanilla"),
    (
        "clipping",
        "Effect of logits clipping values on undefended networks",
        "tab-clipping, tab-clipping-cifar",
        DETAILED,
        "clean_accuracy:clipping",
    ),
    (
        "feature_masking",
        "Invariance of predictions to feature masking",
        "tab-feature-mask, tab-feature-mask-cifar",
        DETAILED,
        "clean_accuracy:feature_masking",
    ),
    (
        "fields",
        "Effect of receptive field sizes",
        "tab-masking-provable, tab-masking-provable-cifar",
        DETAILED,
        "masking_tables:fields",
    ),
    (
        "thresholds",
        "Effect of detection thresholds, with the corrected bound",
        "tab-masking-thres, tab-masking-thres-cifar",
        DETAILED,
        "thresholds",
    ),
    (
        "features",
        "Effect of feature types on Mask-BN and Mask-DS",
        "tab-feature-bn, tab-feature-ds, tab-feature-bn-cifar, tab-feature-ds-cifar",
        DETAILED,
        "masking_tables:features",
    ),
    (
        "mask_sizes",
        "Effect of over-conservatively large masks; Lemma 1 against the tighter bound",
        "tab-mismatch, tab-mismatch-cifar",
        DETAILED,
        "masking_tables:mask_sizes",
    ),
    ("time", "Inference time per image", "tab-time", (), "inference_time"),
    ("training", "Effect of provable adversarial training", "tab-adv-training", ALL, "masking_tables:training"),
    ("center", "Local features focus on the center of their field", "fig-center", (), "receptive_fields:center"),
    ("window_size", "How many cells a patch reaches", "fig-window, eq-receptive", (), "receptive_fields:window_size"),
    ("top_k", "Top-k accuracies", "tab-topk", ALL, "masking_tables:top_k"),
    (
        "more_sets",
        "Performance on cats-vs-dogs and flowers",
        "tab-more-ds",
        ("cats_vs_dogs", "flowers"),
        "masking_tables:more_sets",
    ),
    (
        "toy_example",
        "De-randomized smoothing against robust masking on eleven votes",
        "apx-generalization",
        (),
        "toy_votes",
    ),
    ("shapes", "Patches of different shapes", "tab-shape", ALL, "masking_tables:shapes"),
    (
        "several_patches",
        "Several patches: merged, cells masked, other secure sums",
        "apx-multiple-patch",
        ALL,
        "several_patches",
    ),
    ("large_patches", "Patches up to 192x192", "fig-large-patch", DETAILED, "masking_tables:large_patches"),
    (
        "occlusion",
        "A block of 96x96 pixels over the image",
        "fig-large-patch-visu",
        ("imagenette", "imagenet"),
        "occlusion",
    ),
    (
        "empirical_defenses",
        "Empirical defenses beside a certified one, under attacks that know them",
        "",
        DETAILED,
        "empirical_defenses",
    ),
)
EXPERIMENTS = {
    name: Experiment(name, title, tuple(where.split(", ")) if where else (), datasets, import_later(function))
    for name, title, where, datasets, function in _ROWS
}


def select_experiments(name: str, datasets: Sequence[str] = ()) -> list[tuple[Experiment, str]]:
    """Return the experiments that a name stands for, each with those of its datasets that are asked for."""
    if name != "all" and name not in EXPERIMENTS:
        raise InputError(
            f"`name` must be an experiment or all; got {name!r}. {nearest(name, [*EXPERIMENTS, 'all'])} "
            "`patchguard reproduce --list` shows them."
        )
    experiments = list(EXPERIMENTS.values()) if name == "all" else [EXPERIMENTS[name]]
    known = sorted({dataset for experiment in experiments for dataset in experiment.datasets})
    for dataset in datasets:
        if dataset not in known:
            usable = f"Known: {', '.join(known)}." if known else "It needs none."
            raise InputError(f"`--data` must be a dataset that {name} can use; got {dataset!r}. {usable}")
    return [
        (experiment, dataset)
        for experiment in experiments
        for dataset in experiment.datasets or ("",)
        if not datasets or dataset in datasets
    ]

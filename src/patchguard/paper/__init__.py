"""The experiments of the paper by name: `patchguard reproduce NAME`. Importing this imports no torch."""

from patchguard.paper.experiment import Experiment, late

ALL = ("imagenette", "imagenet", "cifar10")
DETAILED = ("imagenette", "cifar10")

# In the order of the paper.
EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            name="local_attack",
            title="Section 3.1: local predictions and large logits of an undefended ResNet under attack",
            where=("tab-local-attack", "fig-hist-net", "fig-hist-nette", "fig-hist-cifar"),
            sets=ALL,
            run=late("local_attack"),
        ),
        Experiment(
            name="main",
            title="Clean and provable robust accuracy of different defenses",
            where=("tab-huge-provable",),
            sets=ALL,
            run=late("main_table"),
        ),
        Experiment(
            name="vanilla",
            title="Clean accuracy of ResNet and BagNet",
            where=("tab-huge-vanilla",),
            sets=ALL,
            run=late("undefended", "vanilla"),
        ),
        Experiment(
            name="clipping",
            title="Effect of logits clipping values on undefended networks",
            where=("tab-clipping", "tab-clipping-cifar"),
            sets=DETAILED,
            run=late("undefended", "clipping"),
        ),
        Experiment(
            name="feature_masking",
            title="Invariance of predictions to feature masking",
            where=("tab-feature-mask", "tab-feature-mask-cifar"),
            sets=DETAILED,
            run=late("undefended", "feature_masking"),
        ),
        Experiment(
            name="fields",
            title="Effect of receptive field sizes",
            where=("tab-masking-provable", "tab-masking-provable-cifar"),
            sets=DETAILED,
            run=late("masking_tables", "fields"),
        ),
        Experiment(
            name="thresholds",
            title="Effect of detection thresholds, with the corrected bound",
            where=("tab-masking-thres", "tab-masking-thres-cifar"),
            sets=DETAILED,
            run=late("thresholds"),
        ),
        Experiment(
            name="features",
            title="Effect of feature types on Mask-BN and Mask-DS",
            where=("tab-feature-bn", "tab-feature-ds", "tab-feature-bn-cifar", "tab-feature-ds-cifar"),
            sets=DETAILED,
            run=late("masking_tables", "features"),
        ),
        Experiment(
            name="mask_sizes",
            title="Effect of over-conservatively large masks; Lemma 1 against the tighter bound",
            where=("tab-mismatch", "tab-mismatch-cifar"),
            sets=DETAILED,
            run=late("mask_sizes"),
        ),
        Experiment(
            name="time",
            title="Inference time per image",
            where=("tab-time",),
            sets=(),
            run=late("inference_time"),
        ),
        Experiment(
            name="training",
            title="Effect of provable adversarial training",
            where=("tab-adv-training",),
            sets=ALL,
            run=late("masking_tables", "training"),
        ),
        Experiment(
            name="centre",
            title="Local features focus on the centre of their field",
            where=("fig-center",),
            sets=(),
            run=late("looks"),
        ),
        Experiment(
            name="window_size",
            title="How many cells a patch reaches",
            where=("fig-window", "eq-receptive"),
            sets=(),
            run=late("window_size"),
        ),
        Experiment(
            name="top_k",
            title="Top-k accuracies",
            where=("tab-topk",),
            sets=ALL,
            run=late("masking_tables", "top_k"),
        ),
        Experiment(
            name="more_sets",
            title="Performance on cats-vs-dogs and flowers",
            where=("tab-more-ds",),
            sets=("cats_vs_dogs", "flowers"),
            run=late("more_sets"),
        ),
        Experiment(
            name="toy_example",
            title="De-randomized smoothing against robust masking on eleven votes",
            where=("apx-generalization",),
            sets=(),
            run=late("toy_votes"),
        ),
        Experiment(
            name="shapes",
            title="Patches of different shapes",
            where=("tab-shape",),
            sets=ALL,
            run=late("masking_tables", "shapes"),
        ),
        Experiment(
            name="several_patches",
            title="Several patches: merged, cells masked, other secure sums",
            where=("apx-multiple-patch",),
            sets=ALL,
            run=late("several_patches"),
        ),
        Experiment(
            name="large_patches",
            title="Patches up to 192x192",
            where=("fig-large-patch",),
            sets=DETAILED,
            run=late("large_patches"),
        ),
        Experiment(
            name="occlusion",
            title="A block of 96x96 pixels over the image",
            where=("fig-large-patch-visu",),
            sets=("imagenette", "imagenet"),
            run=late("occlusion"),
        ),
    )
}

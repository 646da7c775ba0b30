"""Robust masking with other settings: field sizes, kinds of evidence, training, the top k, shapes of patches."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from patchguard.defenses.evidence import Evidence
from patchguard.geometry.windows import Windows
from patchguard.paper import models, published
from patchguard.paper.context import Context
from patchguard.paper.experiment import TITLES, Result, Table
from patchguard.paper.maps import Maps
from patchguard.paper.models import Network
from patchguard.paper.rows import Build, Cell, Found, WindowsOf, both, measure
from patchguard.paper.tally import CONFIDENCE, LOGITS, PREDICTION, VOTE, Question, double_masking, masking
from patchguard.patch import Patch

Rule = Callable[[Windows], Question]


def _where(label: str, dataset: str) -> str:
    """Return the label of the table: those of the appendix end in -cifar."""
    return f"{label}-cifar" if dataset == "cifar10" else label


def _columns(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{name} {kind}" for name in names for kind in ("clean", "robust"))


def _over_patches(dataset: str, rules: dict[str, Rule]) -> Build:
    """Return rows of clean and robust accuracy for each of the paper's patches."""

    def build(maps: Maps, windows_of: WindowsOf) -> dict[str, Sequence[Cell]]:
        windows = [windows_of(patch) for patch in models.patches(dataset, maps.size[0]).values()]
        return {label: [cell for each in windows for cell in both(rule(each))] for label, rule in rules.items()}

    return build


# -- tab-masking-provable, tab-masking-provable-cifar ------------------------------------------------------------------


def fields(context: Context, dataset: str) -> Result:
    """Mask-BN with receptive fields of 33, 17 and 9 pixels; double masking of the same maps beside it."""
    context.images(dataset)
    columns = _columns(list(models.patches(dataset)))
    paper, beside = Found(), Found()
    stand_in = models.small_field(dataset)
    for field in (33, 17, 9):
        network, label = models.bagnet(dataset, field), f"Mask-BN-{field}"
        theirs = {label: published.FIELDS[dataset][label]}
        paper.add(measure(context, dataset, network, theirs, len(columns), _over_patches(dataset, {label: masking})))
        beside.add(_double(context, dataset, network, columns))
    if stand_in is not None:
        rules: dict[str, Rule] = {"robust masking": masking}
        build = _over_patches(dataset, rules)
        beside.add(measure(context, dataset, stand_in, {}, len(columns), build, prefix=True))
        beside.add(_double(context, dataset, stand_in, columns))
    where, title = _where("tab-masking-provable", dataset), TITLES[dataset]
    return Result(
        tables=(
            Table(title=f"Receptive fields on {title}", where=where, columns=columns, rows=tuple(paper.rows)),
            Table(title=f"Beside the paper on {title}", where="", columns=columns, rows=tuple(beside.rows)),
        ),
        notes=tuple(dict.fromkeys((*paper.notes, *beside.notes))),
    )


def _double(context: Context, dataset: str, network: Network, columns: tuple[str, ...]) -> Found:
    build = _over_patches(dataset, {"double masking": double_masking})
    return measure(context, dataset, network, {}, len(columns), build, prefix=True)


# -- tab-feature-bn, tab-feature-ds and those of CIFAR-10 --------------------------------------------------------------


def _kinds(prediction: Evidence) -> dict[str, Rule]:
    return {
        "Logits": lambda windows: masking(windows, LOGITS),
        "Confidence": lambda windows: masking(windows, CONFIDENCE),
        "Prediction": lambda windows: masking(windows, prediction),
    }


def features(context: Context, dataset: str) -> Result:
    """Robust masking of logits, confidences and predictions, of BagNet-17 and of bands.

    A band's prediction is a vote for each class with a confidence of at least 0.2, as in de-randomized smoothing.
    """
    context.images(dataset)
    columns = _columns(list(models.patches(dataset)))
    tables, notes = [], Found()
    for network, numbers, label, prediction in (
        *((each, published.FEATURES_BN, "tab-feature-bn", PREDICTION) for each in models.maskers(dataset)),
        (models.bands(dataset), published.FEATURES_DS, "tab-feature-ds", VOTE),
    ):
        build = _over_patches(dataset, _kinds(prediction))
        found = measure(context, dataset, network, numbers[dataset], len(columns), build)
        title = f"Kinds of evidence of {network.label} on {TITLES[dataset]}"
        tables.append(Table(title=title, where=_where(label, dataset), columns=columns, rows=tuple(found.rows)))
        notes.add(Found(notes=found.notes))
    return Result(tables=tuple(tables), notes=tuple(notes.notes))


# -- tab-adv-training --------------------------------------------------------------------------------------------------


def training(context: Context, dataset: str) -> Result:
    """Mask-BN-17 of networks trained with and without provable adversarial training."""
    context.images(dataset)
    name = models.usual_patch(dataset)
    theirs = published.ADVERSARIAL_TRAINING[dataset]
    found = Found()

    def build_for(label: str) -> Build:
        def build(maps: Maps, windows_of: WindowsOf) -> dict[str, Sequence[Cell]]:
            return {label: both(masking(windows_of(models.patches(dataset, maps.size[0])[name])))}

        return build

    networks = (
        ("Conventional training", models.plain_bagnet(dataset, only=True)),
        ("Provable adv. training", models.bagnet(dataset, only=True)),
    )
    for label, network in networks:
        found.add(measure(context, dataset, network, {label: theirs[label]}, 2, build_for(label)))
    table = Table(
        title=f"Provable adversarial training on {TITLES[dataset]}, {name} patch",
        where="tab-adv-training",
        columns=("clean", "robust"),
        rows=tuple(found.rows),
    )
    return Result(tables=(table,), notes=tuple(found.notes))


# -- tab-topk ----------------------------------------------------------------------------------------------------------


def top_k(context: Context, dataset: str) -> Result:
    """The true class stays among the k best; the paper has ImageNet, where 1000 classes make it a question."""
    context.images(dataset)
    columns = _columns(list(models.patches(dataset)))

    def rule(k: int) -> Rule:
        return lambda windows: replace(masking(windows), top_k=k)

    rules = {f"Top-{k}": rule(k) for k in range(1, 6)}
    theirs = published.TOP_K.get(dataset, dict.fromkeys(rules, ()))
    tables, notes = [], Found()
    for network in models.maskers(dataset):
        found = measure(context, dataset, network, theirs, len(columns), _over_patches(dataset, rules))
        title = f"Top k of {network.label} on {TITLES[dataset]}"
        where = "tab-topk" if dataset in published.TOP_K else ""
        tables.append(Table(title=title, where=where, columns=columns, rows=tuple(found.rows)))
        notes.add(Found(notes=found.notes))
    return Result(tables=tuple(tables), notes=tuple(notes.notes))


# -- tab-shape ---------------------------------------------------------------------------------------------------------

SMALL_SHAPES = ("2x12", "3x8", "4x6", "5x5", "6x4", "8x3", "12x2")  # about 25 of 32 x 32 pixels, as 2,300 of 224 x 224


def shapes(context: Context, dataset: str) -> Result:
    """Rectangles of about equal area, height x width: nine in photos as in the paper, seven in CIFAR-10 beside it."""
    context.images(dataset)
    theirs = published.SHAPES.get(dataset, dict.fromkeys(SMALL_SHAPES, ()))

    def build(maps: Maps, windows_of: WindowsOf) -> dict[str, Sequence[Cell]]:
        patches = {name: Patch(*(int(side) for side in name.split("x"))) for name in theirs}
        return {name: both(masking(windows_of(patch))) for name, patch in patches.items()}

    tables, notes = [], Found()
    for network in models.maskers(dataset):
        found = measure(context, dataset, network, theirs, 2, build)
        title = f"Shapes of patches, {network.label} on {TITLES[dataset]}"
        where = "tab-shape" if dataset in published.SHAPES else ""
        tables.append(Table(title=title, where=where, columns=("clean", "robust"), rows=tuple(found.rows)))
        notes.add(Found(notes=found.notes))
    return Result(tables=tuple(tables), notes=tuple(notes.notes))

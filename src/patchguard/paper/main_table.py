"""tab-huge-provable: clean and provable robust accuracy of Mask-BN, Mask-DS, CBN, DS and IBP; double masking beside."""

from collections.abc import Sequence

from patchguard.data.loading import load_images
from patchguard.defenses import ClippedSum, MajorityVote
from patchguard.defenses.serialization import find_defense
from patchguard.geometry.windows import Windows
from patchguard.paper import networks, published
from patchguard.paper.context import Context
from patchguard.paper.counting import Measured, Rule, cells_per_patch, clean_robust_columns, make_result, measure
from patchguard.paper.experiment import TITLES, Missing, Result, Row, Value
from patchguard.paper.fast_certificates import double_masking_query, masking_query, sum_query
from patchguard.paper.networks import Network
from patchguard.paper.query import CONFIDENCE, TANH, VOTE, Query
from patchguard.patch import Patch
from patchguard.runs.metrics import proportion
from patchguard.training.evaluate import evaluate
from patchguard.training.recipe import CIFAR10_SIZE

MASK_BN: dict[str, Rule] = {"Mask-BN": masking_query}
CBN: dict[str, Rule] = {"CBN": lambda windows: sum_query(ClippedSum(), windows, TANH)}
MASK_DS: dict[str, Rule] = {
    "Mask-DS": lambda windows: masking_query(windows, CONFIDENCE),
    "DS": lambda windows: Query(evidence=VOTE, defense=MajorityVote(spatial=False), windows=windows),
}
DOUBLE: dict[str, Rule] = {"double masking": double_masking_query}
BESIDE_CBN: dict[str, Rule] = {
    "CBN, cells counted": lambda windows: Query(evidence=TANH, defense=ClippedSum(spatial=False), windows=windows)
}
BESIDE_DS: dict[str, Rule] = {
    "double masking of confidences": lambda windows: double_masking_query(windows, CONFIDENCE),
    "DS, window by window": lambda windows: sum_query(MajorityVote(), windows, VOTE),
}
VOTES = (
    "CBN is certified window by window as published, but against every rival, not the runner-up alone. DS is certified "
    "by its published rule, which counts cells; window by window is exact. A band votes for every class with a "
    "confidence of at least 0.2."
)


def run(context: Context, dataset: str) -> Result:
    """Measure every row of one dataset."""
    theirs, columns = published.MAIN[dataset], clean_robust_columns(table_patches(dataset))
    paper, beside = Measured(), Measured()

    def ask(network: Network, rules: dict[str, Rule], *, prefix: bool = True) -> Measured:
        known = {label: theirs[label] for label in rules if label in theirs}
        make_cells = cells_per_patch(dataset, rules, len(table_patches(dataset)))
        return measure(context, dataset, network, known, len(columns), make_cells, prefix=prefix)

    bagnet, bands = networks.bagnet(dataset), networks.band_network(dataset)
    plain = networks.plain_bagnet(dataset)  # CBN has conventional training
    paper.add(ask(bagnet, MASK_BN, prefix=False))
    paper.add(ask(plain, CBN, prefix=False))
    paper.add(ask(bands, MASK_DS, prefix=False))
    paper.rows += interval_rows(context, dataset)
    beside.add(ask(bagnet, DOUBLE))
    beside.add(ask(plain, BESIDE_CBN))
    beside.add(ask(bands, BESIDE_DS))
    for ours in networks.small_networks(dataset):
        beside.add(ask(ours, {"robust masking": masking_query, **DOUBLE, "clipped sum": CBN["CBN"], **BESIDE_CBN}))
    double = networks.double_masking_network(dataset)
    if double is not None and context.find(double.names) not in beside.models:
        beside.add(ask(double, DOUBLE))
    if context.defense:
        beside.add(add_defense(context, dataset, [bagnet, plain, bands, *networks.small_networks(dataset), double]))
    order = list(theirs)
    paper.rows.sort(key=lambda row: order.index(row.label) if row.label in order else len(order))
    return make_result(
        (
            paper.table(f"Defenses on {TITLES[dataset]}", "tab-huge-provable", columns),
            beside.table(f"Beside the paper on {TITLES[dataset]}", "", columns),
        ),
        (*paper.notes, *beside.notes, VOTES),
        settings={"patches": {name: patch.height for name, patch in table_patches(dataset).items()}},
    )


def add_defense(context: Context, dataset: str, asked: Sequence[Network | None]) -> Measured:
    """Return a row for the defense of the context with every network that is here, on its own kind of evidence."""
    kind, patches = find_defense(context.defense), table_patches(dataset)

    def rule(windows: Windows) -> Query:
        return Query(evidence=kind.default_evidence, defense=kind.fitted(windows), windows=windows)

    here = {name: each for each in asked if each is not None and (name := context.find(each.names)) is not None}
    measured = Measured()
    for network in here.values():
        make_cells = cells_per_patch(dataset, {context.defense: rule}, len(patches))
        measured.add(measure(context, dataset, network, {}, 2 * len(patches), make_cells, prefix=True))
    if not here:
        note = "no network is here; the other rows say how to get one"
        measured.rows.append(Row(label=context.defense, ours=(None,) * (2 * len(patches)), note=note))
    return measured


def table_patches(dataset: str, side: int = 224) -> dict[str, Patch]:
    """Return the patches of the table: on CIFAR-10 only the first two."""
    patches = networks.patches(dataset, side)
    return {name: patches[name] for name in list(patches)[: 2 if dataset == "cifar10" else 3]}


def interval_rows(context: Context, dataset: str) -> list[Row]:
    """Return the row of interval bounds, which need images, not logits: one network per patch, trained against it."""
    theirs = published.MAIN[dataset]["IBP"]
    if dataset != "cifar10":
        note = "computationally infeasible, as in the paper"
        return [Row(label="IBP", ours=(None,) * len(theirs), published=theirs, note=note)]
    ours: list[Value] = []
    notes: list[str] = []
    for patch in table_patches(dataset).values():
        name = f"cifar10_ibp_{patch.height}"
        try:
            guard = context.interval_guard(name)
        except Missing as missing:
            ours += [None, None]
            notes.append(str(missing))
            continue
        guard.model.to(context.device)
        images, _ = load_images(context.images(dataset), size=(CIFAR10_SIZE, CIFAR10_SIZE))
        accuracy = evaluate(guard, images, patch)
        ours += [proportion(accuracy.correct, accuracy.total), proportion(accuracy.certified_correct, accuracy.total)]
        notes.append(name)
    reason = networks.describe_training("cifar10_ibp_2") if any(value is not None for value in ours) else ""
    return [Row(label="IBP", ours=tuple(ours), published=theirs, note="; ".join(notes), reason=reason)]

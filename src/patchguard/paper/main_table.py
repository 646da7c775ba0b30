"""tab-huge-provable: clean and provable robust accuracy of Mask-BN, Mask-DS, CBN, DS; beside them double masking."""

from collections.abc import Callable, Sequence

from patchguard.data.loading import loaded
from patchguard.defenses import ClippedSum, MajorityVote
from patchguard.geometry.windows import Windows
from patchguard.paper import models, published
from patchguard.paper.context import Context
from patchguard.paper.experiment import TITLES, Missing, Result, Row, Table, Value
from patchguard.paper.maps import Maps
from patchguard.paper.rows import Build, Cell, Found, WindowsOf, both, measure
from patchguard.paper.tally import CONFIDENCE, TANH, VOTE, Question, double_masking, masking
from patchguard.patch import Patch
from patchguard.runs.metrics import share
from patchguard.training.evaluate import evaluate
from patchguard.training.recipe import CIFAR10_SIZE

WHERE = "tab-huge-provable"
Rule = Callable[[Windows], Question]

MASK_BN: dict[str, Rule] = {"Mask-BN": masking}
CBN: dict[str, Rule] = {"CBN": lambda windows: Question(evidence=TANH, defense=ClippedSum(), windows=windows)}
MASK_DS: dict[str, Rule] = {
    "Mask-DS": lambda windows: masking(windows, CONFIDENCE),
    "DS": lambda windows: Question(evidence=VOTE, defense=MajorityVote(spatial=False), windows=windows),
}
DOUBLE: dict[str, Rule] = {"double masking": double_masking}
BESIDE_CBN: dict[str, Rule] = {
    "CBN, cells counted": lambda windows: Question(evidence=TANH, defense=ClippedSum(spatial=False), windows=windows)
}
BESIDE_DS: dict[str, Rule] = {
    "double masking of confidences": lambda windows: double_masking(windows, CONFIDENCE),
    "DS, window by window": lambda windows: Question(evidence=VOTE, defense=MajorityVote(), windows=windows),
}


def run(context: Context, dataset: str) -> Result:
    """Measure every row of one data set."""
    context.images(dataset)
    theirs, count = published.MAIN[dataset], 2 * len(sizes(dataset))
    paper, beside = Found(), Found()

    def ask(network: models.Network, rules: dict[str, Rule], *, prefix: bool = True) -> Found:
        known = {label: theirs[label] for label in rules if label in theirs}
        return measure(context, dataset, network, known, count, _build(dataset, rules), prefix=prefix)

    bagnet, bands, ours = models.bagnet(dataset), models.bands(dataset), models.small_field(dataset)
    plain = models.plain_bagnet(dataset)  # CBN has conventional training
    paper.add(ask(bagnet, MASK_BN, prefix=False))
    paper.add(ask(plain, CBN, prefix=False))
    paper.add(ask(bands, MASK_DS, prefix=False))
    paper.rows += interval_rows(context, dataset, count)
    beside.add(ask(bagnet, DOUBLE))
    beside.add(ask(plain, BESIDE_CBN))
    beside.add(ask(bands, BESIDE_DS))
    if ours is not None:
        rules = {"robust masking": masking, **DOUBLE, "clipped sum": CBN["CBN"], **BESIDE_CBN}
        beside.add(ask(ours, rules))
    double = models.double_masker(dataset)
    if double is not None and context.find(double.names) not in beside.models:
        beside.add(ask(double, DOUBLE))
    columns = tuple(f"{key} {kind}" for key in sizes(dataset) for kind in ("clean", "robust"))
    title = TITLES[dataset]
    paper.add(Found(notes=beside.notes))
    order = list(theirs)
    rows = sorted(paper.rows, key=lambda row: order.index(row.label) if row.label in order else len(order))
    return Result(
        tables=(
            Table(title=f"Defenses on {title}", where=WHERE, columns=columns, rows=tuple(rows)),
            Table(title=f"Beside the paper on {title}", where="", columns=columns, rows=tuple(beside.rows)),
        ),
        notes=(*paper.notes, VOTES),
        settings={"patches": {key: patch.height for key, patch in sizes(dataset).items()}},
    )


VOTES = (
    "CBN is certified window by window as published, but against every rival, not the runner-up alone. DS is certified "
    "by its published rule, which counts cells; window by window is exact. A band votes for every class with a "
    "confidence of at least 0.2."
)


def sizes(dataset: str, side: int = 224) -> dict[str, Patch]:
    """Return the patches of the table: on CIFAR-10 only the first two."""
    found = models.patches(dataset, side)
    return {key: found[key] for key in list(found)[: 2 if dataset == "cifar10" else 3]}


def _build(dataset: str, rules: dict[str, Rule]) -> Build:
    def build(maps: Maps, windows_of: WindowsOf) -> dict[str, Sequence[Cell]]:
        windows = [windows_of(patch) for patch in sizes(dataset, maps.size[0]).values()]
        return {label: [cell for each in windows for cell in both(rule(each))] for label, rule in rules.items()}

    return build


def interval_rows(context: Context, dataset: str, columns: int) -> list[Row]:
    """Return the row of interval bounds, which do not come from maps: one network per patch, trained against it."""
    theirs = published.MAIN[dataset]["IBP"]
    if dataset != "cifar10":
        note = "computationally infeasible, as in the paper"
        return [Row(label="IBP", ours=(None,) * columns, published=theirs, note=note)]
    ours: list[Value] = []
    notes: list[str] = []
    for patch in sizes(dataset).values():
        name = f"cifar10_ibp_{patch.height}"
        try:
            guard = context.interval_guard(name)
        except Missing as lacking:
            ours += [None, None]
            notes.append(str(lacking))
            continue
        guard.model.to(context.device)
        images, _ = loaded(context.images(dataset), size=(CIFAR10_SIZE, CIFAR10_SIZE))
        found = evaluate(guard, images, patch)
        ours += [share(found.correct, found.total), share(found.certified_correct, found.total)]
        notes.append(name)
    reason = models.trained("cifar10_ibp_2") if any(value is not None for value in ours) else ""
    return [Row(label="IBP", ours=tuple(ours), published=theirs, note="; ".join(notes), reason=reason)]

"""tab-mismatch: masks made for one patch against smaller ones; Lemma 1 against the tighter bound at one mask size."""

from collections.abc import Sequence

from patchguard.defenses import RobustMasking
from patchguard.geometry.windows import Windows
from patchguard.paper import main_table, models, published
from patchguard.paper.context import Context
from patchguard.paper.experiment import TITLES, Result, Table
from patchguard.paper.maps import Maps
from patchguard.paper.models import Network
from patchguard.paper.rows import Build, Cell, Found, WindowsOf, enlargement, measure
from patchguard.paper.tally import LOGITS, Question
from patchguard.patch import Patch

# 4.5 % of 224 x 224 is a square of 48 pixels. 4.4 % of CIFAR-10 is 7 x 7 cells of BagNet-17, which 40 of 192 pixels
# reach; in the image itself the next square is 7 x 7 pixels, 4.8 %.
EXTRA = {"imagenette": ("4.5 %", Patch(48)), "cifar10": ("4.4 %", Patch(7))}
ENLARGED_EXTRA = Patch(40)


def run(context: Context, dataset: str) -> Result:
    """Measure every mask size against every patch that it covers."""
    context.images(dataset)
    theirs = published.MISMATCH[dataset]
    where = "tab-mismatch-cifar" if dataset == "cifar10" else "tab-mismatch"
    patches = list(models.patches(dataset))
    columns = ("clean", *(f"{name} robust" for name in patches))
    tables: list[Table] = []
    notes = Found()
    for network in models.maskers(dataset):
        found = measure(context, dataset, network, theirs, len(columns), _grid(dataset))
        if dataset == "imagenette":
            found.add(_others(context, dataset, len(columns)))
        title = f"Masks (rows) and patches of {network.label} on {TITLES[dataset]}"
        tables.append(Table(title=title, where=where, columns=columns, rows=tuple(found.rows)))
        lemmas = _lemmas(context, dataset, network)
        title = f"Bounds for masks of {patches[-1]}, {network.label} on {TITLES[dataset]}"
        rows = tuple(lemmas.rows)
        tables.append(Table(title=title, where=where, columns=tuple(f"{name} robust" for name in patches), rows=rows))
        notes.add(Found(notes=found.notes))
    return Result(tables=tuple(tables), notes=tuple(notes.notes))


def question(masks: Windows, windows: Windows) -> Question:
    """Return robust masking whose masks may be larger than the windows."""
    return Question(evidence=LOGITS, defense=RobustMasking(masks=masks), windows=windows)


def mask_windows(dataset: str, maps: Maps, windows_of: WindowsOf) -> dict[str, Windows]:
    """Return the masks of each row."""
    name, patch = EXTRA[dataset]
    made = {key: windows_of(each) for key, each in models.patches(dataset, maps.size[0]).items()}
    # Both are bound methods: equal where the patch lies in the image itself.
    enlarged = enlargement(maps) > 1 and windows_of != maps.windows
    made[name] = maps.windows(ENLARGED_EXTRA, "input") if enlarged else windows_of(patch)
    other = {"4.4 %": "4.8 %"} if not enlarged else {}
    return {other.get(key, key): made[key] for key in published.MISMATCH[dataset]}


def _grid(dataset: str) -> Build:
    def build(maps: Maps, windows_of: WindowsOf) -> dict[str, Sequence[Cell]]:
        masks = mask_windows(dataset, maps, windows_of)
        windows = {key: windows_of(each) for key, each in models.patches(dataset, maps.size[0]).items()}
        found: dict[str, Sequence[Cell]] = {}
        for label, made in masks.items():
            cells: list[Cell] = [
                (question(made, each), "robust") if made.cover(each) else None for each in windows.values()
            ]
            smallest = next(iter(windows.values()))
            found[label] = [(question(made, smallest), "clean"), *cells]
        return found

    return build


def _lemmas(context: Context, dataset: str, network: Network) -> Found:
    """Lemma 1 knows only the mask: what it certifies for the largest patch it certifies for smaller ones."""
    largest = list(models.patches(dataset))[-1]
    numbers = published.MISMATCH[dataset][largest]
    theirs = {"Lemma 1": (numbers[-1],) * 3, "tighter": numbers[1:]}

    def build(maps: Maps, windows_of: WindowsOf) -> dict[str, Sequence[Cell]]:
        windows = [windows_of(each) for each in models.patches(dataset, maps.size[0]).values()]
        masks = windows[-1]
        return {
            "Lemma 1": [(question(masks, masks), "robust")] * len(windows),
            "tighter": [(question(masks, each), "robust") for each in windows],
        }

    return measure(context, dataset, network, theirs, 3, build)


def _others(context: Context, dataset: str, columns: int) -> Found:
    """CBN and DS, which have no masks."""
    found = Found()
    for label, used, rule in (
        ("CBN", models.plain_bagnet(dataset), main_table.CBN["CBN"]),
        ("DS", models.bands(dataset), main_table.MASK_DS["DS"]),
    ):
        numbers = published.MAIN[dataset][label]
        theirs = {label: (numbers[0], numbers[1], numbers[3], numbers[5])}

        def build(
            maps: Maps, windows_of: WindowsOf, label: str = label, rule: main_table.Rule = rule
        ) -> dict[str, Sequence[Cell]]:
            asked = [rule(windows_of(each)) for each in models.patches(dataset, maps.size[0]).values()]
            return {label: [(asked[0], "clean"), *((each, "robust") for each in asked)]}

        found.add(measure(context, dataset, used, theirs, columns, build))
    return found

"""tab-more-ds: ResNet-50, Mask-BN and Mask-DS on cats-vs-dogs and flowers, against a 2 % patch.

The paper claims (apx-more-ds): with the settings for ImageNette and a random 80/20 split, Mask-BN has 97.5 % clean and
91.4 % provable accuracy on cats-vs-dogs and 91.4 % and 83.5 % on flowers, a little below ResNet-50's clean accuracy.

Ours: the same three, from recipes that follow the paper number by number; `--train` trains what is not there. Neither
set comes with this package, and no ImageNet weights: first weights are random unless the recipe is given others
(`patchguard train --set init_from=FILE`). Beside the paper: double masking on the same maps.
"""

from collections.abc import Mapping, Sequence

from patchguard.defenses import Undefended
from patchguard.paper import models, published
from patchguard.paper.context import Context
from patchguard.paper.experiment import TITLES, Result, Table
from patchguard.paper.maps import Maps
from patchguard.paper.rows import Cell, Found, WindowsOf, both, measure
from patchguard.paper.tally import CONFIDENCE, SIGNED, Question, double_masking, masking
from patchguard.patch import Patch

WHERE = "tab-more-ds"
COLUMNS = ("clean", "robust")
SHARE = 0.02


def run(context: Context, dataset: str) -> Result:
    """Measure the three networks."""
    context.images(dataset)
    theirs = published.MORE_SETS[dataset]
    found, beside = Found(), Found()
    for label, network, build in (
        ("ResNet-50", models.residual(dataset), _residual),
        ("Mask-BN", models.bagnet(dataset), _mask_bn),
        ("Mask-DS", models.bands(dataset), _mask_ds),
    ):
        measured = measure(context, dataset, network, {label: theirs[label]}, len(COLUMNS), build)
        beside.rows += [row for row in measured.rows if row.label != label]
        measured.rows = [row for row in measured.rows if row.label == label]
        found.add(measured)
    name = TITLES[dataset]
    tables = [Table(title=f"Performance on {name}", where=WHERE, columns=COLUMNS, rows=tuple(found.rows))]
    if beside.rows:
        tables.append(Table(title=f"Beside the paper on {name}", where="", columns=COLUMNS, rows=tuple(beside.rows)))
    return Result(
        tables=tuple(tables),
        notes=(
            "A seeded fifth of the files is for testing; the paper's random split is not known.",
            *found.notes,
        ),
        settings={"patch": f"{SHARE:.0%}", "models": found.models},
    )


def patch_of(maps: Maps) -> Patch:
    """Return the 2 % patch: as the paper's tables have it at 224 and 299 pixels, by area elsewhere."""
    if maps.size in ((224, 224), (299, 299)):
        return models.patches(maps.dataset, maps.size[0])["2 %"]
    return Patch.of_area(SHARE, height=maps.size[0], width=maps.size[1])


Cells = Mapping[str, Sequence[Cell]]


def _residual(maps: Maps, windows_of: WindowsOf) -> Cells:
    return {"ResNet-50": ((Question(evidence=SIGNED, defense=Undefended()), "clean"), None)}


def _mask_bn(maps: Maps, windows_of: WindowsOf) -> Cells:
    windows = windows_of(patch_of(maps))
    return {"Mask-BN": both(masking(windows)), "BagNet-17, double masking": both(double_masking(windows))}


def _mask_ds(maps: Maps, windows_of: WindowsOf) -> Cells:
    windows = windows_of(patch_of(maps))
    return {
        "Mask-DS": both(masking(windows, CONFIDENCE)),
        "DS-25-ResNet-50, double masking of confidences": both(double_masking(windows, CONFIDENCE)),
    }

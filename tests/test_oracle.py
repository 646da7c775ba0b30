"""The oracle passes what is sound, and shows a counterexample for every mistake that is planted."""

import subprocess
import sys
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import patchguard
from patchguard.defenses import (
    CellMasking,
    ClippedSum,
    Defense,
    DoubleMasking,
    MajorityVote,
    MaskedAgreement,
    Median,
    RobustMasking,
    TrimmedMean,
    Undefended,
)
from patchguard.defenses.clipped_sum import check_bounded
from patchguard.defenses.evidence import Evidence, EvidenceMap
from patchguard.errors import InputError
from patchguard.geometry.windows import Windows
from patchguard.guard import Certificate, Prediction
from patchguard.oracle import Counterexample, check_defense

ANY = Windows.sliding(grid=(1, 1), size=(1, 1))
SOUND = {
    "RobustMasking": RobustMasking,
    "RobustMasking T": RobustMasking(masks=ANY, threshold=Fraction(1, 3)),
    "DoubleMasking": DoubleMasking,
    "DoubleMasking tau": DoubleMasking(masks=ANY, tau=1.0),
    "MaskedAgreement": MaskedAgreement(masks=ANY, tau=1.0),
    "ClippedSum": ClippedSum(),
    "ClippedSum published": ClippedSum(spatial=False),
    "MajorityVote": MajorityVote(),
    "MajorityVote published": MajorityVote(spatial=False),
    "CellMasking": CellMasking(cells=2),
    "Median": Median(),
    "TrimmedMean": TrimmedMean(trim=1),
}


@pytest.mark.parametrize("name", SOUND)
def test_every_defense_of_the_package_passes(name) -> None:
    assert check_defense(SOUND[name], images=40, deepest=1) > 1000


@pytest.mark.parametrize("defense", [Undefended(), Undefended], ids=["made", "class"])
def test_a_defense_that_certifies_nothing_does_not_pass_unseen(defense) -> None:
    with pytest.raises(AssertionError, match="certifies none of the images of the oracle; nothing was tested"):
        check_defense(defense)


# -- planted mistakes --------------------------------------------------------------------------------------------------

MISTAKES = (
    ">= for >",
    "forgets the last window",
    "forgets the rival's gain",
    "forgets the label's loss",
    "forgets drift of the label",
    "forgets drift of rivals",
    "looks at one rival",
    "takes all windows to have the size of the first",
    "forgets the second patch",
    "counts units as evidence",
    "certifies any class",
    "top k as top k + 1",
)


@dataclass(frozen=True)
class PlainSum(Defense[Certificate]):
    """Sums of evidence with a proof in plain loops, and one mistake where it is asked for."""

    mistake: str = ""
    default_evidence: ClassVar[Evidence] = Evidence(kind="confidence")

    def validate_windows(self, evidence: EvidenceMap, windows: Windows) -> None:
        check_bounded(evidence)

    def _predict(self, evidence: EvidenceMap) -> Prediction:
        scores = evidence.values.sum((2, 3))
        return Prediction(label=scores.argmax(1), scores=scores.double())

    def _certify(self, evidence, windows, label, top_k) -> Certificate:
        mistake, images = self.mistake, torch.arange(len(label))
        lower = (evidence.values if mistake == "forgets drift of the label" else evidence.lower).flatten(2)
        upper = (evidence.values if mistake == "forgets drift of rivals" else evidence.upper).flatten(2)
        cells = (replace(windows, count=1) if mistake == "forgets the second patch" else windows).cells
        regions = torch.from_numpy(cells).long()
        regions = regions[:-1] if mistake == "forgets the last window" else regions
        sizes = regions[:1].sum(1) if "size of the first" in mistake else regions.sum(1)
        loss = 0 if mistake == "forgets the label's loss" else sizes * evidence.low
        gain = 0 if mistake == "forgets the rival's gain" else sizes * evidence.high
        outside = (1 - regions).T
        gaps = (lower[images, label] @ outside + loss)[:, None] - (upper @ outside + gain)  # images, classes, regions
        gaps[images, label] = 10**9
        if mistake == "looks at one rival":
            total = upper.sum(2)
            total[images, label] = -(10**9)
            gaps[total < total.sort(1).values[:, -top_k, None]] = 10**9
        nth = min(top_k, evidence.classes - 2) if mistake == "top k as top k + 1" else top_k - 1
        margin = gaps.sort(1).values[:, nth].amin(1)
        margin = margin.abs() if mistake == "certifies any class" else margin
        margin = margin + {">= for >": 1, "counts units as evidence": evidence.scale - 1}.get(mistake, 0)
        return Certificate(label=label, margin=margin.double(), weakest=None, rival=torch.zeros_like(label))


def test_the_plain_sum_without_a_mistake_passes() -> None:
    assert check_defense(PlainSum()) > 1000


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_planted_mistake_is_refuted(mistake) -> None:
    with pytest.raises(Counterexample, match="certifies class") as found:
        check_defense(PlainSum(mistake))
    assert repr(PlainSum(mistake)) in str(found.value)


def test_a_counterexample_can_be_repeated_from_its_message() -> None:
    with pytest.raises(Counterexample) as found:
        check_defense(PlainSum("forgets the rival's gain"))
    lines = dict(line.split(": ", 1) for line in str(found.value).splitlines()[1:])
    windows = eval(lines["windows"], {"Windows": Windows})
    before, after = (torch.tensor(eval(lines[key])) for key in ("evidence of each class", "evidence after the attack"))
    attacked = torch.tensor(eval(lines["attacked cells"])).bool()
    assert torch.equal(before[:, ~attacked], after[:, ~attacked])
    assert attacked.flatten().tolist() in windows.cells.tolist()
    assert int(before.sum((1, 2)).argmax()) != int(after.sum((1, 2)).argmax())


def test_the_search_is_the_same_for_the_same_seed() -> None:
    def message(seed: int) -> str:
        with pytest.raises(Counterexample) as found:
            check_defense(PlainSum(">= for >"), seed=seed)
        return str(found.value)

    assert message(3) == message(3) != message(4)


def test_a_defense_that_accepts_nothing_of_the_oracle_is_told_so() -> None:
    class Picky(PlainSum):
        def validate_windows(self, evidence: EvidenceMap, windows: Windows) -> None:
            raise InputError("no windows please")

    with pytest.raises(AssertionError, match="accepts none of the evidence and windows"):
        check_defense(Picky())


# -- the plugin of pytest ----------------------------------------------------------------------------------------------


def test_the_plugin_of_pytest_imports_neither_patchguard_nor_torch() -> None:
    code = "import sys, pytest_patchguard; assert not {'patchguard', 'torch', 'numpy'} & {*sys.modules}"
    home = str(Path(patchguard.__file__).parents[1])
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": home}, check=True)

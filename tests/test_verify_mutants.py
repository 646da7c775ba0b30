"""Mistakes planted in the checker: the claims of `claims.py` must catch every one of them."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
from claims import RULES, decided_by_tau, dishonest, honest_files, trailing, uncovered

from patchguard import verify

SOURCE = Path(verify.__file__)

MUTANTS = {
    "ties are certified": ('claim["certified"] is not (margin > 0)', 'claim["certified"] is not (margin >= 0)'),
    "no drift": ('drift = units["drift"] or 0', "drift = 0"),
    "sure votes are forgotten": ("return values, lower, upper", "return values, values, values"),
    "detection at equality": ("hidden > self.threshold * total", "hidden >= self.threshold * total"),
    "removal at equality": (
        "filled) > p * (least[label] - smallest)",
        "filled) >= p * (least[label] - smallest)",
    ),
    "removal without added evidence": ("(largest + self.high * filled) > p", "(largest) > p"),
    "certain detection at equality": ("q * (q - p) * sure[k] > p * ceiling", "q * (q - p) * sure[k] >= p * ceiling"),
    "detection never certain": ("q * (q - p) * sure[k] > p * ceiling", "False"),
    "no filled bound": ("min((q - p) * whole, q * masked)", "q * masked"),
    "upper for certain detection": ("sure = inside[0]", "sure = inside[1]"),
    "lower for removal": ("inside[0][label], inside[1][label], shared", "inside[0][label], inside[0][label], shared"),
    "the label is not recomputed": ("if found != label:", "if False:"),
    "the margin is not compared": ('or stated["units"] != margin', ""),
    "windows are not compared": ("if not (holds & wide).any(axis=1).all():", "if False:"),
    "rows are not compared": ("(holds & wide)", "(wide)"),
    "the last position is skipped": (
        "before[length:] > before[:-length]",
        "(before[length:] > before[:-length])[: max(1, len(before) - length - 1)]",
    ),
    "the first position is skipped": (
        "before[length:] > before[:-length]",
        "(before[length:] > before[:-length])[min(1, len(before) - length - 1) :]",
    ),
    "the circle is a line": ("np.arange(*self.places[number][2:]) % self.grid[1]",
                             "np.minimum(np.arange(*self.places[number][2:]), self.grid[1] - 1)"),
    "last of equal scores": (
        "scores.index(max(scores))",
        "len(scores) - 1 - scores[::-1].index(max(scores))",
    ),
    "any mask covers": ("covering = self.masks.sums(cells) == cells.sum()", "covering = self.masks.sums(cells) >= 0"),
    "the worst covering mask": ("worst[covering].max()", "worst[covering].min()"),
    "one round of masking": ("believed.append(bool((sums.argmax(axis=0) == claim).all()))", "believed.append(True)"),
    "the majority is overruled without a lead": ("sums[claim, mask] -= self.lead", "sums[claim, mask] -= 0"),
    "no lead in the margin": ("sums[:, mask] -= self.lead", "sums[:, mask] -= 0"),
    "the lead is asked behind every pair": ("sums[claim, mask] -= self.lead", "sums[claim] -= self.lead"),
    "the margin charges the lead behind every pair": ("sums[:, mask] -= self.lead", "sums -= self.lead"),
    "tau is rounded up": ("math.floor(Fraction(tau)", "math.ceil(Fraction(tau)"),
    "tau may be negative": ("not 0 <= tau <= LARGEST_TAU", "not tau <= LARGEST_TAU"),
    "half the loss": ("gap - size * self.span", "gap - size * self.span // 2"),
    "published rule halved": ("gap - 2 * max(sizes)", "gap - max(sizes)"),
    "unbounded without cover": ("if not self.bounded and not", "if False and not"),
    "several patches": ('or patch["count"] != 1', ""),
    "evidence out of range": ("int(layers.max()) > high", "False"),
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus() -> tuple[list[bytes], list[bytes]]:
    good = [*(data for rule in RULES for data in honest_files(rule, 160)), decided_by_tau()]
    return good, [forged for data in good[::6] for forged in dishonest(data)] + [uncovered(), trailing()]


def mutated(before: str, after: str) -> ModuleType:
    source = SOURCE.read_text()
    assert source.count(before) == 1, f"{before!r} must be in verify.py once"
    module = ModuleType("mutant")
    sys.modules["mutant"] = module  # where dataclasses look up their module
    exec(compile(source.replace(before, after), "mutant", "exec"), vars(module))
    return module


def mistakes(module: ModuleType, corpus: tuple[list[bytes], list[bytes]]) -> bool:
    good, bad = corpus
    return any(not module.check_bytes(data).valid for data in good) or any(
        module.check_bytes(data).valid for data in bad
    )


def test_the_checker_makes_no_mistake_on_the_corpus(corpus):
    assert not mistakes(verify, corpus)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_mistake_is_caught(name, corpus):
    assert mistakes(mutated(*MUTANTS[name]), corpus)

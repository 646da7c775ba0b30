"""Mistakes planted in the checker: the claims of `claims.py` must catch every one of them."""

from types import ModuleType

import numpy as np
import pytest
from helpers.checker_mistakes import copy, drop, exchange, keep_right, rename, settle, spoil, weaken, widen
from helpers.claims import (
    RULES,
    decided_behind_one_mask,
    decided_by_tau,
    dishonest,
    honest_files,
    relabeled,
    trailing,
    uncovered,
)


def certify_ties(_, check, claim, per_window, *rest):
    return check(claim | {"certified": claim["certified"] and min(per_window) != 0}, per_window, *rest)


def forget_drift(_, bounds, claim, layers):
    found = bounds(claim, layers)
    return found if layers.ndim == 4 else found[:1] * 3


def forget_sure_votes(_, bounds, claim, layers):
    found = bounds(claim, layers)
    return found[:1] * 3 if layers.ndim == 4 else found


def prefer_the_last(_, label, rule, values):
    return len(values) - 1 - label(rule, values[::-1])


def stop_at_the_end(_, __, boxes, number):
    return np.minimum(np.arange(*boxes.places[number][2:]), boxes.grid[1] - 1)


def without_lead(module, method, rule, *rest):
    return method(module.DoubleMasking(rule.masks, 0), *rest)


def as_if_bounded(module, margins, rule, *rest):
    return margins(module.RobustMasking(rule.masks, rule.threshold, rule.high, True), *rest)


def halve(spatial):
    def halved(module, margins, rule, *rest):
        loss = rule.span // 2 if rule.spatial is spatial else rule.span
        return margins(module.Sum(loss, rule.spatial), *rest)

    return halved


def skip(kept):
    return lambda _, touched, *axis: touched(*axis)[kept] or touched(*axis)


def alone(_, check, claim, windows):
    return check(claim | {"patch": claim["patch"] | {"count": 1}}, windows)


ROBUST, DOUBLE = "RobustMasking._margins_in", "DoubleMasking"

MUTANTS = {
    "ties are certified": [spoil("_check_margin", certify_ties)],
    "no drift": [spoil("_bounds", forget_drift)],
    "sure votes are forgotten": [spoil("_bounds", forget_sure_votes)],
    "detection at equality": [weaken("RobustMasking.label", "hidden", "totals")],
    "removal at equality": [weaken(ROBUST, "largest", "smallest")],
    "removal without added evidence": [drop(ROBUST, "largest", "high")],
    "certain detection at equality, filled": [weaken(ROBUST, "sure", "whole")],
    "certain detection at equality, masked": [weaken(ROBUST, "sure", "masked")],
    "detection never certain": [
        settle(ROBUST, "sure", "whole", to=False),
        settle(ROBUST, "sure", "masked", to=False),
    ],
    "the larger of two bounds": [exchange(ROBUST, "minimum", "maximum", "whole", "masked")],
    "upper for certain detection": [rename(ROBUST, "least", "most", "sure")],
    "lower for removal": [rename(ROBUST, "most", "least", "smallest", "largest")],
    "upper for the label": [rename(ROBUST, "least", "most", "own")],
    "lower for the rivals": [rename(ROBUST, "most", "least", "whole", "size")],
    "nothing is caught": [drop(ROBUST, "whole", "shared")],
    "the label is not recomputed": [settle("_prove", "answer", "label", to=False)],
    "the margin is not compared": [settle("_check_margin", "units", "margin", to=False)],
    "windows are not compared": [spoil("_holds", lambda _, __, touched, starts, stops: starts >= 0)],
    "rows are not compared": [keep_right("_check_windows", "_holds", "top", "wide")],
    "the last position is skipped": [spoil("_find_touched", skip(slice(-1)))],
    "the first position is skipped": [spoil("_find_touched", skip(slice(1, None)))],
    "the circle is a line": [spoil("Boxes.columns", stop_at_the_end)],
    "last of equal scores": [spoil("RobustMasking.label", prefer_the_last)],
    "any mask covers": [weaken(f"{DOUBLE}.margins", "sums", "size")],
    "the worst covering mask": [exchange(f"{DOUBLE}.margins", "max", "min", "covering")],
    "one round of masking": [exchange(f"{DOUBLE}.label", "all", "any", "claim")],
    "the majority is overruled without a lead": [spoil(f"{DOUBLE}.label", without_lead)],
    "no lead in the margin": [spoil(f"{DOUBLE}.margins", without_lead)],
    "the lead is asked behind every pair": [widen(f"{DOUBLE}.label", "sums", "lead")],
    "the margin charges the lead behind every pair": [widen(f"{DOUBLE}.margins", "sums", "lead")],
    "tau is rounded up": [exchange("_rule", "floor", "ceil", "tau")],
    "tau may be negative": [settle("_rule", "tau", "LARGEST_TAU", to=True)],
    "half the loss": [spoil("Sum.margins", halve(True))],
    "published rule halved": [spoil("Sum.margins", halve(False))],
    "unbounded without cover": [spoil("RobustMasking.margins", as_if_bounded)],
    "several patches": [spoil("_check_windows", alone)],
    "evidence out of range": [settle("_bounds", "layers", "max", "high", to=False)],
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus() -> tuple[list[bytes], list[bytes]]:
    good = [data for rule in RULES for data in honest_files(rule, 80)]
    good += [decided_by_tau(), decided_behind_one_mask()]
    bad = [forged for data in good[::6] for forged in dishonest(data)]
    return good, [*bad, uncovered(), trailing(), *map(relabeled, RULES)]


def mistakes(module: ModuleType, corpus: tuple[list[bytes], list[bytes]]) -> bool:
    """Whether a true claim is refused or a false one accepted; an error in the mutant itself is no mistake of it."""
    good, bad = corpus
    verdicts = (module.check_bytes(data) for data in good)
    refused = any(not verdict.valid and "cannot be read" not in verdict.reason for verdict in verdicts)
    return refused or any(module.check_bytes(data).valid for data in bad)


def test_the_checker_makes_no_mistake_on_the_corpus(corpus):
    assert not mistakes(copy(), corpus)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_mistake_is_caught(name, corpus):
    assert mistakes(copy(*MUTANTS[name]), corpus)

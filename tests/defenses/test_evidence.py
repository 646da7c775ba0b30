import math

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchguard.defenses import DoubleMasking, RobustMasking
from patchguard.defenses.evidence import CEILING, Evidence
from patchguard.errors import InputError
from patchguard.geometry.windows import Windows


def cells(*values: float) -> torch.Tensor:
    """Two classes in a row of cells: the given values, and zeros."""
    row = torch.tensor(values, dtype=torch.double)
    return torch.stack([row, torch.zeros_like(row)]).view(1, 2, 1, -1)


def test_logits_are_clipped_and_rounded_to_the_power_of_two() -> None:
    found = Evidence(low=0.0, high=2.0, bits=4)(cells(-1.0, 0.0, 0.03, 0.04, 1.5, 7.0))
    assert found.values[0, 0, 0].tolist() == [0, 0, 0, 1, 24, 32]
    assert (found.low, found.high, found.scale, found.bounded) == (0, 32, 16, True)
    assert not Evidence(low=0.0)(cells(1.0)).bounded
    assert Evidence(low=0.0)(cells(1e9)).values[0, 0, 0, 0] == CEILING * 2**16


def test_confidences_votes_and_predictions_come_from_the_softmax_of_each_cell() -> None:
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.0, 0.0, 3.0], [1.0, 0.0, 1.2]]).T.reshape(1, 3, 1, 3).double()
    p = torch.softmax(logits, 1)
    confidence = Evidence(kind="confidence")(logits)
    assert torch.allclose(confidence.values.double() / confidence.scale, p, atol=2**-16)
    vote = Evidence(kind="vote")(logits)
    assert torch.equal(vote.values, (p >= 0.2).long())
    assert vote.values.sum(1).max() > 1  # several classes may pass the threshold
    prediction = Evidence(kind="prediction")(logits)
    assert torch.equal(prediction.values.argmax(1), logits.argmax(1))
    assert (prediction.values.sum(1) == 1).all()
    tanh = Evidence(kind="tanh")(logits)
    assert torch.allclose(tanh.values.double() / tanh.scale, torch.tanh(0.05 * logits - 1), atol=2**-16)


def test_a_tied_prediction_goes_to_the_smallest_class() -> None:
    assert Evidence(kind="prediction")(torch.zeros(1, 4, 1, 1)).values.flatten().tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("kind", ["logits", "confidence", "vote", "prediction", "tanh"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_refused_by_certify_and_mapped_into_range_by_predict(kind, bad) -> None:
    logits = torch.rand(3, 2, 1, 5)
    logits[1, 0, 0, 2] = bad
    evidence = Evidence(kind=kind)(logits)
    assert evidence.finite.tolist() == [True, False, True]
    assert evidence.values.min() >= evidence.low
    assert evidence.values.max() <= evidence.high
    untouched = Evidence(kind=kind)(logits.nan_to_num(0, 0, 0)).values
    assert torch.equal(evidence.values[..., :2], untouched[..., :2])  # only the cell itself moved
    assert torch.equal(evidence.values[..., 3:], untouched[..., 3:])
    windows = Windows.sliding(grid=(1, 5), size=(1, 1))
    defense = DoubleMasking(masks=windows)
    defense.predict(evidence)
    with pytest.raises(InputError, match="image 1 of the batch holds NaN or infinity"):
        defense.certify(evidence, windows)


def test_infinities_become_the_ends_of_the_range() -> None:
    found = Evidence(low=-2.0, high=3.0, bits=0)(cells(math.nan, -math.inf, math.inf, 1e38))
    assert found.values[0, 0, 0].tolist() == [-2, -2, 3, 3]


@given(
    st.floats(-20, 20),
    st.floats(-1, 1),
    st.floats(0, 1),
    st.integers(0, 12),
)
def test_a_value_moved_by_at_most_the_drift_stays_between_lower_and_upper(value, share, drift, bits) -> None:
    evidence = Evidence(low=-5.0, high=5.0, bits=bits, drift=drift)
    found = evidence(cells(value))
    moved = evidence(cells(value + share * drift)).values
    assert (found.lower <= moved)[0, 0].all()
    assert (moved <= found.upper)[0, 0].all()


@given(st.lists(st.floats(-3, 3), min_size=3, max_size=3), st.lists(st.floats(-1, 1), min_size=3, max_size=3))
def test_votes_that_drift_could_flip_are_counted_against_us(logits, moves) -> None:
    drift = 0.3
    start = torch.tensor(logits, dtype=torch.double).view(1, 3, 1, 1)
    moved = start + drift * torch.tensor(moves, dtype=torch.double).view(1, 3, 1, 1)
    for kind, share in (("vote", 0.5), ("prediction", 1.0)):  # a logit drift d moves p by at most d / 2
        found = Evidence(kind=kind, drift=share * drift)(start)
        other = Evidence(kind=kind)(moved).values
        assert (found.lower <= other).all()
        assert (other <= found.upper).all()


@pytest.mark.parametrize("kind", ["logits", "confidence", "vote", "prediction", "tanh"])
@pytest.mark.parametrize("drift", [1e3, 2.0**46, 1e300])
def test_a_drift_beyond_the_range_leaves_nothing_certain(kind, drift) -> None:
    found = Evidence(kind=kind, high=4.0 if kind == "logits" else None, drift=drift)(4 * torch.rand(2, 3, 2, 2))
    assert (found.lower == found.low).all()
    assert (found.upper == found.high).all()


@pytest.mark.parametrize("drift", [2.0**30, 2.0**41, 2.0**46])
def test_a_drift_inside_a_very_wide_range_is_charged_in_full(drift) -> None:
    found = Evidence(low=0.0, high=2.0**48, bits=0, drift=drift)(cells(2.0**47))
    assert found.lower[0, 0] == 2**47 - drift - 1
    assert found.upper[0, 0] == 2**47 + drift + 1


@pytest.mark.parametrize("drift", [0.25, 0.75, 1.0])
def test_the_votes_of_predictions_are_sure_and_possible_for_every_drift(drift) -> None:
    """All pairs of logits on a grid of quarters, and all drifts of them on the same grid, written out."""
    steps = torch.arange(-16, 17, dtype=torch.double) / 4
    pairs = torch.cartesian_prod(steps, steps)
    moves = torch.cartesian_prod(*[steps[steps.abs() <= drift]] * 2)
    rounded = (pairs[:, None] + moves).round()
    second = rounded[..., 1] > rounded[..., 0]  # a tie goes to the first class
    wins = torch.stack([~second, second], 1)  # pairs, classes, moves
    sure, possible = wins.all(2).long(), wins.any(2).long()
    found = Evidence(kind="prediction", bits=0, drift=drift)(pairs.T.reshape(1, 2, 1, -1))
    lower, upper = found.lower[0, :, 0].T, found.upper[0, :, 0].T
    assert (lower <= sure).all()
    assert (upper >= possible).all()
    far = (pairs[:, 0] - pairs[:, 1]).abs() > 2 * drift + 3  # beyond what rounding can add
    assert torch.equal(lower[far], sure[far])
    assert torch.equal(upper[far], possible[far])
    assert far.sum() > 50


def test_a_third_class_that_drift_could_lift_may_vote_too() -> None:
    found = Evidence(kind="prediction", bits=0, drift=0.75)(torch.tensor([3.0, 1.0, 0.0]).view(1, 3, 1, 1))
    assert found.values.flatten().tolist() == [1, 0, 0]
    assert found.lower.flatten().tolist() == [0, 0, 0]  # 3 - 0.75 and 1 + 0.75 may both round to 2
    assert found.upper.flatten().tolist() == [1, 1, 0]


def test_a_vote_needs_some_confidence_however_low_the_threshold() -> None:
    logits = torch.tensor([9.0, 0.0, 6.3]).view(1, 3, 1, 1)  # p = 0.94, 0.0001, 0.06: units of 1/16 are 15, 0, 1
    for threshold, votes in ((1e-9, [1, 0, 1]), (1 / 16, [1, 0, 1]), (2 / 16, [1, 0, 0])):
        assert Evidence(kind="vote", threshold=threshold, bits=4)(logits).values.flatten().tolist() == votes


def test_a_cell_of_nothing_but_nan_predicts_nobody_and_one_with_a_number_does() -> None:
    logits = torch.full((1, 3, 1, 3), math.nan)
    logits[0, 2, 0, 1] = -5.0
    logits[0, 1, 0, 2] = math.inf
    assert Evidence(kind="prediction")(logits).values[0, :, 0].T.tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0]]


@pytest.mark.parametrize("name", ["low", "high", "drift", "threshold", "bits"])
@pytest.mark.parametrize("truth", [True, np.True_], ids=["bool", "numpy"])
def test_a_boolean_is_no_number(name, truth, monkeypatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # only tests check types
    with pytest.raises(InputError, match=f"`{name}` must be a number; got (np.)?True"):
        Evidence(**{name: truth})


def test_a_confidence_that_equals_the_threshold_votes() -> None:
    assert (Evidence(kind="vote", threshold=0.2)(torch.zeros(1, 5, 1, 1)).values == 1).all()
    assert (Evidence(kind="vote", threshold=0.1)(torch.zeros(1, 10, 1, 1)).values == 1).all()
    assert (Evidence(kind="vote", threshold=0.21)(torch.zeros(1, 5, 1, 1)).values == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_precision_gives_the_integers_of_its_own_values(dtype) -> None:
    logits = (torch.randn(2, 3, 4, 4) * 20).to(dtype)
    assert torch.equal(Evidence(low=None)(logits).values, Evidence(low=None)(logits.double()).values)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "softmax"}, "`kind` must be one of"),
        ({"low": 2.0, "high": 1.0}, "`low` must lie below `high`"),
        ({"low": math.nan}, "finite numbers or None"),
        ({"high": math.inf}, "finite numbers or None"),
        ({"high": 1e15}, "overflow"),
        ({"drift": -1.0}, "`drift` must be"),
        ({"drift": math.inf}, "`drift` must be"),
        ({"bits": 40}, "`bits` must be"),
        ({"kind": "vote", "threshold": 0.0}, "`threshold` of a vote"),
        ({"kind": "confidence", "high": 2.0}, "has a range of its own"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message) -> None:
    with pytest.raises(InputError, match=message):
        Evidence(**settings)


def test_the_ends_of_what_settings_may_be_are_accepted() -> None:
    for bits in (0, 32):
        assert Evidence(high=2.0, bits=bits)(cells(1.0)).values[0, 0, 0, 0] == 2**bits
    for bits in (-1, 33):
        with pytest.raises(InputError, match="`bits` must be"):
            Evidence(high=2.0, bits=bits)
    assert Evidence(kind="vote", threshold=1.0)(cells(99.0)).values.sum() == 1


def test_a_grid_whose_sums_would_overflow_is_refused() -> None:
    with pytest.raises(InputError, match="the sum of 64 cells"):
        Evidence(high=2.0**31)(torch.zeros(1, 2, 8, 8))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 3, 3), "four axes"),
        ((1, 1, 3, 3), "at least two classes"),
        ((0, 2, 3, 3), "must not be empty"),
        ((1, 2, 0, 3), "must not be empty"),
    ],
)
def test_tensors_that_are_no_evidence_are_refused(shape, message) -> None:
    from patchguard.defenses.evidence import check_map

    with pytest.raises(InputError, match=message):
        check_map(torch.zeros(shape))
    with pytest.raises(InputError, match="floating point"):
        check_map(torch.zeros(1, 2, 3, 3, dtype=torch.long))


def test_float32_cannot_clamp_past_a_bound_it_does_not_hold() -> None:
    high = (2**24 + 3) / 2**16  # float32 knows only 2^24 + 2 and 2^24 + 4
    found = Evidence(high=high)(torch.full((1, 2, 1, 1), 1e6))
    assert found.values.max() == found.high == 2**24 + 3
    assert RobustMasking(masks=Windows.sliding(grid=(1, 1), size=(1, 1))).predict(found).label.item() == 0

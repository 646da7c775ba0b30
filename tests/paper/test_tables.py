"""The numbers of the tables are those of the direct way: images, Guard, certificate."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers.reproduction import IMAGES, pixels, random_logits, save_model

from patchguard.defenses import ClippedSum, DoubleMasking, RobustMasking, Undefended
from patchguard.defenses.evidence import Evidence
from patchguard.geometry.windows import Windows
from patchguard.guards.interval import IntervalGuard
from patchguard.models import build
from patchguard.paper import EXPERIMENTS, clean_accuracy, main_table, masking_tables, published
from patchguard.paper import thresholds as detection
from patchguard.paper.cached_logits import CachedLogits
from patchguard.paper.counting import count
from patchguard.paper.experiment import Row, Table, format_value, to_percent, to_png
from patchguard.paper.fast_certificates import masking_query
from patchguard.paper.query import LOGITS, SIGNED, Batch
from patchguard.patch import Patch

CPU = torch.device("cpu")


def direct(guard, source, patch, evidence, defense, top_k=1):
    """Correct labels, and those of them that are certified, through the Guard's own verbs."""
    images, targets = pixels(source), torch.tensor(source.targets)
    fitted = replace(guard, evidence=evidence, defense=defense).for_patch(patch, 32, 32)
    proof = fitted.certify(images, patch)
    correct = proof.label == targets
    return int(correct.sum()), int((correct & proof.certified).sum())


def row(result, label, table=None) -> Row:
    rows = [each for found in result.tables for each in found.rows if table is None or found.title == table]
    (only,) = [each for each in rows if each.label == label]
    return only


def counts(values) -> list[int]:
    return [value.correct for value in values]


ANY = Windows.sliding(grid=(1, 1), size=(1, 1))


def test_rows_of_the_main_table_are_those_of_the_guard(context, guard, source):
    result = main_table.run(context, "cifar10")
    rules = {
        "robust masking": (LOGITS, RobustMasking(masks=ANY)),
        "double masking": (SIGNED, DoubleMasking(masks=ANY)),
        "clipped sum": (Evidence(kind="tanh"), ClippedSum()),
        "CBN, cells counted": (Evidence(kind="tanh"), ClippedSum(spatial=False)),
    }
    seen = []
    for name, (evidence, defense) in rules.items():
        numbers = [number for side in (2, 5) for number in direct(guard, source, Patch(side), evidence, defense)]
        assert counts(row(result, f"Mask-Srf-7: {name}").ours) == numbers
        seen += numbers[1::2]
    assert 0 < max(seen) < IMAGES
    assert len(set(seen)) > 1


def test_interval_bounds_are_measured_where_they_are_trained_and_say_the_command_elsewhere(own_context, source):
    settings = {"classes": 10, "side": 32, "widths": [4], "kernels": [4], "strides": [4]}
    model = build("interval_cnn", **settings).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(0.1)
    model.fc.bias.copy_(torch.linspace(0.0, 0.01, 10))  # the last class nearly everywhere, sometimes by a hair
    save_model(own_context, "cifar10_ibp_5", IntervalGuard(model))
    (found,) = main_table.interval_rows(own_context, "cifar10")
    proof = IntervalGuard(model).certify(pixels(source), Patch(5))
    correct = proof.label == torch.tensor(source.targets)
    assert found.ours[:2] == (None, None)
    assert "patchguard train --recipe cifar10_ibp_2" in found.note
    assert counts(found.ours[2:]) == [int(correct.sum()), int((correct & proof.certified).sum())]
    assert found.published == published.MAIN["cifar10"]["IBP"]


def test_interval_bounds_of_photos_are_infeasible_as_in_the_paper(context):
    for dataset in ("imagenette", "imagenet"):
        (found,) = main_table.interval_rows(context, dataset)
        assert (found.label, found.ours, found.published) == ("IBP", (None,) * 6, published.MAIN[dataset]["IBP"])
        assert "infeasible" in found.note
    assert list(main_table.table_patches("cifar10").values()) == [Patch(2), Patch(5)]
    assert list(main_table.table_patches("imagenet", 299).values()) == [Patch(30), Patch(42), Patch(52)]


def test_a_row_without_its_model_is_not_run_and_says_the_command(context):
    result = main_table.run(context, "cifar10")
    for label in ("Mask-BN", "CBN", "Mask-DS", "DS"):
        found = row(result, label)
        assert found.ours == (None,) * 4
        assert found.published == published.MAIN["cifar10"][label]
        assert "not run" in found.note
        assert "patchguard train --recipe " in found.note


def test_every_table_from_logits_runs_and_has_the_papers_rows(context):
    for name in ("vanilla", "clipping", "features", "training", "fields"):
        result = EXPERIMENTS[name].run(context, "cifar10")
        labels = {each.where for each in result.tables if each.where}
        assert labels <= set(EXPERIMENTS[name].where)
        assert labels
        for table in result.tables:
            for each in table.rows:
                assert each.measured == ("not run" not in each.note)


def test_clipping_is_the_undefended_guard(context, guard, source):
    found = row(clean_accuracy.clipping(context, "cifar10"), "Mask-Srf-7, for BagNet-17")
    images, targets = pixels(source), torch.tensor(source.targets)
    for value, (low, high) in zip(found.ours, clean_accuracy.CLIPS, strict=True):
        plain = replace(guard, evidence=Evidence(low=low, high=high), defense=Undefended())
        assert value.correct == int((plain.predict(images).label == targets).sum())
    assert found.published == published.CLIPPINGS["cifar10"]["BagNet-17"]


def test_kinds_of_evidence_are_those_of_the_guard(context, guard, source):
    result = masking_tables.features(context, "cifar10")
    for label, kind in (("Logits", "logits"), ("Confidence", "confidence"), ("Prediction", "prediction")):
        found = row(result, label, "Kinds of evidence of Mask-Srf-7 on CIFAR-10")
        numbers = [
            number
            for side in (2, 5, 8)
            for number in direct(guard, source, Patch(side), Evidence(kind=kind), RobustMasking(masks=ANY))
        ]
        assert counts(found.ours) == numbers


def test_shapes_are_height_by_width(context, guard, source):
    result = masking_tables.shapes(context, "cifar10")
    for label, patch in (("2x12", Patch(2, 12)), ("12x2", Patch(12, 2))):
        found = row(result, label, "Shapes of patches, Mask-Srf-7 on CIFAR-10")
        assert counts(found.ours) == list(direct(guard, source, patch, LOGITS, RobustMasking(masks=ANY)))


def test_top_k_grows_with_k_and_is_what_the_defense_says(context, logits):
    result = masking_tables.top_k(context, "cifar10")
    found = [row(result, f"Top-{k}", "Top k of Mask-Srf-7 on CIFAR-10") for k in range(1, 6)]
    robust = [counts(each.ours)[3] for each in found]
    assert robust == sorted(robust)
    assert robust[0] < robust[-1]
    windows = logits.windows(Patch(5))
    evidence = LOGITS(torch.from_numpy(np.array(logits.local_logits)).float())
    defense = RobustMasking(masks=windows)
    third = defense.certify(evidence, windows, logits.targets, 3)
    assert robust[2] == int(third.certified.sum())
    order = defense.predict(evidence).scores.sort(dim=1, descending=True, stable=True).indices
    assert counts(found[2].ours)[2] == int((order[:, :3] == logits.targets.unsqueeze(1)).any(1).sum())


# -- logits without a network ------------------------------------------------------------------------------------------


def leading_logits(guard, grid=(7, 7), count=60, seed=0, spread=1.0) -> CachedLogits:
    """Random logits whose true class is a little ahead, by an amount that differs from image to image."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 4, (count,), generator=generator)
    logits = spread * torch.rand(count, 4, *grid, generator=generator) ** 4
    logits[torch.arange(count), targets] += torch.linspace(0, 1.2, count).view(-1, 1, 1)
    return random_logits(guard, logits, targets)


@pytest.mark.parametrize("side", [2, 3])
def test_thresholds_are_what_the_defense_proves(guard, side):
    logits = leading_logits(guard)
    windows = Windows.sliding(grid=(7, 7), size=(side, side))
    evidence = LOGITS(torch.from_numpy(logits.local_logits).float())
    certified = []
    for threshold, counts in detection.count_thresholds(logits, windows, CPU).items():
        defense = RobustMasking(masks=windows, threshold=threshold)
        certificate = defense.certify(evidence, windows)
        correct = certificate.label == logits.targets
        assert counts[:2] == (int(correct.sum()), int((correct & certificate.certified).sum()))
        certified.append(counts[1])
    assert certified[0] > certified[2] > 0
    assert certified[-1] == 0


@pytest.mark.parametrize(
    "windows",
    [
        Windows.sliding(grid=(7, 7), size=(2, 3)),
        Windows.sliding(grid=(7, 7), size=(2, 7), wrap=(True, False)),
        Windows(grid=(7, 7), rows=((0, 2), (1, 4), (3, 7)), columns=((0, 3), (2, 7))),
    ],
    ids=["equal boxes", "circle", "boxes of several sizes"],
)
@pytest.mark.parametrize("size", [1.0, 100.0])  # 100: a threshold may be out of an attack's reach
def test_bounds_prove_what_the_defense_certifies(guard, windows, size):
    logits = leading_logits(guard, count=120, spread=1.5)
    evidence = LOGITS(size * torch.from_numpy(logits.local_logits).float())
    bounds = detection.Bounds(Batch(evidence, logits.targets), windows)
    for threshold in detection.THRESHOLDS:
        proof = RobustMasking(masks=windows, threshold=threshold).certify(evidence, windows)
        correct = proof.label == logits.targets
        assert torch.equal(bounds.certified(threshold, correct), correct & proof.certified)


def test_bounds_hold_where_a_rival_has_all_its_evidence_in_one_place(guard):
    generator = torch.Generator().manual_seed(0)
    windows, targets = Windows.sliding(grid=(7, 7), size=(2, 2)), torch.randint(0, 3, (400,), generator=generator)
    logits = 0.4 * torch.rand(400, 4, 7, 7, generator=generator)
    logits[:, 3, 2:4, 2:4] += 3 * torch.rand(400, 1, 1, generator=generator)
    logits[torch.arange(400), targets] += 0.6 * torch.rand(400, 1, 1, generator=generator)
    evidence = LOGITS(logits)
    bounds = detection.Bounds(Batch(evidence, targets), windows)
    for threshold in detection.THRESHOLDS:
        proof = RobustMasking(masks=windows, threshold=threshold).certify(evidence, windows)
        correct = proof.label == targets
        assert torch.equal(bounds.certified(threshold, correct), correct & proof.certified)


def test_only_windows_that_quick_bounds_leave_open_are_searched(guard, monkeypatch):
    logits, windows = leading_logits(guard), Windows.sliding(grid=(7, 7), size=(2, 2))
    bounds = detection.Bounds(Batch(LOGITS(torch.from_numpy(logits.local_logits).float()), logits.targets), windows)
    searched = []

    def intersect(values, windows, region):
        searched.append(len(values))
        return slow(values, windows, region)

    slow = detection.intersect
    monkeypatch.setattr(detection, "intersect", intersect)
    bounds.certified(Fraction(2, 5), torch.ones(60, dtype=torch.bool))
    assert 0 < sum(searched) < 60 * windows.regions


def test_the_published_bound_is_algorithm_2_as_printed(guard):
    logits = leading_logits(guard, grid=(4, 4), count=20)
    windows = Windows.sliding(grid=(4, 4), size=(2, 2))
    evidence = LOGITS(torch.from_numpy(logits.local_logits).float())
    bounds = detection.Bounds(Batch(evidence, logits.targets), windows)
    for threshold in detection.THRESHOLDS[:-1]:
        assert bounds.published(threshold).tolist() == [
            _algorithm_2(values, int(target), windows, threshold)
            for values, target in zip(evidence.values, logits.targets, strict=True)
        ]
    assert 0 < int(bounds.published(Fraction(0)).sum()) < 20


def _algorithm_2(values: torch.Tensor, target: int, windows: Windows, threshold: Fraction) -> bool:
    for a, b, c, d in windows.boxes.tolist():
        left = values.clone()
        left[:, a:b, c:d] = 0
        upper = max(Fraction(int(left[k].sum())) / (1 - threshold) for k in range(len(left)) if k != target)
        mine = left[target]
        heavy = max(int(mine[e:f, g:h].sum()) for e, f, g, h in windows.boxes.tolist())
        lower = int(mine.sum()) - (heavy if heavy > threshold * int(mine.sum()) else 0)
        if upper > lower:
            return False
    return True


def test_detections_are_counted_in_the_predicted_class(guard):
    logits = torch.zeros(1, 4, 7, 7)
    logits[0, 1] = 1.0  # even: no window of 2 x 2 holds more than 4 of 49
    logits[0, 2, 0, 0] = 5.0  # all in one cell
    logits = replace(leading_logits(guard, count=1), local_logits=logits.half().numpy(), targets=torch.tensor([1]))
    windows = Windows.sliding(grid=(7, 7), size=(2, 2))
    found = detection.count_thresholds(logits, windows, CPU).values()
    assert [counts[2] for counts in found] == [1, 0, 0, 0, 0, 0]
    assert [counts[3] for counts in found] == [1, 1, 1, 1, 1, 0]


def test_feature_masking_is_what_loops_count(guard):
    logits = leading_logits(guard, grid=(9, 9), count=30)
    found = clean_accuracy.measure_invariance(logits, CPU)
    values = torch.from_numpy(logits.local_logits).double()
    plain = values.sum((2, 3)).argmax(1)
    for place, side in ((1, 2), (4, 8)):
        correct, wrong_images, changed, pairs = 0, 0, 0, 0
        for image, target, before in zip(values, logits.targets, plain, strict=True):
            labels = []
            for top in range(9 - side + 1):
                for left in range(9 - side + 1):
                    kept = image.clone()
                    kept[:, top : top + side, left : left + side] = 0
                    labels.append(int(kept.sum((1, 2)).argmax()))
            correct += sum(label == int(target) for label in labels)
            wrong_images += any(label != int(target) for label in labels)
            changed += sum(label != int(before) for label in labels)
            pairs += len(labels)
        assert found["Masked accuracy"][place] == pytest.approx(100 * correct / pairs)
        assert found["% images"][place].correct == wrong_images
        assert found["% windows per image"][place] == pytest.approx(100 * changed / pairs)
    assert found["% windows per image"][4] > 0
    assert found["% windows per image"][0] == 0


def test_larger_masks_certify_what_the_defense_says_and_lemma_1_less(context, logits):
    result = masking_tables.mask_sizes(context, "cifar10")
    grid, bounds = (result.tables[place] for place in (2, 3))
    assert "Mask-Srf-7" in grid.title
    largest = next(each for each in grid.rows if each.label == "6.2 %")
    masks = logits.windows(Patch(8))
    evidence = LOGITS(torch.from_numpy(np.array(logits.local_logits)).float())
    for value, side in zip(largest.ours[1:], (2, 5, 8), strict=True):
        proof = RobustMasking(masks=masks).certify(evidence, logits.windows(Patch(side)), logits.targets)
        assert value.correct == int(proof.certified.sum())
    lemma, tighter = (counts(each.ours) for each in bounds.rows)
    assert lemma == [lemma[0]] * 3
    assert lemma[0] == tighter[-1] < tighter[0]
    smallest = next(each for each in grid.rows if each.label == "0.4 %")
    assert smallest.ours[2:] == (None, None)


def test_counting_does_not_depend_on_batches(guard, monkeypatch):
    logits = leading_logits(guard)
    queries = {"a": masking_query(Windows.sliding(grid=(7, 7), size=(2, 2)))}
    whole = count(logits, queries, CPU)
    monkeypatch.setattr("patchguard.paper.cached_logits.ELEMENTS", {"cpu": 7 * 4 * 49, "cuda": 1})
    threads = torch.get_num_threads()
    assert count(replace(logits), queries, CPU) == whole
    assert torch.get_num_threads() == threads


def test_a_query_is_counted_once(guard, monkeypatch):
    logits, windows = leading_logits(guard), Windows.sliding(grid=(7, 7), size=(2, 2))
    first = count(logits, {"a": masking_query(windows)}, CPU)["a"]
    monkeypatch.setattr(CachedLogits, "batches", lambda self, device: pytest.fail("counted again"))
    assert count(logits, {"b": masking_query(windows)}, CPU)["b"] == first
    monkeypatch.undo()
    other = replace(logits, targets=(logits.targets + 1) % 4)
    assert count(other, {"a": masking_query(windows)}, CPU)["a"] != first


def test_large_patches_are_drawn(context, monkeypatch):
    monkeypatch.setitem(masking_tables.SIDES, "cifar10", (2, 14, 28))
    result = masking_tables.large_patches(context, "cifar10")
    robust = [to_percent(each.ours[1]) for each in result.tables[1].rows]
    assert robust[0] > robust[1] >= robust[2] == 0
    assert list(result.figures) == ["large_patches-mask-srf-7"]
    assert to_png(result.figures["large_patches-mask-srf-7"]).startswith(b"\x89PNG")


# -- shapes ------------------------------------------------------------------------------------------------------------


def test_a_table_refuses_rows_of_another_length():
    with pytest.raises(ValueError, match="has 1 values of ours and 0 published ones for 2 columns"):
        Table(title="t", where="", columns=("a", "b"), rows=(Row(label="r", ours=(1.0,)),))


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), ("words", "words"), (0.0, "0.0"), (0.05, "0.050"), (12.34, "12.3"), (100.0, "100.0")],
)
def test_values_are_written_as_the_paper_does(value, text):
    assert format_value(value) == text

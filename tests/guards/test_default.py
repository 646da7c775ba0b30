"""The embedded model on embedded images gives, here and now, what its published run says."""

import json
from pathlib import Path

import torch

import patchguard as pg
from patchguard.data import sample

PUBLISHED = json.loads((Path(__file__).parents[2] / "results" / "sample.json").read_text())


def test_the_embedded_model_answers_and_certifies_as_published() -> None:
    some = torch.arange(0, 500, 50)
    data = sample.load().subset(some)
    guard = pg.load("cifar10")
    found = guard.certify(data.images.float() / 255, pg.Patch(5))
    certified = torch.tensor([int(place) in PUBLISHED["certified_5x5"] for place in some])
    label = torch.tensor(PUBLISHED["label"])[some]
    # Another processor rounds otherwise; one image may then lie on the other side of a bound.
    assert int((found.label != label).sum()) <= 1
    assert int((found.certified != certified).sum()) <= 1
    assert float((found.label == data.targets).float().mean()) > 0.7
    assert float((found.certified & (found.label == data.targets)).float().mean()) > 0.5


def test_the_published_share_is_that_of_its_records() -> None:
    truth = sample.load().targets.tolist()
    right = [label == target for label, target in zip(PUBLISHED["label"], truth, strict=True)]
    entry = PUBLISHED["patches"]["5x5"]
    assert sum(right) == entry["clean"]["right"]
    assert sum(right[place] for place in PUBLISHED["certified_5x5"]) == entry["certified"]["right"]

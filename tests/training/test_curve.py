import json
import math
from pathlib import Path

from patchguard.training import curve


def records(epochs: int = 40) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for epoch in range(1, epochs + 1):
        done = epoch / epochs
        found.append(
            {
                "epoch": epoch,
                "loss": 2.3 * math.exp(-2 * done) + (0.4 if done > 0.2 else 0),
                "train_accuracy": 0.9 - 0.7 * math.exp(-4 * done),
                "lr": 0.3 * (1 + math.cos(math.pi * done)) / 2,
                "mask_step": None if done <= 0.2 else 4 if done <= 0.8 else 2,
            }
        )
        if epoch % 4 == 0:
            clean = 0.88 - 0.6 * math.exp(-4 * done)
            found[-1]["held_out"] = {"clean": clean, "certified": 0.75 * clean}
    return found


def test_the_figure_shows_the_records_and_where_masks_change() -> None:
    given = records()
    losses, accuracies, rates = curve.draw(given, "cifar10").axes
    assert losses.get_title(loc="left") == "cifar10"
    assert list(losses.lines[0].get_ydata()) == [record["loss"] for record in given]
    labels = [text.get_text() for text in accuracies.get_legend().get_texts()]
    assert labels == ["training images", "held out, clean", "held out, certified"]
    assert list(accuracies.lines[2].get_xdata()) == list(range(4, 41, 4))
    assert [line.get_xdata()[0] for line in rates.lines[1:]] == [8.5, 32.5]


def test_one_epoch_without_held_out_images_makes_a_picture(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps(records(3)[0]) + "\n")
    curve.write(tmp_path, "tiny")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.glob("*.draft")] == []


def test_no_log_makes_no_picture(tmp_path: Path) -> None:
    curve.write(tmp_path, "tiny")
    assert not (tmp_path / "curve.png").exists()

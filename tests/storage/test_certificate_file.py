"""Certificate files from guards: canonical, atomic, checked against the network and the image, and the command."""

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest
import torch
from helpers.claims import edited, sealed
from helpers.small_guards import ANY_MASKS, bagnet_guard, random_images, randomize_weights, srf_guard
from PIL import Image
from typer.testing import CliRunner

from patchguard import verify
from patchguard.cli import app
from patchguard.defenses import ClippedSum, DoubleMasking, MajorityVote, RobustMasking, Undefended
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError
from patchguard.geometry.windows import Windows
from patchguard.guard import Examination, Plan, Task
from patchguard.guards import cell_claims
from patchguard.guards.interval import IntervalGuard
from patchguard.guards.local import LocalGuard
from patchguard.models import build
from patchguard.patch import Patch
from patchguard.storage import certificate_file, zoo
from patchguard.storage.certificate_file import Packer, difference, eight_bit, has_own_masks, image_digest


@cache
def band_guard() -> LocalGuard:
    """Votes of column bands on a circle."""
    model = randomize_weights(build("ds_resnet18", classes=3, width=0.05))
    plain = srf_guard()
    return replace(plain, model=model, evidence=Evidence(kind="vote", drift=1e-3), defense=MajorityVote())


def examine(guard: LocalGuard, pixels: torch.Tensor) -> Examination:
    """What the guard finds about 16 x 16 pictures and a patch of 2 x 2."""
    return guard.examine(pixels.float() / 255, Plan(guard, (16, 16), (Task(Patch(2), guard, "own"),)))


def image(side: int, seed: int = 0) -> torch.Tensor:
    return (random_images(1, side, seed=seed)[0] * 255).round().to(torch.uint8)


def guards() -> dict[str, tuple[LocalGuard, int]]:
    masks = bagnet_guard().defense.masks
    return {
        "double masking": (srf_guard(), 16),
        "double masking with tau": (replace(srf_guard(), defense=replace(srf_guard().defense, tau=1.5)), 16),
        "robust masking behind a resize": (bagnet_guard(), 12),
        "robust masking with a threshold": (
            replace(bagnet_guard(), defense=RobustMasking(masks=masks, threshold=0.2)),
            12,
        ),
        "clipped sum": (replace(srf_guard(), evidence=Evidence(kind="tanh"), defense=ClippedSum()), 16),
        "published clipped sum": (
            replace(srf_guard(), evidence=Evidence(kind="tanh"), defense=ClippedSum(spatial=False)),
            16,
        ),
        "bands on a circle": (band_guard(), 32),
    }


@pytest.mark.parametrize("name", guards())
def test_a_written_file_is_valid_and_says_what_certify_says(name, tmp_path):
    guard, side = guards()[name]
    path = tmp_path / "image.pgc"
    pixels = image(side)
    written = certificate_file.write(path, guard, pixels, Patch(2))
    found = guard.certify(pixels[None].float() / 255, Patch(2))
    claim, _ = verify.read(path.read_bytes())
    verdict = verify.check(path)
    assert verdict.valid, verdict
    assert verdict.certified == bool(written.certified) == bool(found.certified)
    assert claim["margin"]["value"] == float(written.margin) == float(found.margin)
    assert claim["label"] == int(found.label)
    assert difference(path.read_bytes(), guard, pixels) is None


def test_the_same_inputs_give_the_same_bytes_and_no_draft_is_left(tmp_path):
    for name in ("one.pgc", "two.pgc"):
        certificate_file.write(tmp_path / name, srf_guard(), image(16), Patch(2))
    assert (tmp_path / "one.pgc").read_bytes() == (tmp_path / "two.pgc").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.pgc", "two.pgc"]


@pytest.mark.parametrize("broken", ["write", "replace"])
def test_a_file_that_cannot_be_finished_leaves_the_old_one_whole(broken, tmp_path, monkeypatch):
    path = tmp_path / "image.pgc"
    certificate_file.write(path, srf_guard(), image(16), Patch(2))
    before = path.read_bytes()

    def refuse(*_):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync" if broken == "write" else "os.replace", refuse)
    with pytest.raises(InputError, match="cannot be written: no space left"):
        certificate_file.write(path, srf_guard(), image(16, seed=1), Patch(2))
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_claim_that_the_checker_refutes_is_never_written(tmp_path, monkeypatch):
    certify = DoubleMasking.certify

    def generous(self, evidence, windows, *more):
        found = certify(self, evidence, windows, *more)
        return replace(found, margin=found.margin + 1)

    monkeypatch.setattr(DoubleMasking, "certify", generous)
    with pytest.raises(InputError, match="the checker says that it claims another margin"):
        certificate_file.write(tmp_path / "image.pgc", srf_guard(), image(16), Patch(2))
    assert not list(tmp_path.iterdir())


def test_what_would_take_too_long_to_check_is_never_packed(monkeypatch):
    guard = srf_guard()
    packer, examination = Packer(Task(Patch(2), guard, "own"), 16, 16), examine(guard, image(16)[None])
    with monkeypatch.context() as patched:
        patched.setattr(verify, "LARGEST_WORK", 10**6)
        for _ in range(2):
            with pytest.raises(InputError, match="too long to check 121 windows and 121 masks on 3 x 16 x 16"):
                packer.pack(examination, 0, 0, image_digest(image(16)))
    assert verify.check_bytes(packer.pack(examination, 0, 0, image_digest(image(16)))).valid


def test_masks_that_are_listed_twice_are_never_packed(tmp_path):
    masks = srf_guard().defense.masks
    pairs = [(row, column) for row in range(len(masks.rows)) for column in range(len(masks.columns))]
    twice = replace(masks, pairs=(*pairs, pairs[0]))
    with pytest.raises(InputError, match=r"`defense\.masks` must not name the same cells twice"):
        certificate_file.write(
            tmp_path / "image.pgc", replace(srf_guard(), defense=DoubleMasking(masks=twice)), image(16), Patch(2)
        )


@pytest.mark.parametrize(
    ("units", "scale", "defense", "denominator"),
    [
        (2**52 - 1, 1, DoubleMasking(masks=ANY_MASKS), 1),
        (1 - 2**52, 2**16, ClippedSum(), 2**16),
        (7, 4, RobustMasking(masks=ANY_MASKS), 4),
        (7, 4, RobustMasking(masks=ANY_MASKS, threshold=Fraction(1, 4)), 12),
        (-7, 4, RobustMasking(masks=ANY_MASKS, threshold=Fraction(1)), 4),
    ],
)
def test_a_margin_is_written_as_the_whole_number_it_was(units, scale, defense, denominator):
    found = cell_claims._margin(units / denominator, defense.margin_unit(scale))
    assert found == {"units": units, "denominator": denominator, "value": units / denominator}


@pytest.mark.parametrize("margin", [2.0**52, -(2.0**52), 2.0**60, 0.3, 1 / 3])
def test_a_margin_that_is_no_whole_number_of_units_is_not_written(margin):
    with pytest.raises(InputError, match="cannot be written exactly"):
        cell_claims._margin(margin, 1)


def test_the_digest_of_an_image_is_the_documented_one():
    """2x3, a newline, and 0, 10, ..., 170 as red, green, blue, row by row: computed with sha256sum."""
    pixels = torch.arange(0, 180, 10, dtype=torch.uint8).reshape(2, 3, 3).permute(2, 0, 1)
    expected = "dc29ccaef5f241d9a5cfcb1c2300bed656a40b576cb2e5d775794dd3bb811618"
    assert image_digest(pixels) == expected
    assert image_digest(pixels.float() / 255) == expected
    assert image_digest(pixels.transpose(1, 2)) != expected
    assert image_digest(pixels.flip(0)) != expected
    assert hashlib.sha256(b"2x3\n" + bytes(range(0, 180, 10))).hexdigest() == expected


def test_floats_are_taken_if_they_are_8_bit_pixels(tmp_path):
    pixels = image(16)
    certificate_file.write(tmp_path / "whole.pgc", srf_guard(), pixels, Patch(2))
    certificate_file.write(tmp_path / "float.pgc", srf_guard(), pixels.float() / 255, Patch(2))
    assert (tmp_path / "whole.pgc").read_bytes() == (tmp_path / "float.pgc").read_bytes()
    assert torch.equal(eight_bit(pixels.double() / 255), pixels)
    above, below = (torch.full((3, 4, 4), whole / 255) for whole in (256, -1))
    for wrong in (pixels[None], pixels.long(), pixels.float(), torch.full((3, 4, 4), 0.3), above, below):
        with pytest.raises(InputError, match="`image` must"):
            eight_bit(wrong)


def test_a_batch_is_packed_from_what_was_computed_once():
    guard = srf_guard()
    pixels = torch.stack([image(16, seed) for seed in range(6)])
    packer, examination = Packer(Task(Patch(2), guard, "own"), 16, 16), examine(guard, pixels)
    for row in range(6):
        data = packer.pack(examination, 0, row, image_digest(pixels[row]))
        assert verify.check_bytes(data).valid
        assert difference(data, guard, pixels[row]) is None


def test_only_the_defended_label_can_be_written():
    guard = srf_guard()
    packer, examination = Packer(Task(Patch(2), guard, "own"), 16, 16), examine(guard, image(16)[None])
    other = (int(examination.prediction.label) + 1) % 3
    certificate = guard.certify(image(16)[None].float() / 255, Patch(2), other)
    examination = replace(examination, certificates=(certificate,))
    with pytest.raises(InputError, match="must be about the defended label"):
        packer.pack(examination, 0, 0, image_digest(image(16)))


def test_what_has_no_checker_is_refused(tmp_path):
    bounded = replace(srf_guard(), evidence=Evidence(kind="tanh"), defense=ClippedSum())
    for guard, patch, message in (
        (bounded, Patch(2, count=2), "are about one patch"),
        (replace(srf_guard(), defense=Undefended()), Patch(2), "got Undefended"),
    ):
        with pytest.raises(InputError, match=message):
            certificate_file.write(tmp_path / "image.pgc", guard, image(16), patch)
    with pytest.raises(InputError, match="folder of `path` must exist"):
        certificate_file.write(tmp_path / "none" / "image.pgc", srf_guard(), image(16), Patch(2))
    assert not list(tmp_path.iterdir())


def test_evidence_that_was_not_made_by_the_guard_is_refused():
    guard = srf_guard()
    packer, examination = Packer(Task(Patch(2), guard, "own"), 16, 16), examine(guard, image(16)[None])
    evidence = examination.details
    for changed, message in (
        (evidence.with_values(evidence.values), "must carry the drift"),
        (replace(evidence, high=1), "own settings"),
        (replace(evidence, finite=~evidence.finite), "must be finite"),
    ):
        with pytest.raises(InputError, match=message):
            packer.pack(replace(examination, details=changed), 0, 0, image_digest(image(16)))


# -- against the network and the image ---------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "image.pgc"
    certificate_file.write(path, srf_guard(), image(16), Patch(2))
    return path


def test_another_image_model_or_rule_is_noticed(written):
    guard, pixels, data = srf_guard(), image(16), written.read_bytes()
    changed = pixels.clone()
    changed[0, 0, 0] ^= 1
    assert "another image" in difference(data, guard, changed)
    assert "another image" in difference(data, guard, image(18))
    assert "settings of evidence" in difference(data, replace(guard, evidence=Evidence(low=None)), pixels)
    assert "preprocessing" in difference(data, replace(guard, preprocess=bagnet_guard().preprocess), pixels)
    masks = guard.defense.masks
    assert "defense" in difference(data, replace(guard, defense=RobustMasking(masks=masks)), pixels)
    assert "defense" in difference(data, replace(guard, defense=replace(guard.defense, tau=1.0)), pixels)
    renamed = replace(guard, class_names=("x", "y", "z"))
    assert "names of classes" in difference(data, renamed, pixels)
    other = replace(guard, model=build("srf", classes=3, field=5, widths=[8, 12]).eval())
    assert "other weights" in difference(data, other, pixels)


def test_masks_fitted_to_the_patch_of_the_file_are_known_as_such(tmp_path):
    guard, pixels = srf_guard(), image(16)
    fitted = guard.for_patch(Patch(4), 16, 16)
    certificate_file.write(tmp_path / "image.pgc", fitted, pixels, Patch(4))
    data = (tmp_path / "image.pgc").read_bytes()
    assert difference(data, guard, pixels) is None
    assert (has_own_masks(data, guard), has_own_masks(data, fitted)) == (False, True)
    certificate_file.write(tmp_path / "image.pgc", guard.for_patch(Patch(5), 16, 16), pixels, Patch(4))
    assert "neither the model's nor those fitted" in difference((tmp_path / "image.pgc").read_bytes(), guard, pixels)


def test_a_false_field_is_valid_alone_but_not_against_the_model(written):
    """The one lie that the file cannot betray: cells that claim to read nothing."""

    def blind(claim, _):
        claim["field"]["rows"]["lengths"] = [0] * 16

    forged = edited(written.read_bytes(), blind)
    assert verify.check_bytes(forged).valid
    assert difference(forged, srf_guard(), image(16)) == "its field is not the one traced from the model"


@pytest.mark.parametrize("wrap", [[True, False], [False, True]])
def test_cells_that_claim_to_lie_on_a_circle_are_noticed(written, wrap):
    def close(claim, _):
        claim["wrap"] = wrap

    forged = edited(written.read_bytes(), close)
    assert verify.check_bytes(forged).valid
    assert difference(forged, srf_guard(), image(16)) == "its field is not the one traced from the model"


def test_evidence_may_differ_within_the_drift_and_no_further(written):
    claim, layers = verify.read(written.read_bytes())
    drift = claim["units"]["drift"]
    assert drift > 0
    moved = layers.copy()
    moved[0, 0, 0] += drift
    assert difference(sealed(claim, moved), srf_guard(), image(16)) is None
    moved[0, 0, 0] += 1
    assert "more than the drift allows" in difference(sealed(claim, moved), srf_guard(), image(16))


def test_evidence_that_is_not_finite_or_of_another_shape_is_never_that_of_a_file(written, monkeypatch):
    guard, made = srf_guard(), LocalGuard.evidence_of
    for change in (
        lambda evidence: replace(evidence, finite=~evidence.finite),
        lambda evidence: evidence.with_values(evidence.values[:, :1]),
        lambda evidence: evidence.with_values(evidence.values[..., :1]),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(LocalGuard, "evidence_of", lambda self, images, change=change: change(made(self, images)))
            reason = difference(written.read_bytes(), guard, image(16))
        assert reason == "the model gives no such evidence for this image"


def test_votes_called_sure_that_drift_could_take_away_are_noticed(tmp_path):
    guard, pixels = replace(band_guard(), evidence=Evidence(kind="vote", drift=0.3)), image(32)
    certificate_file.write(tmp_path / "image.pgc", guard, pixels, Patch(2))
    claim, layers = verify.read((tmp_path / "image.pgc").read_bytes())
    assert difference(sealed(claim, layers), guard, pixels) is None
    assert (layers[1] < layers[2]).any()  # there are votes that drift could change
    for layer, value in ((1, layers[0]), (2, layers[0])):
        forged = layers.copy()
        forged[layer] = value
        assert (forged != layers).any()
        assert "more than the drift allows" in difference(sealed(claim, forged), guard, pixels)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def run():
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def deployed(tmp_path):
    zoo.save(srf_guard(), tmp_path / "guard.safetensors")
    Image.fromarray(image(16).permute(1, 2, 0).numpy()).save(tmp_path / "image.png")
    return ("--model", tmp_path / "guard.safetensors", "--image", tmp_path / "image.png")


def test_the_command_checks_files(run, written):
    shown = run("verify", written)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith(f"{written}: valid: label ")
    assert f" patch if {verify.CONDITION}, margin " in shown.stdout
    broken = written.with_name("broken.pgc")
    broken.write_bytes(written.read_bytes()[:-1])
    shown = run("verify", written, broken, written.parent, "--json")
    assert shown.exit_code == 1
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [line["valid"] for line in lines] == [True, False, False]
    assert set(lines[0]) == {"file", "valid", "certified", "reason", "checked", "condition"}
    assert [line["condition"] for line in lines] == [verify.CONDITION, None, None]


def test_the_command_checks_model_and_image(run, written, deployed, tmp_path):
    shown = run("verify", written, *deployed)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.rstrip().endswith("; model, field, image and evidence agree")
    assert " if " not in shown.stdout
    stated = json.loads(run("verify", written, *deployed, "--json").stdout)
    assert (stated["condition"], " if " in stated["reason"]) == (None, False)
    Image.fromarray(image(16, seed=1).permute(1, 2, 0).numpy()).save(tmp_path / "image.png")
    shown = run("verify", written, *deployed)
    assert shown.exit_code == 1
    assert shown.stdout == f"{written}: invalid: it is about another image\n"


def test_mistakes_in_the_command_are_one_line(run, written, deployed, tmp_path):
    shown = run("verify", written, "--model", "srf")
    assert shown.exit_code == 1
    assert "must be given together" in shown.stderr
    (tmp_path / "image.png").write_bytes(b"no image")
    shown = run("verify", written, *deployed)
    assert shown.exit_code == 1
    assert "not an image of a known kind" in shown.stderr
    assert len(shown.stderr.strip().splitlines()) == 1


def test_a_check_without_a_model_does_not_wait_for_torch(written):
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from patchguard.cli import app\n"
        f"shown = CliRunner().invoke(app, ['verify', {str(written)!r}])\n"
        "assert shown.exit_code == 0, shown.output\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_masks_may_be_any_boxes(tmp_path):
    windows = srf_guard().defense.masks
    boxes = Windows.from_boxes(windows.boxes[::-1], grid=windows.grid)
    assert boxes.pairs is not None
    guard = replace(srf_guard(), defense=replace(srf_guard().defense, masks=boxes))
    certificate_file.write(tmp_path / "image.pgc", guard, image(16), Patch(2))
    assert verify.check(tmp_path / "image.pgc").valid


# -- statements --------------------------------------------------------------------------------------------------------


@pytest.fixture
def stated(tmp_path):
    """The file of a guard whose proofs the checker cannot recompute, the guard and the image."""
    network = build("interval_cnn", classes=3, side=8, widths=(2,), kernels=(3,), strides=(2,))
    guard = IntervalGuard(randomize_weights(network))
    pixels, path = image(8), tmp_path / "image.pgc"
    certificate_file.write(path, guard, pixels, Patch(1))
    return path.read_bytes(), guard, pixels


def test_a_statement_is_neither_valid_nor_invalid_until_the_guard_confirms_it(stated):
    data, guard, pixels = stated
    verdict = verify.check_bytes(data)
    assert (verdict.valid, verdict.certified, verdict.checked) == (False, False, False)
    assert str(verdict).startswith("unchecked: it states that label")
    assert difference(data, guard, pixels) is None
    assert difference(data, guard, image(8, seed=1)) == "it is about another image"
    with torch.no_grad():
        guard.model.fc.bias += 1.0
    assert difference(data, guard, pixels) == "it is about a model with other weights or settings"


def test_a_statement_is_confirmed_with_the_patch_that_it_names(stated, tmp_path, monkeypatch):
    _, guard, pixels = stated
    certificate_file.write(tmp_path / "wide.pgc", guard, pixels, Patch(2, 3))
    asked, certify = [], IntervalGuard.certify

    def note_patch(self, images, patch, *more):
        asked.append(patch)
        return certify(self, images, patch, *more)

    monkeypatch.setattr(IntervalGuard, "certify", note_patch)
    assert difference((tmp_path / "wide.pgc").read_bytes(), guard, pixels) is None
    assert asked == [Patch(2, 3)]


def test_a_statement_with_another_label_or_claim_is_refuted_by_the_guard(stated):
    data, guard, pixels = stated
    claim, _ = verify.read(data)

    def altered(**changes):
        changed = {**claim, **changes}
        changed["digest"] = verify.digest_of(changed)
        return verify.archive(verify.canonical(changed), verify.array_header([0]))

    assert "gives label" in difference(altered(label=(claim["label"] + 1) % 3), guard, pixels)
    contrary = altered(certified=not claim["certified"], margin=-1.0 if claim["certified"] else 1.0)
    assert "claims the contrary" in difference(contrary, guard, pixels)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"margin": 1}, "margin must be a decimal"),
        ({"margin": -1.0, "certified": True}, "margin must be a decimal"),
        ({"guard": "rm -rf"}, "name of a kind"),
        ({"patch": {"height": 9, "width": 1, "count": 1}}, "patch.height"),
        ({"source": [8]}, "source"),
        ({"label": -1}, "label"),
        ({"class_names": [1]}, "class_names"),
        ({"more": 1}, "no others"),
    ],
    ids=str,
)
def test_statements_that_make_no_sense_are_invalid(stated, changes, message):
    claim, _ = verify.read(stated[0])
    changed = {**claim, **changes}
    changed["digest"] = verify.digest_of(changed)
    verdict = verify.check_bytes(verify.archive(verify.canonical(changed), verify.array_header([0])))
    assert not verdict.valid
    assert verdict.checked
    assert message in verdict.reason


def test_a_statement_cannot_carry_evidence_or_another_digest(stated):
    claim, _ = verify.read(stated[0])
    for document, array in (
        (verify.canonical(claim), verify.array_header([1]) + bytes(8)),
        (verify.canonical({**claim, "label": claim["label"] + 1}), verify.array_header([0])),
    ):
        verdict = verify.check_bytes(verify.archive(document, array))
        assert verdict.checked
        assert not verdict.valid

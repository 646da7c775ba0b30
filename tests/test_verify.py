"""The checker of certificate files: it agrees with the package, refuses every other claim, and never raises."""

import hashlib
import io
import json
import subprocess
import sys
import time
import zipfile
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from helpers import largest_claims
from helpers.claims import (
    EDITS,
    RULES,
    edited,
    forged,
    honest,
    honest_files,
    sealed,
    trailing,
    true_claim,
    uncovered,
    wrong,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from patchguard import verify
from patchguard.verify import check, check_bytes, read

SOURCE = Path(verify.__file__)


@pytest.fixture(scope="module")
def file() -> bytes:
    return next(honest_files("RobustMasking", 1))


# -- agreement with the package ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_every_claim_that_the_package_proves_is_valid(rule):
    certified, tied, drifting, around, twice = 0, 0, 0, 0, 0
    for data in honest_files(rule, 100):
        verdict = check_bytes(data)
        claim, _ = read(data)
        assert verdict.valid, verdict
        assert verdict.certified == (claim["margin"]["units"] > 0)
        certified += verdict.certified
        tied += claim["margin"]["units"] == 0
        drifting += claim["evidence"]["drift"] > 0
        around += claim["wrap"] == [True, False]
        twice += claim["wrap"] == [True, True]
    assert min(certified, tied, drifting, around, twice, 100 - certified) > 0


@settings(max_examples=60, deadline=None)
@given(st.integers(10**6, 10**9), st.sampled_from(RULES))
def test_the_margins_are_equal_on_any_claim(seed, rule):
    data = honest(seed, rule)
    if data is not None:
        assert check_bytes(data).valid
        assert true_claim(data)


# -- damage ------------------------------------------------------------------------------------------------------------


def test_every_changed_byte_is_noticed(file):
    draw = np.random.default_rng(0)
    for place in range(len(file)):
        changed = bytearray(file)
        changed[place] ^= int(draw.integers(1, 256))
        assert not check_bytes(bytes(changed)).valid, place


def test_a_file_that_is_cut_or_longer_is_invalid(file):
    for length in range(0, len(file), 7):
        assert not check_bytes(file[:length]).valid
    assert not check_bytes(file + b"\0").valid
    assert not check_bytes(b"\0" + file).valid


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_garbage_is_invalid(data):
    assert not check_bytes(data).valid
    assert not check_bytes(b"PK\3\4" + data).valid


def test_what_is_not_a_file_is_invalid(tmp_path):
    assert str(check(tmp_path / "missing.pgc")) == "invalid: it cannot be opened (FileNotFoundError)"
    assert str(check(tmp_path)) == "invalid: it is not a file"
    assert not check("no\0name").valid
    large = tmp_path / "large.pgc"
    with large.open("wb") as sparse:
        sparse.truncate(2**30)
    assert "larger than" in check(large).reason


# -- forgery: other claims, digests made anew --------------------------------------------------------------------------


@pytest.mark.parametrize("name", EDITS)
def test_a_wrong_claim_is_invalid_though_its_digests_are_right(name):
    for rule in RULES:
        for data in honest_files(rule, 12):
            assert not check_bytes(edited(data, wrong(name))).valid


def test_a_window_that_misses_a_cell_is_invalid():
    def shrink(claim, _):
        wide = max(range(len(claim["windows"])), key=lambda w: claim["windows"][w][3] - claim["windows"][w][2])
        claim["windows"][wide][3] -= 1

    for data in honest_files("ClippedSum", 20):
        _, _, left, right = max(read(data)[0]["windows"], key=lambda box: box[3] - box[2])
        if right - left > 1:
            assert not check_bytes(edited(data, shrink)).valid


@pytest.mark.parametrize("entry", ["patch", "threshold", "masks"])
def test_a_proof_for_another_patch_or_rule_is_not_taken(entry):
    def change(claim, _):
        if entry == "patch":
            claim["patch"]["width"] = min(claim["patch"]["width"] + 1, claim["source"][1])
        elif entry == "threshold":
            claim["defense"]["threshold"] = "1/3"
        else:
            claim["defense"]["masks"] = claim["defense"]["masks"][:-1] or claim["defense"]["masks"]

    refused = 0
    for data in honest_files("RobustMasking", 60):
        changed = edited(data, change)
        verdict = check_bytes(changed)
        refused += not verdict.valid
        assert not verdict.valid or true_claim(changed)
    assert refused > 10


def retold(data: bytes, tau: object) -> bytes:
    def change(claim, _):
        claim["defense"]["tau"] = tau
        if tau == "left out":
            del claim["defense"]["tau"]

    return edited(data, change)


def with_tau() -> bytes:
    """A file with the tau 1.0 for which any other one gives another margin."""
    files = (data for data in honest_files("DoubleMasking", 10**4) if read(data)[0]["defense"].get("tau") == 1.0)
    return next(data for data in files if not any(true_claim(retold(data, tau)) for tau in (0.0, 0.5, 2.0)))


def test_a_tau_is_written_only_where_there_is_one():
    stated = [read(data)[0]["defense"].get("tau") for data in honest_files("DoubleMasking", 50)]
    assert {None, 0.3, 1.0, 2.7} == set(stated)
    assert check_bytes(with_tau()).valid


@pytest.mark.parametrize("tau", [None, 0.0, 0.5, 2.0, 1e300, -1.0, 1, "1.0", True, [1.0], "left out"])
def test_another_tau_is_not_taken(tau):
    reason = check_bytes(retold(with_tau(), tau)).reason
    proper = tau == "left out" or (isinstance(tau, float) and 0 <= tau < 1e300)
    assert ("it claims" if proper else "`defense.tau` must be a decimal from 0 to 16777216") in reason


@pytest.mark.parametrize("tau", [b"NaN", b"Infinity", b"1e999", b"1.00"])
def test_no_other_spelling_of_tau_is_read(tau):
    assert (
        "canonical spelling"
        in check_bytes(document(with_tau(), lambda text: text.replace(b'"tau":1.0', b'"tau":' + tau))).reason
    )


def test_a_negative_tau_is_refused_though_all_else_would_follow_from_it():
    assert "`defense.tau` must be a decimal from 0 to 16777216" in check_bytes(trailing()).reason


@pytest.mark.parametrize(
    ("kinds", "entry", "value", "reason"),
    [
        (("confidence", "tanh", "vote", "prediction"), "high", 1.0, "clip logits alone"),
        (("confidence", "tanh", "vote", "prediction"), "low", -1.0, "clip logits alone"),
        (("vote",), "threshold", 0.0, "must lie above 0 and at most at 1"),
        (("vote",), "threshold", 1.5, "must lie above 0 and at most at 1"),
    ],
)
def test_settings_that_no_evidence_can_have_are_refused(kinds, entry, value, reason):
    def change(claim, _):
        claim["evidence"][entry] = value

    met = set()
    for rule in RULES:
        for data in honest_files(rule, 60):
            kind = read(data)[0]["evidence"]["kind"]
            if kind in kinds:
                met.add(kind)
                assert reason in check_bytes(edited(data, change)).reason
    assert met == set(kinds)


def small(rule, *, shape=(2, 2, 2), **evidence):
    """A claim about evidence that is 0 everywhere, with these settings."""
    claim, _ = largest_claims.claim(rule, shape[-3:], 1, 1 if "Masking" in rule["name"] else 0)
    claim["evidence"] |= evidence
    claim["units"] = verify.units_of(claim["evidence"])
    return claim, np.zeros(shape, dtype=np.int64)


@pytest.mark.parametrize(
    ("low", "high", "fits"),
    [
        (0.0, 65535.0, True),
        (0.0, 65536.0, False),
        (-65535.0, 1.0, True),
        (-65536.0, 1.0, False),
        (0.0, 0.0, False),
        (0.0, -1.0, False),
    ],
)
def test_evidence_needs_a_range_whose_sums_are_exact(low, high, fits):
    """Four cells with 32 bits: their sum must stay below 2**50."""
    reason = check_bytes(sealed(*small(largest_claims.SUM, kind="logits", low=low, high=high, bits=32))).reason
    assert ("range of its evidence is empty, or too large" in reason) is not fits


@pytest.mark.parametrize(("units", "inside"), [(-9, False), (-8, True), (12, True), (13, False)])
def test_evidence_must_lie_in_its_range(units, inside):
    claim, layers = small(largest_claims.SUM, kind="logits", low=-2.0, high=3.0, bits=2)
    layers[1, 1, 0] = units
    assert ("must lie between -8 and 12 units" in check_bytes(sealed(claim, layers)).reason) is not inside


@pytest.mark.parametrize("low", [-2.0, 1.0, None])
@pytest.mark.parametrize("rule", [largest_claims.ROBUST, largest_claims.SHARE])
def test_robust_masking_has_no_theorem_for_evidence_that_does_not_begin_at_0(low, rule):
    claim, layers = small(rule, kind="logits", low=low, high=3.0)
    layers += 1
    assert "no theorem for evidence whose least value is not 0" in check_bytes(sealed(claim, layers)).reason


@pytest.mark.parametrize(
    ("rule", "evidence"),
    [
        (largest_claims.SUM, {"kind": "logits", "low": 0.0}),
        (largest_claims.SUM, {"kind": "logits", "high": 1.0}),
        (largest_claims.SUM | {"name": "MajorityVote"}, {"kind": "logits", "low": 0.0, "high": 1.0}),
        (largest_claims.SUM | {"name": "MajorityVote"}, {"kind": "confidence"}),
        (largest_claims.SUM | {"name": "MajorityVote"}, {"kind": "tanh"}),
    ],
)
def test_sums_have_a_theorem_for_bounded_evidence_and_majorities_for_votes(rule, evidence):
    assert f"{rule['name']} has no theorem for this evidence" in check_bytes(sealed(*small(rule, **evidence))).reason


@pytest.mark.parametrize(
    ("layers", "evidence"),
    [(1, {"kind": "vote", "drift": 0.1}), (3, {"kind": "vote"}), (3, {"kind": "confidence", "drift": 0.1})],
)
def test_there_are_three_layers_if_votes_drift_and_one_otherwise(layers, evidence):
    shape = (3, 2, 2, 2) if layers == 3 else (2, 2, 2)
    reason = check_bytes(sealed(*small(largest_claims.SUM, shape=shape, **evidence))).reason
    assert "must hold sure and possible votes if" in reason


@pytest.mark.parametrize(
    ("votes", "sound"), [((1, 0, 1), True), ((0, 0, 1), True), ((0, 1, 1), False), ((1, 0, 0), False)]
)
def test_a_sure_vote_is_a_vote_and_a_vote_is_possible(votes, sound):
    claim, layers = small(largest_claims.SUM, shape=(3, 2, 2, 2), kind="vote", drift=0.1)
    layers[:, 1, 0, 1] = votes
    assert ("a sure vote must be a vote" in check_bytes(sealed(claim, layers)).reason) is not sound


@pytest.mark.parametrize(
    ("box", "wrap", "inside"),
    [
        ([0, 2, 0, 3], False, True),
        ([0, 2, 0, 4], False, False),
        ([0, 2, 1, 4], False, False),
        ([0, 3, 0, 3], False, False),
        ([0, 2, 2, 2], False, False),
        ([0, 2, 3, 4], True, False),
        ([0, 2, -1, 2], True, False),
        ([0, 2, 2, 5], True, True),
        ([0, 2, 2, 6], True, False),
        ([0, 2, 2, 2], True, False),
    ],
)
def test_boxes_lie_in_the_grid_or_once_around_a_circle(box, wrap, inside):
    claim, layers = small(largest_claims.SUM, shape=(2, 2, 3))
    claim["windows"], claim["wrap"] = [[0, 2, 0, 1], box], [False, wrap]
    claim["field"]["columns"]["lengths"] = [1, 0, 0]
    assert ("`windows` must be a whole number" in check_bytes(sealed(claim, layers)).reason) is not inside


@pytest.mark.parametrize("threshold", ["1/1001", "999/1001", "2", "3/2", "-1/2", "1/0", "0.5", " 1/2", "1/2 ", ""])
def test_no_other_threshold_is_read(threshold):
    claim, layers = small(largest_claims.SHARE | {"threshold": threshold})
    assert "`defense.threshold` must" in check_bytes(sealed(claim, layers)).reason


def test_unbounded_evidence_needs_masks_that_cover():
    assert "lies in no mask, and the evidence has no bound" in check_bytes(uncovered()).reason


def values_in(node, path=()):
    """Every place in a JSON value."""
    yield path
    for key, child in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from values_in(child, (*path, key))


# Lists and dictionaries are made anew each time: a second edit may change what the first one put in.
STRANGE = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 12), st.sampled_from([2**31, 2**63, -(2**63), 10**50, 0.0, -1.5, 1e300]),
    st.text(max_size=3), st.builds(list), st.builds(dict), st.just("1/3"), st.builds(lambda: [[0, 1, 0, 1]]),
)  # fmt: skip


def test_no_edit_makes_a_false_claim_valid():
    met = Counter()

    @settings(max_examples=200, deadline=None, database=None)
    @given(st.data(), st.integers(0, 60), st.sampled_from(RULES))
    def edit(data, seed, rule):
        original = honest(seed, rule)
        if original is None:
            return
        claim, layers = read(original)
        layers = layers.copy()
        for _ in range(data.draw(st.integers(1, 2))):
            if data.draw(st.integers(0, 4)) == 0:
                layers.reshape(-1)[data.draw(st.integers(0, layers.size - 1))] += data.draw(st.integers(-3, 3))
                continue
            path = data.draw(st.sampled_from(list(values_in(claim))[1:]))
            node = claim
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = data.draw(STRANGE)
        try:
            changed = sealed(claim, layers)
        except (TypeError, AttributeError):  # the edit took away what the digests are written to
            return
        valid = check_bytes(changed).valid
        met["valid" if valid else "invalid"] += 1
        assert not valid or true_claim(changed)

    edit()
    assert met["invalid"] >= 100
    assert met["valid"] >= 1


@pytest.mark.parametrize("rule", RULES)
def test_no_forger_who_computes_as_the_checker_does_gets_a_false_claim_through(rule):
    met = Counter()
    for seed in range(160):
        data = forged(seed, rule)
        if data is not None:
            verdict = check_bytes(data)
            assert verdict.valid
            assert true_claim(data), seed
            met["certified" if verdict.certified else "not certified"] += 1
    assert met["certified"] >= 5
    assert met["not certified"] >= 15


OTHER_TYPES = {
    bool: [int, str],
    int: [float, str, bool],
    float: [int, str],
    str: [list],
    list: [lambda boxes: dict(enumerate(boxes))],
    dict: [sorted],
    type(None): [bool, str],
}


def retyped(data, path, other):
    """The file with the value at `path` as another type."""
    claim, layers = read(data)
    node = claim
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = other(node[path[-1]])
    return sealed(claim, layers)


@pytest.mark.parametrize("rule", RULES)
def test_no_entry_may_have_another_type(rule):
    """1.0, true and "1" are not 1, though Python says that some of them are equal."""
    data = min(honest_files(rule, 12), key=len)
    written = {("digests",), ("digest",), ("digests", "evidence"), ("shape",)}  # by whatever seals a file
    for path in list(values_in(read(data)[0]))[1:]:
        value = read(data)[0]
        for key in path:
            value = value[key]
        for other in [] if path in written or path[:1] in written - {("digests",)} else OTHER_TYPES[type(value)]:
            assert not check_bytes(retyped(data, path, other)).valid, (path, other)


@pytest.mark.parametrize("entry", ["evidence", "patch", "field", "margin", "digests", "defense"])
def test_a_list_of_names_is_no_set_of_entries(file, entry):
    claim, _ = read(file)
    _, array = verify._members(file)
    claim[entry] = sorted(claim[entry])
    claim["digest"] = verify.digest_of(claim)
    reason = check_bytes(verify.archive(verify.canonical(claim), array)).reason
    assert f"`{entry}` must have the entries" in reason or "`defense.name` must be" in reason


def test_every_limit_is_exact(monkeypatch):
    """A file is valid where its size is the limit, and invalid where the limit is one less."""
    files = list(honest_files("RobustMasking", 40))
    data = max((data for data in files if "/" in read(data)[0]["defense"]["threshold"]), key=len)
    claim, layers = read(data)
    pixels, grid = claim["source"], layers.shape[-2:]
    text, _ = verify._members(data)
    bounds = {
        "LARGEST_JSON": len(text),
        "LARGEST_EVIDENCE": layers.size,
        "LARGEST_GRID": grid[0] * grid[1],
        "LARGEST_AXIS": max(pixels),
        "LARGEST_FIELD": max(pixels[0] * grid[0], pixels[1] * grid[1]),
        "LARGEST_BOXES": max(len(claim["windows"]), len(claim["defense"]["masks"])),
        "LARGEST_DENOMINATOR": Fraction(claim["defense"]["threshold"]).denominator,
        "LARGEST_SUM": grid[0] * grid[1] * claim["units"]["high"] + 1,
    }
    for limit, most in bounds.items():
        with monkeypatch.context() as patched:
            patched.setattr(verify, limit, most)
            assert check_bytes(data).valid, limit
            patched.setattr(verify, limit, most - 1)
            assert not check_bytes(data).valid, limit
    monkeypatch.setattr(verify, "LARGEST_TAU", 1.0)
    assert check_bytes(with_tau()).valid
    monkeypatch.setattr(verify, "LARGEST_TAU", 0.9)
    assert not check_bytes(with_tau()).valid


def test_a_file_may_be_as_large_as_its_parts_together(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "LARGEST_JSON", 100)
    monkeypatch.setattr(verify, "LARGEST_EVIDENCE", 10)
    path = tmp_path / "file"
    path.write_bytes(bytes(100 + 80 + 1024))
    assert len(verify.load(path)) == 1204
    path.write_bytes(bytes(1205))
    with pytest.raises(verify.Refused, match="it is larger than 1204 bytes"):
        verify.load(path)


# -- what is left to check ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("certified", [True, False])
def test_a_valid_line_says_what_it_rests_on(certified):
    data = next(data for data in honest_files("ClippedSum", 10**4) if read(data)[0]["certified"] is certified)
    claim, _ = read(data)
    sentence = f"label {claim['label']} is {'' if certified else 'NOT '}certified against every "
    sentence += f"{claim['patch']['height']} x {claim['patch']['width']} patch"
    alone, against = check_bytes(data).reason, check_bytes(data, "").reason
    condition = "if the file's field and evidence are the network's (patchguard verify --model --image checks that)"
    assert alone.startswith(f"{sentence} {condition}, margin ")
    assert against.startswith(f"{sentence}, margin ")


# -- malformed files ---------------------------------------------------------------------------------------------------


def document(data: bytes, change) -> bytes:
    """The file with another text of certificate.json, in an archive that is otherwise right."""
    text, array = verify._members(data)
    return verify.archive(change(text), array)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(b'"format":1', b'"format":1,"format":1'),
        lambda text: text.replace(b'"format":1', b'"format": 1'),
        lambda text: text.replace(b'"format":1', b'"format":NaN'),
        lambda text: text.replace(b'"format":1', b'"format":Infinity'),
        lambda text: text.replace(b'"format":1', b'"format":1e999'),
        lambda text: text.replace(b'"format":1', b'"format":' + b"9" * 5000),
        lambda text: text.replace(b'"format":1', b'"format":' + b"[" * 10**5 + b"]" * 10**5),
        lambda text: b"[" * 10**6,
        lambda text: b"\xff" + text,
        lambda text: b"[]",
        lambda text: b"null",
        lambda text: b"",
        lambda text: b" " * (verify.LARGEST_JSON + 1),
    ],
)
def test_no_other_spelling_of_the_claim_is_read(file, change):
    assert not check_bytes(document(file, change)).valid


def test_an_archive_in_order_with_wrong_digests_is_invalid(file):
    """The checksums of the zip file are right: only SHA-256 notices."""
    claim, layers = read(file)
    text, array = verify._members(file)
    altered = array[:-8] + (layers.reshape(-1)[-1] ^ 1).astype("<i8").tobytes()
    assert "digest of its evidence does not match" in check_bytes(verify.archive(text, altered)).reason
    for entry, value in (("label", 1 - claim["label"]), ("digest", "0" * 64)):
        changed = verify.canonical(claim | {entry: value})
        assert "its digest does not match its contents" in check_bytes(verify.archive(changed, array)).reason
    for digest in ("0" * 63, "G" * 64, "A" * 64, 0, "0" * 65):
        changed = verify.canonical(claim | {"digest": digest})
        assert "64 hexadecimal digits" in check_bytes(verify.archive(changed, array)).reason


def test_an_archive_with_other_members_is_invalid(file, tmp_path):
    text, array = verify._members(file)
    for number, names in enumerate(
        [
            ("certificate.json", "evidence.npy"),
            ("certificate.json", "evidence.npy", "more.txt"),
            ("../certificate.json", "evidence.npy"),
            ("evidence.npy", "certificate.json"),
            ("certificate.json",),
            (),
        ]
    ):
        path = tmp_path / f"{number}.pgc"
        method = zipfile.ZIP_DEFLATED if number == 0 else zipfile.ZIP_STORED
        with zipfile.ZipFile(path, "w", method) as made:
            for name in names:
                made.writestr(name, array if name.endswith("npy") else text)
        assert "is not a zip file of" in check(path).reason


def test_the_archive_is_an_ordinary_zip_of_ordinary_files(file, tmp_path):
    with zipfile.ZipFile(io.BytesIO(file)) as opened:
        assert opened.testzip() is None
        assert tuple(opened.namelist()) == verify.MEMBERS
        assert {member.date_time for member in opened.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        loaded = np.load(io.BytesIO(opened.read("evidence.npy")), allow_pickle=False)
        assert json.loads(opened.read("certificate.json"))["shape"] == list(loaded.shape)
    np.testing.assert_array_equal(loaded, read(file)[1])


@pytest.mark.parametrize("header", [b"'<f8'", b"'|O' ", b"'>i8'"])
def test_evidence_of_another_type_is_invalid(file, header):
    claim, _ = read(file)
    _, array = verify._members(file)
    array = array.replace(b"'<i8'", header)
    claim["digests"]["evidence"] = hashlib.sha256(array).hexdigest()
    claim["digest"] = verify.digest_of(claim)
    assert "must be an array of 64-bit integers" in check_bytes(verify.archive(verify.canonical(claim), array)).reason


def test_evidence_of_another_shape_is_invalid():
    file = next(data for data in honest_files("RobustMasking", 10**4) if len(read(data)[0]["shape"]) == 3)
    claim, _ = read(file)
    _, array = verify._members(file)
    classes, rows, columns = claim["shape"]
    for shape, reason in (
        ([classes, rows, columns + 1], "must be an array of 64-bit integers"),
        ([classes, rows], "`shape` must be a list of 3 to 4"),
        ([1, rows, columns], "must be two classes or more"),
        ([2, classes, rows, columns], "three layers or one"),
        ([2, 1, verify.LARGEST_GRID + 1], "at most 131072 cells"),
        ([verify.LARGEST_EVIDENCE, 1, 2], "4194304 entries"),
    ):
        claim["shape"] = shape
        claim["digest"] = verify.digest_of(claim)
        assert reason in check_bytes(verify.archive(verify.canonical(claim), array)).reason


# -- the time a check takes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["windows", "masks"])
def test_the_same_cells_twice_are_refused(file, name):
    def repeat(claim, _):
        boxes = claim["windows"] if name == "windows" else claim["defense"]["masks"]
        boxes.append(list(boxes[0]))

    assert f"{name}` must not name the same cells twice" in check_bytes(edited(file, repeat)).reason


def test_a_circle_that_is_whole_has_one_name_wherever_it_starts():
    def whole(claim, layers):
        columns = layers.shape[-1]
        claim["wrap"] = [False, True]
        claim["windows"] = [[0, layers.shape[-2], start, start + columns] for start in starts]

    data = next(honest_files("ClippedSum", 1))
    starts = [1]
    assert "same cells" not in check_bytes(edited(data, whole)).reason
    starts = [0, 1]
    assert "must not name the same cells twice" in check_bytes(edited(data, whole)).reason


@pytest.mark.parametrize("size", largest_claims.USUAL, ids=str)
def test_files_of_usual_sizes_are_admitted(size):
    claim, layers = largest_claims.claim(*largest_claims.USUAL[size])
    *_, windows, _, patch = verify.admit(claim, layers)
    assert (len(windows.places), patch) == (len(claim["windows"]), "1 x 1")


def test_work_without_end_is_refused():
    for claim, layers in (
        largest_claims.claim(largest_claims.ROBUST, (1000, 26, 26), 1000, 441),
        largest_claims.claim(largest_claims.SHARE, (1000, 26, 26), 600, 441),
        largest_claims.claim(largest_claims.DOUBLE, (1000, 26, 26), 10, 600),
        largest_claims.claim(largest_claims.SUM, (1000, 26, 26), 2400),
    ):
        reason = check_bytes(sealed(claim, layers)).reason
        number, masks = len(claim["windows"]), len(claim["defense"].get("masks", []))
        assert f"too long to check {number} windows and {masks} masks on {layers.shape[0]} x " in reason


@pytest.mark.parametrize("limit", ["LARGEST_WORK", "LARGEST_TABLE"])
def test_positions_without_end_are_refused(limit, monkeypatch):
    claim, layers = largest_claims.claim({"name": "ClippedSum", "spatial": True}, (2, 3, 40), 100)
    claim["source"], claim["patch"] = [9, 2000], {"height": 2, "width": 20, "count": 1}
    claim["field"]["rows"] = {"starts": [0, 3, 6], "lengths": [3, 3, 3]}  # touched: 0, 0 1, 1, 1 2, 2
    claim["field"]["columns"] = {"starts": list(range(0, 2000, 50)), "lengths": [40] * 40}  # each alone, and next two
    most = {"LARGEST_WORK": (5 + 79) * verify.CALL + 5 * 79 * 100, "LARGEST_TABLE": 79 * 100}[limit]
    monkeypatch.setattr(verify.Sum, "work", lambda *_: 0)
    monkeypatch.setattr(verify, limit, most)
    assert "it claims another margin" in check_bytes(sealed(claim, layers)).reason
    monkeypatch.setattr(verify, limit, most - 1)
    assert "too long to compare 100 windows with 395 positions" in check_bytes(sealed(claim, layers)).reason


@pytest.mark.parametrize("limit", ["LARGEST_WORK", "LARGEST_TABLE"])
def test_the_bound_is_what_is_counted(limit, monkeypatch):
    claim, layers = largest_claims.claim(largest_claims.DOUBLE, (5, 1, 4), 3, 7)
    rule, windows = verify._rule(claim, (1, 4)), verify._boxes(claim["windows"], "windows", [False, False], (1, 4))
    most = {"LARGEST_WORK": rule.work(5, windows), "LARGEST_TABLE": 5 * 7}[limit]
    monkeypatch.setattr(verify, limit, most)
    assert "it claims another margin" in check_bytes(sealed(claim, layers)).reason
    monkeypatch.setattr(verify, limit, most - 1)
    assert "too long to check 3 windows and 7 masks on 5 x 1 x 4" in check_bytes(sealed(claim, layers)).reason


@pytest.mark.parametrize("rule", RULES)
def test_the_work_that_is_counted_is_the_work_that_is_done(rule, monkeypatch):
    done = Counter()
    sums, outside = verify.Boxes._sums, verify.Boxes.outside

    def counted_sums(boxes, maps):
        rows, columns = boxes.repeats
        done["entries"] += len(maps) * (rows * columns * maps[0].size + len(boxes.places))
        done["maps"] += len(maps)
        return sums(boxes, maps)

    def counted_outside(boxes, number, maps):
        done["copied"] += maps.size
        return outside(boxes, number, maps)

    monkeypatch.setattr(verify.Boxes, "_sums", counted_sums)
    monkeypatch.setattr(verify.Boxes, "outside", counted_outside)
    monkeypatch.setattr(verify, "CALL", 0)
    for data in honest_files(rule, 60):
        values, lower, upper, windows, proved, _ = verify.admit(*read(data))
        done.clear()
        proved.margins(proved.label(values), lower, upper, windows)
        number, few, cells = len(windows.places), 16 * done["maps"], windows.grid[0] * windows.grid[1]
        if rule == "RobustMasking":
            copied = number * (values.size // 2)
            least = done["entries"] + few + copied
            spared = 2 * number * len(values) * proved.masks._entries if proved.threshold == 1 else 0
        elif rule == "DoubleMasking":
            least, spared = done["entries"] + few + 2 * len(proved.masks.places) * (values.size // 2), 0
        else:
            assert done["entries"] == 0
            least, spared = done["copied"], 0 if proved.spatial else number * values.size
        assert proved.work(len(values), windows) == least + spared
        assert done["copied"] <= 2 * (proved.work(len(values), windows) + number * cells)


@pytest.mark.slow
@pytest.mark.parametrize("kind", largest_claims.WORST, ids=str)
def test_the_worst_file_that_is_admitted_is_checked_in_half_a_minute(kind):
    data = sealed(*largest_claims.worst(*largest_claims.WORST[kind]))
    begun = time.process_time()
    verdict = check_bytes(data)
    took = time.process_time() - begun
    assert "it claims another margin than the " in verdict.reason  # all windows were looked at
    assert took < 30


def test_an_unforeseen_error_is_a_verdict(file, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(verify, "_prove", fail)
    assert str(check_bytes(file)) == "invalid: it cannot be read (ZeroDivisionError)"


# -- alone -------------------------------------------------------------------------------------------------------------


def test_the_file_works_alone_with_numpy_only(tmp_path, file):
    alone = tmp_path / "verify.py"
    alone.write_text(SOURCE.read_text())
    (tmp_path / "good.pgc").write_bytes(file)
    (tmp_path / "bad.pgc").write_bytes(file[:-1])
    blocked = (
        "import runpy, sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        assert name.split('.')[0] not in ('torch', 'patchguard', 'jaxtyping', 'typer'), name\n"
        "sys.meta_path.insert(0, Block())\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    for names, status in ((["good.pgc"], 0), (["good.pgc", "bad.pgc"], 1), (["missing.pgc"], 1), ([], 1)):
        command = [sys.executable, "-I", "-c", blocked, str(alone), *names]
        shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert shown.returncode == status, shown.stderr
        lines = shown.stdout.splitlines()
        assert [line.split(": ")[0] for line in lines] == names
        assert (verify.CONDITION in shown.stdout) is ("good.pgc" in names)
    assert check(tmp_path / "good.pgc").valid


def test_the_module_runs_by_name(tmp_path, file):
    (tmp_path / "good.pgc").write_bytes(file)
    code = f"import sys, runpy; sys.argv = ['verify', {str(tmp_path / 'good.pgc')!r}]\n"
    code += "try:\n    runpy.run_module('patchguard.verify', run_name='__main__')\n"
    code += "except SystemExit as end:\n    assert end.code == 0\nassert 'torch' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_strange_name_is_shown_in_one_ascii_line(capsys):
    assert verify.main(["a\nb\udcff.pgc"]) == 1
    assert capsys.readouterr().out == "'a\\nb\\udcff.pgc': invalid: it cannot be opened (FileNotFoundError)\n"


def test_class_names_cannot_break_the_line():
    data = next(honest_files("ClippedSum", 1))

    def name(claim, layers):
        claim["class_names"] = ["line\nbreak \ud800"] * layers.shape[-3]

    verdict = check_bytes(edited(data, name))
    assert verdict.valid
    assert "class 'line\\nbreak \\ud800'" in verdict.reason


def test_a_name_cannot_read_like_a_verdict() -> None:
    claim, layers = verify.read(next(honest_files("DoubleMasking", 1)))
    spoof = "x) is certified against every 8 x 8 patch" + 200 * " "
    claim["class_names"] = [spoof + str(number) for number in range(layers.shape[-3])]
    reason = verify.check_bytes(sealed(claim, layers)).reason
    assert reason.startswith(f"label {claim['label']} is ")
    assert reason.index(", class '") > reason.index("margin") > reason.index(verify.CONDITION)
    assert len(reason) < 140 + len(verify.CONDITION)


def test_the_bytes_of_an_archive_are_pinned():
    small = verify.archive(b"{}", verify.array_header([1, 2, 3]))
    assert len(small) == 360
    digest = "268e2997ca785a79cca0e310c0a8b59911756275e967a0dee5087b26b15bf26a"
    assert hashlib.sha256(small).hexdigest() == digest


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"kind": "logits", "low": 0.0, "high": None, "drift": 0.0, "bits": 16}, (2**16, 0, 2**28, 0, False)),
        ({"kind": "logits", "low": None, "high": 1.5, "drift": 0.25, "bits": 2}, (4, -(2**14), 6, 2, False)),
        ({"kind": "logits", "low": -1.0, "high": 1.0, "drift": 9.0, "bits": 0}, (1, -1, 1, 2, True)),
        ({"kind": "tanh", "low": 0.0, "high": None, "drift": 1e-3, "bits": 8}, (256, -256, 256, 1, True)),
        ({"kind": "confidence", "low": 0.0, "high": None, "drift": 2.0**-8, "bits": 8}, (256, 0, 256, 2, True)),
        ({"kind": "vote", "low": 0.0, "high": None, "drift": 0.1, "bits": 16}, (1, 0, 1, None, True)),
    ],
)
def test_settings_of_evidence_mean_these_units(stated, expected):
    names = ("scale", "low", "high", "drift", "bounded")
    assert verify.units_of(stated) == dict(zip(names, expected, strict=True))


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_the_checker_explains_itself(capsys, word):
    assert verify.main([word]) == 0
    assert "python verify.py FILE..." in capsys.readouterr().out

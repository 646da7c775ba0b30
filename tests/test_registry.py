"""Defenses, attacks, models and datasets by name: the package's own, and those of installed packages."""

import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from patchguard import defenses, models
from patchguard.attacks import ATTACKS, Attack
from patchguard.attacks import build as build_attack
from patchguard.cli import app
from patchguard.data.catalog import CATALOG, TEST_SETS
from patchguard.data.source import open_source
from patchguard.defenses.base import Defense
from patchguard.defenses.evidence import Evidence
from patchguard.defenses.serialization import DEFENSES, defense_from_json, defense_to_json, find_defense
from patchguard.errors import InputError
from patchguard.geometry.preprocess import Preprocess
from patchguard.models import REGISTRY
from patchguard.patch import Patch
from patchguard.registry import Registry
from patchguard.storage import zoo

MODULE = '''
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

import torch
from patchguard import Evidence
from patchguard.attacks import Colors
from patchguard.attacks.base import Attack
from patchguard.data.source import Source
from patchguard.defenses import ClippedSum, Defense
from patchguard.models.base import IMAGENET_MEAN, IMAGENET_STD, LocalModel


@dataclass(frozen=True, kw_only=True)
class Graded(Defense):
    """A clipped sum with settings of every kind that a model file can hold."""

    weight: float = 0.5
    steps: int = 2
    strict: bool = True
    word: str = "mild"
    part: Fraction = Fraction(1, 3)
    default_evidence: ClassVar[Evidence] = Evidence(kind="tanh")

    def _predict(self, evidence):
        return ClippedSum()._predict(evidence)

    def _certify(self, evidence, windows, label, top_k):
        return ClippedSum()._certify(evidence, windows, label, top_k)


@dataclass(frozen=True, kw_only=True)
class Odd(Graded):
    table: dict = None


@dataclass(frozen=True, kw_only=True)
class Gray(Attack):
    """A gray patch."""

    tries: int = 1

    def run(self, *words, **settings):
        return Colors(tries=self.tries).run(*words, **settings)


class TinyNet(LocalModel):
    def __init__(self, classes: int) -> None:
        super().__init__(classes=classes, mean=IMAGENET_MEAN, std=IMAGENET_STD)
        self.convolution = torch.nn.Conv2d(3, classes, 5, stride=4)

    def local_logits(self, normalized):
        return self.convolution(normalized)

    def smallest_input(self):
        return 5, 5

    def config(self):
        return {"classes": self.classes}


def tiny_net(*, classes: int = 10):
    """Return a network of one layer.

    More words.
    """
    return TinyNet(classes)


def no_model():
    return "a model"


def gray_images(root: Path) -> Source:
    image = torch.full((3, 32, 32), 128, dtype=torch.uint8)
    return Source(("gray",), None, (), lambda index: image)


def no_images(root: Path):
    return [root]
'''


def install(folder: Path, package: str, entries: dict[str, dict[str, str]], module: str = "") -> None:
    """Write what pip would install: a module, and the entry points of its package."""
    about = folder / f"{package}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    sections = [
        "\n".join([f"[patchguard.{group}]", *(f"{name} = {value}" for name, value in named.items())])
        for group, named in entries.items()
    ]
    (about / "entry_points.txt").write_text("\n\n".join(sections) + "\n")
    if module:
        (folder / f"{package}.py").write_text(module)


@pytest.fixture
def added(tmp_path, monkeypatch):
    """A package with one entry of each kind, and some that are wrong."""
    install(
        tmp_path / "site",
        "extras",
        {
            "defenses": {
                "Graded": "extras:Graded",
                "Odd": "extras:Odd",
                "Renamed": "extras:Graded",
                "Gone": "extras:Gone",
                "Function": "extras:tiny_net",
            },
            "attacks": {"gray": "extras:Gray", "not_one": "extras:Graded"},
            "models": {"tiny_net": "extras:tiny_net", "no_model": "extras:no_model", "lost": "nowhere:lost"},
            "datasets": {"gray_images": "extras:gray_images", "no_images": "extras:no_images"},
        },
        MODULE,
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield tmp_path / "site"
    sys.modules.pop("extras", None)


# -- the package's own -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("registry", [DEFENSES, ATTACKS, REGISTRY, TEST_SETS], ids=lambda each: each.noun)
def test_every_own_entry_can_be_imported_and_would_be_accepted_from_anyone(registry) -> None:
    assert list(registry)[: len(registry.own)] == list(registry.own)
    for name in registry.own:
        assert registry.accept(name, registry[name])
        assert registry.package(name) == ""


def test_every_defense_of_the_package_and_every_known_dataset_is_registered() -> None:
    assert {*DEFENSES.own} == {*defenses.__all__} - {"Defense"}
    assert list(TEST_SETS.own) == list(CATALOG)
    assert all(issubclass(ATTACKS[name], Attack) for name in ATTACKS.own)


def test_names_that_nobody_registers_are_missing() -> None:
    assert "nonsense" not in DEFENSES
    assert DEFENSES.get("nonsense") is None
    with pytest.raises(KeyError):
        DEFENSES["nonsense"]
    with pytest.raises(InputError, match="Did you mean 'RobustMasking'"):
        find_defense("RobustMaskng")


# -- of other packages -------------------------------------------------------------------------------------------------


def test_a_package_on_the_path_adds_names_and_takes_them_with_it(added, monkeypatch) -> None:
    assert "Graded" in DEFENSES
    assert "Graded" in list(DEFENSES)
    assert DEFENSES.package("Graded") == "extras"
    assert "extras" not in sys.modules, "names are listed without an import"
    assert issubclass(find_defense("Graded"), Defense)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(added)])
    assert "Graded" not in DEFENSES


def test_an_added_defense_is_saved_and_read_with_all_its_settings(added) -> None:
    from extras import Graded

    defense = Graded(weight=2, steps=3, strict=False, word="strong")
    written = defense_to_json(defense)
    assert written == {
        "name": "Graded",
        "weight": 2.0,
        "steps": 3,
        "strict": False,
        "word": "strong",
        "part": "1/3",
    }
    assert defense_from_json(written) == defense
    with pytest.raises(InputError, match=r"`defense.steps` must be a whole number; got '3'"):
        defense_from_json({**written, "steps": "3"})


def test_a_setting_that_json_would_not_give_back_is_refused(added) -> None:
    with pytest.raises(InputError, match=r"`table` of Odd must be an int, float, bool, str, Fraction or Windows"):
        defense_to_json(find_defense("Odd")())


def test_a_defense_that_nobody_registers_cannot_be_saved_under_the_name_of_another(added) -> None:
    from extras import Graded

    class Median(Graded):
        pass

    with pytest.raises(InputError, match=r"`defense` must be registered to be saved; got Median"):
        defense_to_json(Median())


def test_an_added_attack_is_built_by_name_with_its_settings(added) -> None:
    assert build_attack("gray", tries=3) == ATTACKS["gray"](tries=3)
    with pytest.raises(InputError, match="the attack gray has the settings tries; got steps"):
        build_attack("gray", steps=3)
    with pytest.raises(InputError, match=r"'not_one' of the package extras .* must be a subclass of Attack"):
        build_attack("not_one")


def test_an_added_model_is_built_listed_and_needs_a_size(added) -> None:
    model = models.build("tiny_net", classes=4)
    assert (model.name, model.classes) == ("tiny_net", 4)
    listed = {entry.name: entry.description for entry in zoo.available()}
    assert listed["tiny_net"] == "a network of one layer"
    assert listed["lost"].startswith("not usable: the model 'lost' of the package extras (nowhere:lost) must be")
    with pytest.raises(
        InputError, match="does not say what images it is for; give the size of yours beside it: --size 224"
    ):
        zoo.usual_size("tiny_net")
    with pytest.raises(InputError, match="'no_model' must be a LocalModel; its function returned str"):
        models.build("no_model")


def test_a_guard_with_an_added_model_and_an_added_defense_is_saved_and_loaded(added, tmp_path) -> None:
    from extras import Graded

    guard = zoo.LocalGuard(Preprocess(), models.build("tiny_net", classes=4).eval(), Evidence(kind="tanh"), Graded())
    zoo.save(guard, tmp_path / "mine.safetensors")
    again = zoo.load(tmp_path / "mine.safetensors")
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert again.digest == guard.digest
    assert again.defense == guard.defense
    assert torch.equal(again.certify(images, Patch(4)).margin, guard.certify(images, Patch(4)).margin)


def test_an_added_dataset_is_opened_and_listed(added) -> None:
    source = open_source("gray_images")
    assert torch.equal(source.read(0), torch.full((3, 32, 32), 128, dtype=torch.uint8))
    with pytest.raises(InputError, match="'no_images' must open as a Source; its function returned list"):
        open_source("no_images")
    shown = CliRunner().invoke(app, ["data", "list"])
    assert shown.exit_code == 0
    (line,) = [line for line in shown.stdout.splitlines() if line.startswith("gray_images")]
    assert "added by the package extras" in line


# -- broken and clashing packages --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Gone", r"'Gone' of the package extras \(extras:Gone\) must be importable; got AttributeError"),
        ("Function", "must be a subclass of Defense, a frozen dataclass, with the name of its entry point; got <func"),
        ("Renamed", "must be a subclass of Defense, a frozen dataclass, with the name of its entry point"),
    ],
)
def test_a_broken_entry_is_refused_by_name_and_harms_no_other(added, name, message) -> None:
    with pytest.raises(InputError, match=message):
        find_defense(name)
    assert find_defense("Median") is defenses.Median


def test_a_package_that_fails_while_it_is_imported_is_named(tmp_path, monkeypatch) -> None:
    install(tmp_path, "torn", {"models": {"torn_net": "torn:net"}}, "raise OSError('no such weights')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match=r"package torn \(torn:net\) must be importable; got OSError: no such weights"):
        models.build("torn_net")
    shown = CliRunner().invoke(app, ["audit", "--model", "torn_net", "--size", "32"])
    assert shown.exit_code == 1
    assert len(shown.stderr.strip().splitlines()) == 1


def test_a_name_that_is_taken_twice_is_refused_with_both_homes(added, tmp_path, monkeypatch) -> None:
    install(tmp_path / "more", "rivals", {"defenses": {"Graded": "extras:Graded", "Median": "extras:Median"}})
    monkeypatch.syspath_prepend(str(tmp_path / "more"))
    with pytest.raises(InputError, match="comes from the package rivals and from the package extras"):
        find_defense("Graded")
    with pytest.raises(InputError, match="'Median' comes from patchguard itself and from the package rivals"):
        find_defense("Median")
    assert list(DEFENSES).count("Graded") == list(DEFENSES).count("Median") == 1
    assert len(DEFENSES) == len(set(DEFENSES))


def test_a_registry_of_the_same_group_sees_the_same_packages(added) -> None:
    again = Registry("attacks", {}, demand="anything", accept=lambda name, value: True)
    assert list(again) == ["gray", "not_one"]

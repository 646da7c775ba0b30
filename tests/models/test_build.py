import json

import pytest
import torch

from patchguard.errors import InputError
from patchguard.models import REGISTRY, LocalModel, build


@pytest.mark.parametrize("name", list(REGISTRY))
def test_a_model_is_rebuilt_from_its_name_and_settings(name):
    with torch.device("meta"):
        model = build(name, classes=7)
        settings = json.loads(json.dumps(model.config()))
        again = build(model.name, **settings)
    assert isinstance(model, LocalModel)
    assert settings["classes"] == 7
    assert again.config() == model.config()
    assert {key: value.shape for key, value in again.state_dict().items()} == {
        key: value.shape for key, value in model.state_dict().items()
    }


def test_settings_other_than_the_defaults_survive():
    settings = {"classes": 3, "field": 9, "stride": 2, "widths": [4, 8], "mean": [0.1, 0.2, 0.3]}
    model = build("srf", **settings)
    assert model.config() | settings == model.config()
    assert build("resnet50", width=0.1, stride_on="1x1").config()["stride_on"] == "1x1"


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(InputError, match=r"got 'bagnet18'\. Did you mean 'bagnet17'"):
        build("bagnet18")


def test_an_unknown_setting_gets_the_nearest_one():
    with pytest.raises(InputError, match=r"'srf' has no setting 'fields'\. Did you mean 'field'"):
        build("srf", fields=7)

import json

import pytest

from core.errors import ErrorKind, ServiceError
from server.api.models import ServedModel, list_reply, model_reply
from server.prompts import find_model
from tests.server.api.wire import sdk_reading

DEMO = ServedModel(id="demo", created_s=1_700_000_000, max_model_len=2048, description="demonstration model")
QWEN = ServedModel(id="qwen", created_s=1_700_000_001, max_model_len=32768)


def test_the_sdk_lists_the_models() -> None:
    with sdk_reading(list_reply([DEMO, QWEN], {})) as client:
        models = client.models.list().data
    assert [(model.id, model.object, model.created, model.owned_by) for model in models] == [
        ("demo", "model", 1_700_000_000, "steploop"),
        ("qwen", "model", 1_700_000_001, "steploop"),
    ]


def test_the_sdk_reads_one_model_with_our_additions() -> None:
    with sdk_reading(model_reply(DEMO, {})) as client:
        model = client.models.retrieve("demo")
    assert model.model_extra == {
        "tasks": ["generate"],
        "max_model_len": 2048,
        "description": "demonstration model",
    }


def test_only_the_demonstration_model_has_a_description() -> None:
    assert "description" not in json.loads(model_reply(QWEN, {}))


def test_an_unknown_model_is_refused_with_those_that_are_served() -> None:
    assert find_model([DEMO, QWEN], "qwen") is QWEN
    with pytest.raises(ServiceError, match=r"no model 'gpt'.*demo, qwen") as caught:
        find_model([DEMO, QWEN], "gpt")
    error = caught.value
    assert (error.kind, error.code, error.param) == (ErrorKind.NOT_FOUND, "model_not_found", "model")

"""The server's own description, and a fuzzer that believes it: no answer has a status that it does not name."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from safe_llm.server import ServerSettings, make_app
from safe_llm.server.openapi import description
from safe_llm.testing import scripted_ensemble
from server_support import ANSWERS, NAME

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
APP = make_app(
    scripted_ensemble(ANSWERS), ServerSettings(model_names=(NAME,), max_n=2, max_tokens_limit=4, max_prompt_chars=2000)
)
SCHEMA = schemathesis.openapi.from_dict(description())
SCHEMA.app = APP


def test_description_names_every_route_and_resolves_its_references():
    paths = {route.path for route in APP.routes} - {"/openapi.json"}
    assert set(description()["paths"]) == paths
    assert description()["components"]["schemas"].keys() >= {"ChatRequest", "ChatCompletion", "ErrorReply"}


@SCHEMA.parametrize()
@settings(
    max_examples=40,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_request_is_answered_with_what_is_not_described(case):
    if isinstance(case.body, dict) and "model" in case.body:  # or nothing but the model's name would be tested
        case.body["model"] = NAME
    case.call_and_validate(checks=CHECKS)


@pytest.mark.parametrize("name", ["ChatRequest", "CompletionRequest"])
def test_unknown_fields_are_described_as_refused(name):
    assert description()["components"]["schemas"][name]["additionalProperties"] is False

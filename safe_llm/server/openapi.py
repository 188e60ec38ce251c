"""The server's own description, made of the models that it checks requests with and writes replies with."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from safe_llm._version import __version__
from safe_llm.server.replies import ChatCompletion, Completion, ErrorReply, Health, ModelCard, ModelList, Reply
from safe_llm.server.schema import Body, ChatRequest, CompletionRequest

__all__ = ["description"]

_REFERENCE = "#/components/schemas/{model}"

_PROBLEMS = {
    400: "The request is not valid.",
    401: "No valid API key.",
    404: "No such model.",
    413: "The body is too long.",
    415: "The body is not JSON.",
    429: "Too many requests wait.",
    500: "Decoding failed.",
    503: "The server is closing, or out of memory.",
}


@cache
def description() -> dict[str, Any]:
    """Return the OpenAPI document."""
    requests: list[type[Body]] = [ChatRequest, CompletionRequest]
    replies: list[type[Reply]] = [ChatCompletion, Completion, ModelList, ModelCard, Health, ErrorReply]
    _, schemas = models_json_schema(
        [*((model, "validation") for model in requests), *((model, "serialization") for model in replies)],
        ref_template=_REFERENCE,
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "safe_llm", "version": __version__, "description": "Several models, used like one."},
        "paths": {
            "/v1/chat/completions": {"post": _generation("chat", ChatRequest, ChatCompletion)},
            "/v1/completions": {"post": _generation("complete", CompletionRequest, Completion)},
            "/v1/models": {"get": _reading("models", {200: ModelList})},
            "/v1/models/{name}": {
                "get": _reading("model", {200: ModelCard, 404: ErrorReply}),
                "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
            },
            "/health": {"get": _reading("health", {200: Health, 503: Health}) | {"security": []}},
            "/metrics": {"get": _metrics()},
        },
        "components": {"schemas": schemas["$defs"], "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _generation(name: str, request: type[Body], reply: type[Reply]) -> dict[str, Any]:
    events = {"text/event-stream": {"schema": {"type": "string"}}}
    answered = {"description": "The answer, or with `stream` its events.", "content": _content(reply) | events}
    return {
        "operationId": name,
        "requestBody": {"required": True, "content": _content(request)},
        "responses": {
            "200": answered,
            **{str(status): _response(text, ErrorReply) for status, text in _PROBLEMS.items()},
        },
    }


def _reading(name: str, replies: Mapping[int, type[Reply]]) -> dict[str, Any]:
    responses: dict[str, Any] = {"401": _response(_PROBLEMS[401], ErrorReply)}
    responses |= {str(status): _response(model.__name__, model) for status, model in replies.items()}
    return {"operationId": name, "responses": responses}


def _metrics() -> dict[str, Any]:
    text = {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    return {"operationId": "metrics", "responses": {"200": text, "401": _response(_PROBLEMS[401], ErrorReply)}}


def _response(text: str, model: type[Reply]) -> dict[str, Any]:
    return {"description": text, "content": _content(model)}


def _content(model: type[Body] | type[Reply]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REFERENCE.format(model=model.__name__)}}}

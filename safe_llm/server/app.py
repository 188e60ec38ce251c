"""The routes, and what holds for every request: the key, and that errors are OpenAI's."""

from __future__ import annotations

import hmac
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from safe_llm.ensemble import Ensemble
from safe_llm.server.endpoints import CHAT, COMPLETION, Endpoint, Generation, say_unexpected
from safe_llm.server.openapi import description
from safe_llm.server.problems import ApiError, problem_of
from safe_llm.server.replies import ModelCard, ModelList, Reply
from safe_llm.server.service import Service
from safe_llm.server.settings import ServerSettings

__all__ = ["make_app"]


def make_app(ensemble: Ensemble, settings: ServerSettings | None = None) -> Starlette:
    """Return an ASGI application that answers with `ensemble`; `app.state.service` has its state.

    Args:
        ensemble: Who answers. The app does not close it.
        settings: Limits and names; host and port mean nothing here.
    """
    service = Service(ensemble, settings or ServerSettings())
    routes = [_generation(service, endpoint) for endpoint in (CHAT, COMPLETION)]
    routes += [
        Route("/v1/models", _models(service), methods=["GET"]),
        Route("/v1/models/{name}", _model(service), methods=["GET"]),
        Route("/health", _health(service), methods=["GET"]),
        Route("/metrics", _metrics(service), methods=["GET"]),
        Route("/openapi.json", _openapi, methods=["GET"]),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(_Guard, service=service)],
        exception_handlers={HTTPException: _http_error, ApiError: _api_error},
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


# ---------------------------------------------------------------------- every request


class _Guard:
    """Lets in who has the key, and answers what nobody expected with a 500 that says nothing of its text."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        key = service.settings.api_key
        self._key = None if key is None else key.get_secret_value().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if not self._may_enter(scope):
            await _unauthorized().response()(scope, receive, send)
            return
        has_begun = False

        async def sending(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception as error:
            problem = problem_of(error)
            say_unexpected(error, problem)
            if not has_begun:
                await problem.response()(scope, receive, send)

    def _may_enter(self, scope: Scope) -> bool:
        if self._key is None or scope["path"] == "/health":
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, token = given.partition(b" ")
        # both are looked at, so that the time says nothing
        return (scheme.lower() == b"bearer") & hmac.compare_digest(token.strip(), self._key)


def _unauthorized() -> ApiError:
    return ApiError(
        401,
        "a valid API key is needed: Authorization: Bearer KEY",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


async def _http_error(_: Request, error: Exception) -> Response:
    """Answer for a route or a method that does not exist."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    text = {404: "there is nothing at this path", 405: "this path does not know this method"}
    headers: Any = getattr(error, "headers", None)
    return ApiError(status, text.get(status, "the request cannot be answered"), headers=headers).response()


async def _api_error(_: Request, error: Exception) -> Response:
    return problem_of(error).response()


# ---------------------------------------------------------------------- routes


def _generation(service: Service, endpoint: Endpoint[Any]) -> Route:
    async def respond(_: Request) -> Response:
        return Generation(service, endpoint)

    return Route(endpoint.path, respond, methods=["POST"])


def _models(service: Service) -> Any:
    async def respond(_: Request) -> Response:
        cards = [_card(service, name) for name in service.settings.model_names]
        return _json(ModelList(object="list", data=cards))

    return respond


def _model(service: Service) -> Any:
    async def respond(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in service.settings.model_names:
            raise ApiError(404, "no such model here; see /v1/models", param="model", code="model_not_found")
        return _json(_card(service, name))

    return respond


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=service.created,
        owned_by="safe_llm",
        max_model_len=service.ensemble.max_context,
        members=[member.name for member in service.ensemble.members],
    )


def _health(service: Service) -> Any:
    async def respond(_: Request) -> Response:
        health = service.health()
        return _json(health, status=200 if health.status == "ok" else 503)

    return respond


def _metrics(service: Service) -> Any:
    async def respond(_: Request) -> Response:
        return Response(service.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return respond


async def _openapi(_: Request) -> Response:
    return JSONResponse(description())


def _json(reply: Reply, *, status: int = 200) -> Response:
    return JSONResponse(reply.model_dump(mode="json", exclude_unset=True), status_code=status)

"""What went wrong with a request, in OpenAI's words: a status, and an `error` object."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import JSONResponse

from safe_llm.errors import (
    Cancelled,
    ConfigError,
    ContextOverflowError,
    GenerationError,
    MemberError,
    PromptError,
    SafeLLMError,
)

__all__ = ["ApiError", "closing", "problem_of"]

INVALID = "invalid_request_error"
SERVER = "server_error"


class ApiError(Exception):
    """A request that ends with an error.

    Attributes:
        status: HTTP status.
        kind: OpenAI's `type`.
        param: Which part of the request it is about, or None.
        code: OpenAI's `code`, or None.
        headers: Further headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def outcome(self) -> str:
        """What the metrics call it."""
        if self.status == 429:
            return "refused"
        return "rejected" if self.status < 500 else "failed"

    def as_dict(self) -> dict[str, object]:
        """Return the body."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """Return the whole response."""
        return JSONResponse(self.as_dict(), status_code=self.status, headers=self.headers)


def closing() -> ApiError:
    """Return what a request is told that comes, or still runs, when the server ends."""
    return ApiError(503, "the server is shutting down", kind=SERVER, code="shutting_down", headers={"Retry-After": "5"})


def problem_of(error: Exception, *, param: str | None = None) -> ApiError:
    """Return what a client is told about an error of the engine.

    Args:
        error: What was raised.
        param: Where the prompt stands in the request.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextOverflowError):
        return ApiError(400, str(error), param=param, code="context_length_exceeded")
    if isinstance(error, PromptError):
        return ApiError(400, str(error), param=param, code="invalid_prompt")
    if isinstance(error, ConfigError):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, Cancelled):
        return closing()
    if _is_out_of_memory(error):
        retry = {"Retry-After": "5"}
        return ApiError(503, "out of memory; try again", kind=SERVER, code="out_of_memory", headers=retry)
    if isinstance(error, MemberError):
        return ApiError(500, str(error), kind=SERVER, code="member_failed")
    what = type(error.__cause__ or error).__name__  # not its text, which may be anybody's
    reason = "decoding failed" if isinstance(error, GenerationError) else "the request failed"
    code = "generation_failed" if isinstance(error, SafeLLMError) else "internal_error"
    return ApiError(500, f"{reason}: {what}", kind=SERVER, code=code)


def _is_out_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's has its own class
            return True
        error = error.__cause__
    return False

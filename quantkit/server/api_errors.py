"""Errors as the HTTP API shows them: OpenAI's shape, one status each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


_LONGEST_ECHO = 500


def clipped(text: str) -> str:
    """`text`, its middle left out when it is long: what a client sent is not sent back to it, or logged, by the MB."""
    half = _LONGEST_ECHO // 2
    return text if len(text) <= _LONGEST_ECHO else f"{text[:half]}...{text[-half:]}"


class ApiError(Exception):
    """One request that gets an error instead of an answer.

    Args:
        status: the HTTP status.
        message: one line for the caller.
        param: the field at fault, where there is one.
        code: a machine-readable word, where one is customary.
        retry_after: seconds after which trying again makes sense.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after = status, code, retry_after
        self.message, self.param = clipped(message), None if param is None else clipped(param)

    @property
    def type(self) -> str:
        """OpenAI's word for the kind of error."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    @property
    def headers(self) -> Mapping[str, str]:
        """Response headers the status calls for."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status in (408, 413):  # the rest of the body is not waited for
            headers["Connection"] = "close"
        return headers | {"WWW-Authenticate": "Bearer"} if self.status == 401 else headers

    def body(self) -> dict[str, Any]:
        """`{"error": {...}}` as the API's clients expect it."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request itself must change."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, retry_after: int = 1) -> ApiError:
    """A 503: nothing wrong with the request, nobody to serve it now."""
    return ApiError(503, message, code="unavailable", retry_after=retry_after)


def too_late(message: str) -> ApiError:
    """A 504: the request's own deadline passed."""
    return ApiError(504, message, param="deadline_ms", code="deadline_exceeded")


def internal(message: str) -> ApiError:
    """A 500: ours to mend."""
    return ApiError(500, message)

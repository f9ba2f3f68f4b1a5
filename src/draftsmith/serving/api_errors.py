"""Errors as callers see them: OpenAI's shape, with the field that is to blame."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from draftsmith.errors import DraftsmithError

GONE = 499  # nobody reads it: the client has closed the connection
MOST_SHOWN = 200  # characters of a name that was sent
_INVALID, _SERVER = "invalid_request_error", "server_error"
_CLIENT_ERRORS = range(400, 500)
_NOT_FOUND = 404
# What the engine calls otherwise than the API.
_API_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "bad_words_ids": "bad_words",
    "stop_strings": "stop",
}
_LOG = logging.getLogger(__name__)


class ApiError(Exception):
    """A request that is not answered as asked.

    Args:
        status: HTTP status.
        message: What was found and what was expected.
        param: Dotted path of the field that is to blame.
        code: A word for programs.
        headers: Of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.param, self.code = param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The response."""
        kind = _INVALID if self.status in _CLIENT_ERRORS else _SERVER
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def response(self) -> JSONResponse:
        """The whole response."""
        return JSONResponse(self.body, self.status, headers=self.headers)


def refused_parameter(error: DraftsmithError) -> ApiError:
    """The engine's or the pair's refusal of a request."""
    kind, _, name = error.what.rpartition(" ")
    param = _API_NAMES.get(name, name) if kind == "sampling parameter" else None
    message = f"{param or error.what}: found {error.found}; expected {error.expected}"
    return ApiError(400, message, param=param)


def install(app: FastAPI) -> None:
    """Make every error of an app one of these."""

    @app.exception_handler(ApiError)
    async def _api(_: Request, error: ApiError) -> JSONResponse:
        return error.response

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return _validation(error.errors()).response

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        code = "not_found" if error.status_code == _NOT_FOUND else None
        return ApiError(error.status_code, message, code=code, headers=error.headers).response

    @app.exception_handler(Exception)
    async def _bug(_: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, ConnectionError):  # a client that has gone is no failure
            _LOG.error("event=request_failed", exc_info=error)
        return ApiError(500, "the server failed; its log says how").response


def _validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first of what a body was refused for."""
    first = errors[0]
    place = tuple(first["loc"][1:])
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is no JSON: {reason} at character {place[0]}")
    if first["type"] == "extra_forbidden":  # the last part is what was sent, however it is written
        param = ".".join([*_names(place[:-1]), str(place[-1])])[:MOST_SHOWN]
        return ApiError(400, f"{param}: this parameter is not supported", param=param)
    param = ".".join(_names(place)) or first.get("ctx", {}).get("param")
    return ApiError(400, f"{param or 'the body'}: {first['msg']}", param=param)


def _names(place: Sequence[str | int]) -> list[str]:
    """A path without the members of unions that are named in it: `str`, `list[int]`, `TextPart`."""
    shown = (p for p in place if isinstance(p, int) or (p.islower() and "[" not in p))
    return [str(part) for part in shown if part not in ("str", "int", "float", "bool")]

"""What can be wrong with a request, as an exception that knows its HTTP answer in the shape of the OpenAI API."""

from collections.abc import Mapping
from typing import Any

from slipstream.errors import CapacityError, ConfigError, RequestError, SlipstreamError, readable


class Problem(Exception):
    """status: of HTTP. param: the field of the request that is at fault. code: one word for programs.

    message: may quote a request of megabytes and goes into the log, so that it is cut like those of all errors.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(readable(message))
        self.status, self.message, self.code, self.param = status, str(self), code, param
        self.headers = dict(headers or {})

    def alone(self) -> "Problem":
        """Itself without the calls that it came by, which hold a prompt of megabytes until somebody collects garbage."""
        self.__cause__ = self.__context__ = None
        return self.with_traceback(None)

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def kind(self) -> str:
        """What the OpenAI API calls the type of an error."""
        return _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")


_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 504: "timeout_error"}


def problem_of(error: Exception, fields: Mapping[str, Any]) -> Problem:
    """The answer to a request that the engine refused; `fields` are those that a request of its kind has."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, RequestError | CapacityError):
        name = str(error).split(maxsplit=1)[0].rstrip(":,").partition(".")[0]
        name = "messages" if name == "prompt" and "messages" in fields else name  # what a prompt was made of
        code = error.code if isinstance(error, RequestError) else None
        return Problem(400, str(error), param=name if name in fields else None, code=code)
    if isinstance(error, ConfigError):  # a library that this server lacks
        return Problem(501, str(error), code="not_installed")
    if isinstance(error, SlipstreamError):
        return Problem(500, str(error), code="engine_error")
    raise error


def timed_out(seconds: float) -> Problem:
    return Problem(
        504, f"the answer was not complete after {seconds:g} s: the server ends requests then", code="timeout"
    )


def engine_failed(reason: str) -> Problem:
    return Problem(500, f"the engine failed and this request with it: {reason}", code="engine_error")


def unavailable(reason: str) -> Problem:
    return Problem(503, reason, code="unavailable", headers={"retry-after": "5"})


def queue_full(retry_after_s: int) -> Problem:
    message = f"the queue is full; try again in {retry_after_s} s"
    return Problem(429, message, code="queue_full", headers={"retry-after": str(retry_after_s)})


def too_slow() -> Problem:
    return Problem(408, "the client did not take its tokens, so the request was ended", code="slow_reader")


def client_gone() -> Problem:
    return Problem(499, "the client has closed the connection", code="client_gone")

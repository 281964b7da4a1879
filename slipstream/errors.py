"""Every error a user can cause, as one small tree.

SlipstreamError
├── ConfigError       an option is unknown, out of range, or has no effect     (exit code 2)
├── RequestError      a request asks for something that cannot be honoured     (exit code 2)
├── CheckpointError   a model folder or file is missing, malformed or unfit    (exit code 1)
├── CapacityError     the model, the cache or a request does not fit in memory (exit code 1)
└── EngineError       a step failed; the message says which stage              (exit code 1)

Messages name the thing and the remedy. Broken invariants are asserts, not members of this tree.
"""

_MOST_CHARACTERS, _LAST = 2000, 600  # of a message; what of its end is kept, where the remedy stands


class SlipstreamError(Exception):
    """Base of all errors that Slipstream raises on purpose.

    A message may quote a file or a request: it is cut to a length that can be read, and what would steer a terminal
    is spelled out.
    """

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(readable(str(message)))


def readable(text: str) -> str:
    """A message of bounded length and without what would steer a terminal."""
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[: _MOST_CHARACTERS - _LAST]} [...] {text[-_LAST:]}"
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


class ConfigError(SlipstreamError):
    """An option is unknown, out of range, contradicts another one, or would have no effect."""

    exit_code = 2


class RequestError(SlipstreamError):
    """A request that cannot be honoured as it stands; other requests are not disturbed.

    code: what an API calls the fault, where that is more than a value that is wrong.
    """

    exit_code = 2

    def __init__(self, message: str = "", code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class CheckpointError(SlipstreamError):
    """A model folder or file is missing, malformed, or does not fit its partner."""


class CapacityError(SlipstreamError):
    """Something does not fit into the memory it was given."""


class EngineError(SlipstreamError):
    """A step of the engine failed."""

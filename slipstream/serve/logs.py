"""The log: JSON, one object a line, on stderr. Of the server and, where that has a process of its own, of the engine."""

import json
import logging
import sys
import time
from typing import Any


def configure_logging(level: int | None = None) -> None:
    """level: also for all others, from that level on; None: they are left as they are."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name, lowest in (("slipstream.serve", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(lowest)
    if level is not None:
        logging.getLogger().handlers = [handler]
        logging.getLogger().setLevel(level)


class JsonFormatter(logging.Formatter):
    """Records as JSON lines; `extra={"fields": {...}}` are keys of their own."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(), "event": record.getMessage(), **getattr(record, "fields", {}),
        }  # fmt: skip
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)

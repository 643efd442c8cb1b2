"""Log lines on stderr, as text or as one JSON object each: set up once by a command. Never called from the libraries below."""

from __future__ import annotations

import json
import logging
import sys

from penstock.config import LogConfig, LogFormat


class JsonFormatter(logging.Formatter):
    """One object per line: time (ISO 8601, local with offset), level, logger, message, and the traceback if there is one."""

    default_msec_format = "%s.%03d"

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def set_up_logging(config: LogConfig) -> None:
    """Send every logger of the process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    if config.log_format == LogFormat.JSON:
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    level = logging.getLevelNamesMapping()[config.log_level.upper()]
    root.setLevel(level)
    # Its own words about processes and signals would only repeat ours.
    logging.getLogger("uvicorn").setLevel(max(level, logging.WARNING))

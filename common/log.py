"""Structured logs on standard error: one event with its fields per line, as text or as JSON."""

import logging
import sys
from typing import Any, Literal

import structlog


def configure_logs(role: str, form: Literal["text", "json"]) -> None:
    """Send the process's log lines to standard error, stamped with the role."""
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if form == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if form == "text" else "iso", utc=False),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    if form == "json":
        structlog.contextvars.bind_contextvars(role=role)


def get_logger(name: str) -> Any:
    """A logger whose methods take an event and its fields."""
    return structlog.get_logger(name)

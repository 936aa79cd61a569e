"""The one exception that users see, and what arguments of any kind are checked with.

The library raises ``ValueError`` for bad arguments.  What stops a command (a missing file, a foreign checkpoint, a
missing GPU) is a :class:`ResidualQuantError`: one sentence that says what is wrong and what to do about it.
"""

from typing import Any


class ResidualQuantError(Exception):
    """A problem that one sentence explains; the command line prints it and exits with code 2."""


def check_count(name: str, value: Any, least: int = 1, most: int | None = None) -> None:
    """Raises ValueError unless ``value`` is an integer of at least ``least`` and, where given, at most ``most``."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")


def check_index(name: str, value: Any, count: int) -> None:
    """Raises ValueError unless ``value`` is an integer from 0 to ``count - 1``."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
        raise ValueError(f"{name} must be an integer from 0 to {count - 1}, got {value!r}")


def check_type(name: str, value: Any, kind: type) -> None:
    """Raises ValueError unless ``value`` is a ``kind``."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, got {value!r}")

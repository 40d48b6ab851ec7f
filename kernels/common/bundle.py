"""A few named values that travel together through the roles of a kernel."""

from collections import namedtuple
from typing import Any


def bundle(**values: Any) -> Any:
    """An immutable record. A SimpleNamespace will not do: the tracer rebinds its attributes inside a branch, and the
    next branch then sees values that do not reach it.
    """
    return namedtuple("Bundle", values)(**values)

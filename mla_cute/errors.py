"""The one exception class of this package; all other errors are Python's own."""

from __future__ import annotations

from collections.abc import Iterable


class UnsupportedProblem(NotImplementedError):
    """No kernel serves the problem. `reasons` holds a (kernel, reason) pair for each kernel that was tried."""

    def __init__(self, message: str, reasons: Iterable[tuple[str, str]] = ()) -> None:
        self.reasons = tuple(reasons)
        super().__init__("\n".join([message, *(f"  {kernel}: {reason}" for kernel, reason in self.reasons)]))

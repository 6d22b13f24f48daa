"""A lock that what holds it can be copied and pickled with."""

import threading
from typing import Any


class OwnLock:
    """A re-entrant lock; copies and pickles begin with one of their own, which nobody holds."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnLock, ()

"""Old messages said once more (I5): whoever hears one must be none the wiser."""

import random
from typing import Any


class Echo:
    """Says an old message once more, now and then: it must change nothing."""

    def __init__(self, rng: random.Random, share: float) -> None:
        self._rng = rng
        self._share = share
        self._old: list[Any] = []
        self.count = 0

    def remember(self, item: Any) -> None:
        """Keep a message; the memory is short."""
        if self._share:
            self._old.append(item)
            if len(self._old) > 30:
                self._old.pop(self._rng.randrange(30))

    def draw(self) -> Any | None:
        """An old message, or mostly None."""
        if self._old and self._rng.random() < self._share:
            self.count += 1
            return self._rng.choice(self._old)
        return None

    def forget(self) -> None:
        """The link on which all this was said is over."""
        self._old.clear()

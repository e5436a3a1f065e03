"""The places that a listener has for connections, and the peers that are turned away."""

from __future__ import annotations

from collections import Counter

from ..config import Config


class Places:
    """One listener's. A place is given back when the connection, or the try, has ended."""

    def __init__(self, config: Config) -> None:
        self._most = config.max_connections
        self._most_per_host = config.max_connections_per_host
        self._taken: Counter[str] = Counter()

    def take(self, host: str) -> str | None:
        """Takes one for a peer of this host; the reason when there is none left for it."""
        if self._most is not None and self._taken.total() >= self._most:
            return f"the listener has as many connections as it takes ({self._most})"
        if self._most_per_host is not None and self._taken[host] >= self._most_per_host:
            return (
                f"the listener has as many connections with {host} as it takes "
                f"({self._most_per_host})"
            )
        self._taken[host] += 1
        return None

    def give_back(self, host: str) -> None:
        """Gives back what `take` took."""
        self._taken[host] -= 1
        if not self._taken[host]:
            del self._taken[host]

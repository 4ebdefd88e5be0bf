"""StopMatcher: finds stop strings in a text that arrives in pieces."""

from collections.abc import Sequence


class StopMatcher:
    """Passes text on until a stop string is complete, and holds back what may still become one.

    The stop string that is complete first wins; of several complete at the same character, the longest. So
    the cut does not depend on how the text was divided into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """The part of the text so far that is safe to show and was not returned yet."""
        if self.found:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        starts = ((text.find(stop), stop) for stop in self._stops)
        if ends := [(start + len(stop), start) for start, stop in starts if start >= 0]:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        shown = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[shown:]
        return text[:shown]

    def release(self) -> str:
        """The held-back text, when no more will come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)

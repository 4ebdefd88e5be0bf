"""Where has this been said before? An online suffix automaton over token ids.

Each state stands for the strings that end at the same places of the text; `link` leads to the longest of
their suffixes that ends at more places (Blumer et al. 1985, "The smallest automaton recognizing the subwords
of a text"; for several texts: Blumer et al. 1987). A token costs O(1) amortized, and n of them make at most
2n states.
"""

from array import array

ROOT = 0
NO_STATE = -1
# Token ids are 0 and above: these stand for none.
NO_TOKEN = -1
SEPARATOR = -2


class SuffixAutomaton:
    """Every substring of the texts read so far, and a recent place of each.

    Places are offsets into `text` just after an occurrence, where its continuation begins.

    Attributes:
        text: the tokens read, with a SEPARATOR after each text that was ended.
        match: the state of the longest suffix of the open text that occurred before, here or in an earlier
            text; ROOT where even its last token is new.
        match_end: where that earlier occurrence ended; without meaning at ROOT.
        lengths, links, ends: of each state, its longest string, its suffix link, and a place where it ended.
    """

    def __init__(self) -> None:
        self.text = array("i")
        self.match = ROOT
        self.match_end = 0
        self.lengths = array("i", [0])
        self.links = array("i", [NO_STATE])
        self.ends = array("i", [0])
        # Most states have one transition: it stands here. Those that branch have a dict of the others.
        self._tokens = array("i", [NO_TOKEN])
        self._targets = array("i", [NO_STATE])
        self._branches: dict[int, dict[int, int]] = {}
        self._last = ROOT

    @property
    def match_length(self) -> int:
        return self.lengths[self.match]

    @property
    def num_states(self) -> int:
        return len(self.links)

    def append(self, token: int) -> None:
        """Read the open text's next token."""
        self.text.append(token)
        known = self.follow(self._last, token)
        if known == NO_STATE:
            self._last = self._extend(token)
            self.match = self.links[self._last]
        else:  # an earlier text began like this one
            self._last = self.match = self._exactly(self._last, token, known)
        self.match_end = self.ends[self.match]
        self.ends[self.match] = len(self.text)

    def end_text(self) -> None:
        """What is read next begins another text."""
        self.text.append(SEPARATOR)
        self._last = self.match = ROOT

    def follow(self, state: int, token: int) -> int:
        """The state of a state's strings with `token` after them; NO_STATE if that never occurred."""
        if self._tokens[state] == token:
            return self._targets[state]
        branches = self._branches.get(state)
        return NO_STATE if branches is None else branches.get(token, NO_STATE)

    def is_branching(self, state: int) -> bool:
        """Whether different tokens followed a state's strings."""
        return state in self._branches

    def continuation(self, end: int, limit: int) -> list[int]:
        """Up to `limit` tokens that stand at `end` and after it in the same text."""
        tokens = self.text[end : end + limit].tolist()
        return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens

    def _extend(self, token: int) -> int:
        """A new state for the whole open text, reached from each of its suffixes that never went on so."""
        new = self._add(self.lengths[self._last] + 1, len(self.text))
        state = self._last
        while (known := self.follow(state, token)) == NO_STATE:
            self._connect(state, token, new)
            if state == ROOT:
                return new
            state = self.links[state]
        self.links[new] = self._exactly(state, token, known)
        return new

    def _exactly(self, state: int, token: int, target: int) -> int:
        """The state whose longest string is that of `state` with `token` after it.

        It is `target`, unless that has longer strings too: they end at fewer places from now on, so the
        others move to a clone.
        """
        length = self.lengths[state] + 1
        if self.lengths[target] == length:
            return target
        clone = self._add(length, self.ends[target])
        self.links[clone] = self.links[target]
        self.links[target] = clone
        self._tokens[clone] = self._tokens[target]
        self._targets[clone] = self._targets[target]
        if target in self._branches:
            self._branches[clone] = self._branches[target].copy()
        while state != NO_STATE and self.follow(state, token) == target:
            self._connect(state, token, clone)
            state = self.links[state]
        return clone

    def _add(self, length: int, end: int) -> int:
        self.lengths.append(length)
        self.links.append(ROOT)
        self.ends.append(end)
        self._tokens.append(NO_TOKEN)
        self._targets.append(NO_STATE)
        return len(self.links) - 1

    def _connect(self, state: int, token: int, target: int) -> None:
        """Make or move a transition."""
        if self._tokens[state] in (NO_TOKEN, token):
            self._tokens[state] = token
            self._targets[state] = target
        else:
            self._branches.setdefault(state, {})[token] = target


class Cursor:
    """Another text's longest suffix that occurs in an automaton, token by token, O(1) amortized.

    (Its lengths are the matching statistics of Chang and Lawler 1994.) The automaton may grow meanwhile:
    what was found stays true, but what was read before is not looked for in the new texts.
    """

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self.automaton = automaton
        self.length = 0
        self._state = ROOT

    @property
    def state(self) -> int:
        """The state that has the match: a clone may have taken it over since."""
        automaton = self.automaton
        while self._state != ROOT and self.length <= automaton.lengths[automaton.links[self._state]]:
            self._state = automaton.links[self._state]
        return self._state

    @property
    def end(self) -> int:
        """Where a recent occurrence of the match ended in the automaton's text."""
        return self.automaton.ends[self.state]

    def advance(self, token: int) -> None:
        automaton, state = self.automaton, self.state
        while (target := automaton.follow(state, token)) == NO_STATE:
            state = automaton.links[state]
            if state == NO_STATE:
                self._state, self.length = ROOT, 0
                return
            self.length = automaton.lengths[state]
        self._state = target
        self.length += 1

"""The reference's logits, computed once for all that are compared with it."""

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pagelet.models.errors import InputError
from pagelet.tools.evaluate import Logits, Scorer


class KeptLogits:
    """Another scorer's logits: computed when they are first asked for, read from a file after that.

    They are kept as float32, as they are: rounding them would add to every distance. A piece's file is
    mapped, so that no more than the rows in use stand in memory.
    """

    def __init__(self, scorer: Scorer, folder: Path) -> None:
        self._scorer = scorer
        self._folder = folder
        self.vocab_size = scorer.vocab_size

    def logits(self, token_ids: Sequence[int]) -> Logits:
        digest = hashlib.sha256(np.asarray(token_ids, np.int64).tobytes()).hexdigest()
        path = self._folder / f"{digest}.npy"
        if not path.exists():
            np.save(path, self._scorer.logits(token_ids))
        kept: Logits = np.load(path, mmap_mode="r")
        return kept


def check_room(folder: Path, tokens: int, vocab_size: int) -> None:
    """Refuse what would fill the disk half way through.

    Raises:
        InputError: the logits of that many tokens need more than the folder's disk has free.
    """
    needed, free = 4 * tokens * vocab_size, shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"the reference's logits for {tokens} tokens take {needed / 1e9:.1f} GB, {folder} has "
            f"{free / 1e9:.1f} GB free. Score fewer with --max-tokens, or name another disk's folder with "
            "--bundles."
        )

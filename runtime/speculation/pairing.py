"""Whether two bundles can work as draft and target; what does not fit is refused when they are opened."""

import json
from pathlib import Path
from typing import Any

from pagelet.models.errors import BundleError, InputError
from pagelet.models.manifest import Manifest
from pagelet.models.text.tokenizer import TOKENIZER_NAME


def check_pair(
    target: Path, target_manifest: Manifest, draft: Path, manifest: Manifest, context: int
) -> None:
    """Check a draft against a target that is used for up to `context` tokens.

    Raises:
        InputError: another target, another tokenizer, a larger vocabulary or a shorter context.
        BundleError: a tokenizer file that cannot be read.
    """
    if manifest.target != target_manifest.target:
        raise InputError(
            f"the draft {draft} is for the target {manifest.target!r}, {target} for "
            f"{target_manifest.target!r}; export both for the same."
        )
    if manifest.spec.vocab_size > target_manifest.spec.vocab_size:
        raise InputError(
            f"the draft {draft} has {manifest.spec.vocab_size} tokens, {target} only "
            f"{target_manifest.spec.vocab_size}; use a draft of the same family."
        )
    if manifest.spec.max_context < context:
        raise InputError(
            f"the draft {draft} has a context of {manifest.spec.max_context} tokens, the engine one of "
            f"{context}; set max_context to {manifest.spec.max_context} or use another draft."
        )
    _check_tokenizers(target / TOKENIZER_NAME, draft / TOKENIZER_NAME)


def _check_tokenizers(target: Path, draft: Path) -> None:
    """Token ids must mean the same: vocabulary, merges and special tokens."""
    try:
        ours, theirs = target.read_bytes(), draft.read_bytes()
        if ours == theirs:
            return
        first, second = json.loads(ours), json.loads(theirs)
        parts = zip(_parts(first).items(), _parts(second).values(), strict=True)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise BundleError(f"the tokenizers {target} and {draft} cannot be compared: {error!r}.") from error
    for (what, mine), other in parts:
        if mine != other:
            raise InputError(
                f"the draft has another tokenizer: {what} of {draft} and {target} differ "
                f"({len(other)} and {len(mine)} entries). A draft must be of the same family as the target."
            )


def _parts(document: dict[str, Any]) -> dict[str, Any]:
    model = document["model"]
    added = {token["id"]: (token["content"], token["special"]) for token in document["added_tokens"]}
    merges = [
        tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]
    ]
    return {"the vocabularies": model["vocab"], "the merges": merges, "the special tokens": added}

"""adapter_config.json as PEFT writes it: what of a LoRA changes the merge is known, or refused by name."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagelet.exporter.checkpoint.files import read_json
from pagelet.models.errors import CheckpointError, UnsupportedError
from pagelet.models.strict import require

CONFIG_FILE = "adapter_config.json"
MAX_RANK = 1 << 14
_MAX_ALPHA = 1e6
_KEYS = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "bias"),
    *("modules_to_save", "fan_in_fan_out", "init_lora_weights"),
)
# Of the training, or said by the tensors' names. `fan_in_fan_out` is of bases that store [in, out]: their
# weights are read as [out, in], so the product of both factors is not transposed for them.
_OF_TRAINING = (
    *("task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version"),
    *("lora_dropout", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("megatron_core", "qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
)
# Others (PiSSA, OLoRA, CorDA, LoftQ, …) change the base's weights before they are trained.
_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
# Patterns are regular expressions; only those that are the end of a module's name are read.
_PATTERN = re.compile(r"[\w.\-]{1,200}")


@dataclass(frozen=True)
class LoraConfig:
    """How the factors are merged: W + scaling · B A, with DoRA each output then of a given length.

    Attributes:
        rank, alpha: of modules without a pattern; by the end of a module's name of those with one.
        use_rslora: scaling is alpha / √rank, else alpha / rank.
        modules_to_save: ends of the names of modules that are replaced whole.
    """

    rank: int
    alpha: float
    use_rslora: bool
    use_dora: bool
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    modules_to_save: tuple[str, ...]

    def rank_of(self, module: str) -> int:
        return _matching(self.rank_pattern, module) or self.rank

    def scaling(self, module: str) -> float:
        """Hu et al. 2021 (LoRA), section 4.1; Kalajdzievski 2023 (rsLoRA)."""
        rank, alpha = self.rank_of(module), _matching(self.alpha_pattern, module)
        alpha = self.alpha if alpha is None else alpha
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def is_of(module: str, ending: str) -> bool:
    """Whether a module's name is `ending`, or ends in it behind a dot."""
    return module == ending or module.endswith("." + ending)


def _matching(pattern: Mapping[str, Any], module: str) -> Any:
    return next((value for ending, value in pattern.items() if is_of(module, ending)), None)


def read_config(folder: Path) -> LoraConfig:
    """The folder's adapter_config.json.

    Raises:
        CheckpointError: it is missing or damaged.
        UnsupportedError: another kind of adapter, or a setting that is not known.
    """
    where = str(folder / CONFIG_FILE)
    config = read_json(folder / CONFIG_FILE)
    _refuse_unknown(config, where)
    saved = config.get("modules_to_save") or []
    if not isinstance(saved, list) or not all(isinstance(name, str) for name in saved):
        raise CheckpointError(f"{where}: modules_to_save is {saved!r:.60}; expected a list of names.")
    ranks, alphas = _pattern(config, "rank", where), _pattern(config, "alpha", where)
    return LoraConfig(
        rank=_rank(config, "r", where),
        alpha=_alpha(config, "lora_alpha", where),
        use_rslora=_flag(config, "use_rslora", where),
        use_dora=_flag(config, "use_dora", where),
        rank_pattern={key: _rank(ranks, key, where) for key in ranks},
        alpha_pattern={key: _alpha(alphas, key, where) for key in alphas},
        modules_to_save=tuple(saved),
    )


def _refuse_unknown(config: dict[str, Any], where: str) -> None:
    """A setting that is off may be one of a newer PEFT; one that is on is known, or changes the merge."""
    kind = require(config, "peft_type", str, where, CheckpointError)
    if kind != "LORA":
        raise UnsupportedError(f"{where}: peft_type is {kind!r:.40}; this version merges 'LORA'.")
    for key, value in config.items():
        if key not in _KEYS + _OF_TRAINING and value not in (None, False, "", [], {}):
            raise UnsupportedError(f"{where}: {key[:40]} is {value!r:.60}; this version does not know it.")
    if config.get("init_lora_weights") not in _INITS:
        raise UnsupportedError(
            f"{where}: init_lora_weights is {config['init_lora_weights']!r:.40}, which changes the base's "
            "weights; convert the adapter to plain LoRA when you save it "
            "(PEFT: path_initial_model_for_weight_conversion)."
        )
    if config.get("bias") not in (None, "none", "all", "lora_only"):
        raise UnsupportedError(f"{where}: bias is {config['bias']!r:.40}; known: none, all, lora_only.")


def _flag(config: dict[str, Any], key: str, where: str) -> bool:
    """Files from before the feature do not have the key."""
    return bool(require({key: False} | config, key, bool, where, CheckpointError))


def _rank(values: dict[str, Any], key: str, where: str) -> int:
    rank = require(values, key, int, where, CheckpointError)
    if not 1 <= rank <= MAX_RANK:
        raise CheckpointError(f"{where}: {key} is {rank}; expected a rank from 1 to {MAX_RANK}.")
    return int(rank)


def _alpha(values: dict[str, Any], key: str, where: str) -> float:
    alpha = require(values, key, (int, float), where, CheckpointError)
    if not abs(alpha) <= _MAX_ALPHA:
        raise CheckpointError(f"{where}: {key} is {alpha}; expected at most {_MAX_ALPHA:g}.")
    return float(alpha)


def _pattern(config: dict[str, Any], kind: str, where: str) -> dict[str, Any]:
    """`rank_pattern` or `alpha_pattern`; empty where there is none."""
    pattern = config.get(kind + "_pattern") or {}
    if not isinstance(pattern, dict):
        raise CheckpointError(f"{where}: {kind}_pattern is {pattern!r:.60}; expected an object.")
    for key in pattern:
        if not _PATTERN.fullmatch(key):
            raise UnsupportedError(
                f"{where}: {kind}_pattern has {key!r:.60}; this version reads names and their ends alone."
            )
    return pattern

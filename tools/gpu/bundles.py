"""A bundle on this device: that it is whole and computes what it should, what it says, and how fast."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pagelet.models.certificate import GoldenPrompt, load_certificate
from pagelet.models.manifest import check_files, load_manifest
from pagelet.runtime import Completion, Engine, EngineConfig, SamplingParams
from pagelet.runtime.verification import ROUNDED_TOLERANCE, replay
from pagelet.tools.gpu.report import Figure, Row, Status

NEW_TOKENS = 64
PROMPT_TOKENS = 512
PROMPT = "Why is the sky blue?"
_FILLER = "The moon pulls the water of the seas, and twice a day the tide comes in and goes out again. "
# Of a backend's own estimate by how much a logit differs with what else is in a step: it was not measured.
_NOISES = 4


def check_bundle(bundle: Path) -> Row:
    """Files and golden prompts, as `pagelet verify` does it."""
    manifest = load_manifest(bundle)
    check_files(bundle, manifest, weights=True)
    found = replay(bundle, manifest)
    figures: dict[str, Figure] = {
        "status": found.status,
        "deviation": found.deviation,
        "tolerance": found.tolerance,
        "agreement": found.agreement,
        "certified_agreement": found.certified_agreement,
    }
    detail = f"{manifest.target}, {found.status}: it {found.explanation}"
    status: Status = "failed" if found.status == "broken" else "ok"
    return Row(f"bundle/{bundle.name}/verify", status, detail, figures=figures)


def check_generation(bundle: Path, new_tokens: int = NEW_TOKENS) -> Row:
    """Greedy text, its speed, and whether decoding and prefill agree about it."""
    config = EngineConfig(speculate="off", prefix_cache=False)
    params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    with Engine.open(bundle, config) as engine:
        text = engine.generate(_prompt(engine), params).text  # what is made once, is made now
        room = engine.max_context - new_tokens
        filler = engine.tokenizer.encode(_FILLER, add_bos=False)
        prompt = (filler * (PROMPT_TOKENS // len(filler) + 1))[: min(PROMPT_TOKENS, room)]
        engine.generate(prompt, params)
        done = engine.generate(prompt, params)
        shortfall = _shortfall(engine, prompt, done)
        allowed = _NOISES * engine._loop.backend.row_noise
        problems, agreed, golden = _golden(engine, bundle)
    if not shortfall <= allowed:  # nor is NaN
        problems.append(
            f"decoding chose a token whose logit is {shortfall:.3g} below the largest that prefill computes; "
            f"{allowed:.2g} is allowed"
        )
    first, rate = done.timings.time_to_first_token, done.timings.decode_tokens_per_second
    figures: dict[str, Figure] = {
        "prefill_tokens_per_second": len(prompt) / first if first else None,
        "decode_tokens_per_second": rate,
        "shortfall": shortfall,
        "golden_agreed": agreed,
        "golden": golden,
        "text": text,
    }
    detail = (
        f"{len(prompt)} prompt tokens at {len(prompt) / (first or np.inf):.0f}/s, {len(done.token_ids)} new "
        f"ones at {rate or 0:.1f}/s; {agreed} of {golden} golden prompts go on as at the export; "
        f"it says {text[:60]!r}"
    )
    return Row(
        f"bundle/{bundle.name}/generate",
        "failed" if problems else "ok",
        "; ".join(problems) or detail,
        figures=figures,
    )


def _prompt(engine: Engine) -> str | list[dict[str, str]]:
    return [{"role": "user", "content": PROMPT}] if engine.tokenizer.has_chat_template else PROMPT


def _shortfall(engine: Engine, prompt: list[int], done: Completion) -> float:
    """How far the logits of the tokens that decoding chose are below the largest, in one prefill of all."""
    tokens = list(done.token_ids)
    logits = engine.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    chosen = np.take_along_axis(logits, np.array(tokens)[:, None], axis=1)[:, 0]
    return float((logits.max(axis=1) - chosen).max())


def _golden(engine: Engine, bundle: Path) -> tuple[list[str], int, int]:
    """What is wrong with the tokens after the golden prompts; how many are as at the export, and of how many.

    One may differ where the exporter's own choice was a close one.
    """
    certificate = load_certificate(bundle, load_manifest(bundle))
    prompts = [
        prompt
        for prompt in (certificate.golden if certificate else ())
        if prompt.position_ids == tuple(range(len(prompt.token_ids)))
    ]
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    found = [engine.generate(list(prompt.token_ids), params).token_ids[0] for prompt in prompts]
    agreed = sum(token == prompt.top[-1].ids[0] for token, prompt in zip(found, prompts, strict=True))
    problems = [
        f"golden prompt {index} goes on with token {token}, at the export with {prompt.top[-1].ids[0]}, "
        "which was far ahead"
        for index, (token, prompt) in enumerate(zip(found, prompts, strict=True))
        if not _is_close(token, prompt)
    ]
    return problems, agreed, len(prompts)


def _is_close(token: int, prompt: GoldenPrompt) -> bool:
    """Whether arithmetic of another device may choose this token after a prompt."""
    top = prompt.top[-1]
    logits = np.array(top.logits)
    allowed = ROUNDED_TOLERANCE[1] * float(np.sqrt(np.square(logits).mean()))
    logit = dict(zip(top.ids, top.logits, strict=True)).get(token, float(logits.min()))
    return token == top.ids[0] or top.logits[0] - logit <= allowed

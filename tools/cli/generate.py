"""`pagelet generate`: write text from a prompt."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pagelet.models.errors import InputError
from pagelet.runtime import Completion, Engine
from pagelet.tools.cli import common


def add_parsers(commands: Any) -> None:
    parser = commands.add_parser("generate", help="write text from a prompt", description=__doc__)
    common.add_engine_options(parser)
    common.add_speculation_options(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument(
        "--prompt", metavar="TEXT", help="goes through the bundle's chat template, if it has one"
    )
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="the same, from a UTF-8 file")
    prompt.add_argument("--messages", type=Path, metavar="FILE", help='JSON: [{"role": …, "content": …}, …]')
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    parser.add_argument("--raw", action="store_true", help="the prompt as it is, without the chat template")
    common.add_sampling_options(parser)
    parser.add_argument(
        "--stream", action=argparse.BooleanOptionalAction, default=True, help="show text as it comes"
    )
    parser.add_argument(
        "--logprobs", type=int, metavar="N", help="with --json: of each token, and the N likeliest"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    if args.logprobs is not None and not args.json:
        raise InputError("--logprobs is printed with --json only; add --json.")
    if args.system and (args.raw or args.messages):
        raise InputError(
            "--system belongs to --prompt and --prompt-file through a chat template, not to this."
        )
    params = common.sampling_params(args)
    text = common.read_text(args.prompt_file) if args.prompt_file else args.prompt
    messages = common.read_messages(args.messages) if args.messages else None
    with common.open_engine(args, **common.speculation(args)) as engine:
        prompt = messages or build_prompt(engine, text, system=args.system, raw=args.raw)
        if args.json or not args.stream:
            completion = engine.generate(prompt, params)
            print(json.dumps(completion.to_json(), ensure_ascii=False) if args.json else completion.text)
            return
        completion = show(engine, prompt, params)
        print(f"\n{speed(completion)}", file=sys.stderr)
        if args.draft and not completion.usage.drafted_tokens:
            why = engine.stats().speculation_failure or "its guesses were not expected to pay"
            print(f"the draft was not used: {why}", file=sys.stderr)


def build_prompt(engine: Engine, text: str, *, system: str | None = None, raw: bool = False) -> Any:
    """Messages where the bundle has a chat template, else the text itself."""
    if raw:
        return text
    if not engine.tokenizer.has_chat_template:
        if system:
            raise InputError("this bundle has no chat template, so a system message has no place in it.")
        return text
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": text}]


def show(engine: Engine, prompt: Any, params: Any) -> Completion:
    """Print the text as it comes; the finished completion."""
    request = engine.submit(prompt, params)
    try:
        for chunk in request:
            print(chunk.text, end="", flush=True)
    finally:
        request.cancel()
    print()
    return request.result()


def speed(completion: Completion) -> str:
    usage, timings = completion.usage, completion.timings
    first, rate = timings.time_to_first_token or 0.0, timings.decode_tokens_per_second or 0.0
    guessed = f", {usage.accepted_tokens} of them guessed ahead" if usage.accepted_tokens else ""
    return (
        f"{usage.prompt_tokens} prompt + {usage.completion_tokens} new tokens{guessed}, "
        f"first after {first:.2f} s, then {rate:.1f} tokens/s "
        f"({completion.finish_reason})"
    )

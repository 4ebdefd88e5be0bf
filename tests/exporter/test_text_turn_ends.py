"""A turn ends where the chat template ends it; published templates are there after `make tokenizers`."""

import pytest
from vocabularies import LLAMA_CPP, fetched

from pagelet.exporter.text.turn_ends import turn_ends

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TURN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (TURN + "<|stop|>\n{% endfor %}", ["<|stop|>"]),
        (TURN + "\n</s>{% endfor %}", ["</s>"]),
        (TURN + "{{ eos_token }}<|other|>{% endfor %}", ["</s>"]),
        (TURN + "{% if not loop.last %}<|stop|>{% endif %}{% endfor %}", ["<|stop|>"]),
        # The next turn ends it, where nothing else does.
        (TURN + "{% endfor %}", ["<|user|>"]),
        (TURN + " Bye.{% endfor %}", []),
        (TURN + "<|no token|>{% endfor %}", []),
        # One message of a turn in two parts: what parts them is no end of it.
        (TURN.replace("}}|>", "}}|>{{ m.thinking }}<|stop|>") + "<|stop|>{% endfor %}", []),
        ("{{ raise_exception('no') }}<|im_end|>", ["<|im_end|>"]),
        (
            "{% if tools %}<|eom_id|>{% endif %}" + TURN + "<|eot_id|>{% endfor %}",
            ["<|eom_id|>", "<|eot_id|>"],
        ),
        ("{% broken", []),
    ],
)
def test_a_template_shows_its_end(template: str, ends: list[str]) -> None:
    names = ["<|user|>", "<|assistant|>", "<|stop|>", "<|other|>", "</s>", "\n"]
    assert turn_ends(template, SPECIAL, [*names, "<|im_end|>", "<|eom_id|>", "<|eot_id|>"]) == ends


PUBLISHED = {
    "Apertus-8B-Instruct": ["<|assistant_end|>"],
    "ByteDance-Seed-OSS": ["<seed:eos>"],
    "CohereForAI-c4ai-command-r-plus-tool_use": ["<|END_OF_TURN_TOKEN|>"],
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ["<|END_OF_TURN_TOKEN|>"],
    "GLM-4.6": ["<|user|>"],
    "HuggingFaceTB-SmolLM3-3B": ["<|im_end|>"],
    "LFM2-8B-A1B": ["<|im_end|>"],
    "MiniMax-M2": ["[e~["],
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ["<|im_end|>"],
    "Qwen-Qwen3-0.6B": ["<|im_end|>"],
    "deepseek-ai-DeepSeek-V3.1": ["<｜end▁of▁sentence｜>"],
    "google-gemma-2-2b-it": ["<end_of_turn>"],
    "google-gemma-4-31B-it": ["<|tool_response>", "<turn|>"],
    "ibm-granite-granite-3.3-2B-Instruct": ["<|end_of_text|>"],
    "ibm-granite-granite-4.0": ["<|end_of_text|>"],
    "meta-llama-Llama-3.1-8B-Instruct": ["<|eom_id|>", "<|eot_id|>"],
    "meta-llama-Llama-3.2-3B-Instruct": ["<|eot_id|>"],
    "microsoft-Phi-3.5-mini-instruct": ["<|end|>"],
    "mistralai-Mistral-Nemo-Instruct-2407": ["</s>"],
    "openai-gpt-oss-120b": ["<|call|>", "<|return|>"],
    "tencent-Hy3": ["<｜hy_eos:opensource｜>"],
}
MARKUP = sorted(
    {end for ends in PUBLISHED.values() for end in ends}
    | {"<|end|>", "<|user|>", "<|assistant|>", "<|start|>", "<|channel|>", "<|message|>", "<|user_start|>"}
    | {
        "<|END_RESPONSE|>",
        "<|START_OF_TURN_TOKEN|>",
        "<|CHATBOT_TOKEN|>",
        "<|START_RESPONSE|>",
        "<s>",
        "</s>",
    }
    | {"<|im_start|>", "<｜hy_User:opensource｜>", "<|tool_call>", "<tool_call|>", "<|turn>", "\n"}
)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates_show_the_end_of_their_turns(name: str) -> None:
    path = fetched(f"{LLAMA_CPP}/models/templates") / f"{name}.jinja"
    assert turn_ends(path.read_text(encoding="utf-8"), SPECIAL, MARKUP) == PUBLISHED[name]

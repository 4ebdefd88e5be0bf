"""ChatTemplate: a bundle's Jinja template, run in a sandbox as transformers runs it.

A template is code from whoever made the model. The sandbox keeps it from Python's internals, the data it
sees is plain, and what it writes, makes and does is bounded (`template_sandbox`).
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pagelet.models.errors import InputError
from pagelet.models.text.messages import checked_messages, joined_parts, plain

if TYPE_CHECKING:
    import jinja2


class ChatTemplate:
    """Messages in, the prompt's text out."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens`: variables that the template may use, `bos_token` and the like."""
        self._source = source
        self._special_tokens = dict(special_tokens or {})

    def variables(
        self,
        messages: object,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **others: Any,
    ) -> dict[str, Any]:
        """The template's variables, checked and plain; contents in parts are joined if it can't read parts.

        Raises:
            InputError: messages, tools or variables of the wrong form.
        """
        checked = checked_messages(messages)
        listed = tools is None or isinstance(tools, (list, tuple))
        if not listed or not all(isinstance(tool, Mapping) for tool in tools or ()):
            raise InputError(f"tools is {tools!r:.80}; expected a list of JSON objects, one per tool.")
        if any(isinstance(message.get("content"), list) for message in checked) and not self._reads_parts:
            checked = joined_parts(checked)
        return {
            **plain({"documents": None, **others}, "template variables"),
            "messages": checked,
            "tools": plain(tools, "tools"),
            "add_generation_prompt": bool(add_generation_prompt),
        }

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text for `variables`, equal to transformers' `apply_chat_template(tokenize=False)`.

        Raises:
            InputError: the template raised (its message is in the error's), or used too much:
                characters, steps or time.
            BundleError: the template is not valid Jinja.
        """
        from pagelet.models.text.template_environment import render

        return render(self._template, {**self._special_tokens, **variables})

    @cached_property
    def _template(self) -> "jinja2.Template":
        """Compiled when it is first used: Jinja takes longer to import than raw text to answer."""
        from pagelet.models.text.template_environment import compile_template

        return compile_template(self._source)

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template renders a list of text parts as their text, found by trying."""
        probe = [{"role": "user", "content": [{"type": "text", "text": "probe"}]}]
        variables = {"messages": probe, "tools": None, "documents": None, "add_generation_prompt": False}
        try:
            text = self.render(variables)
        except InputError:
            return False
        return "probe" in text and "'text'" not in text and '"text"' not in text

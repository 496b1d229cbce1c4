"""Chat templates: programs of a checkpoint that render messages to the text of a prompt."""

import re
import time
from collections.abc import Mapping
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

from mmvllm.errors import RequestError
from mmvllm.inputs import MediaRules
from mmvllm.utils.text import shown
from mmvllm.utils.time_limit import TimeIsOver, Watchdog

SECONDS = 10.0  # for a template to render messages
WITH_PROMPT = MappingProxyType({"add_generation_prompt": True})

ROLES = frozenset(("system", "user", "assistant", "tool"))  # every template is assumed to write messages of these roles
_PROBE = "4815162342.{}."  # added to a message to check whether the template writes it, in upper or lower case

_WATCHDOG = Watchdog()
_PARTS = ({"type": "image"}, {"type": "text", "text": "What is this?"})


class ChatTemplate:
    """The chat template of a tokenizer or of a processor.

    Args:
        owner: the tokenizer or processor, which has transformers' `apply_chat_template`.
        rules: the rules of the model's family; None for a text-only checkpoint, whose templates take strings.
        text: a template that replaces the owner's.
    """

    def __init__(self, owner: Any, rules: MediaRules | None, text: str | None = None):
        self._owner, self._rules = owner, rules
        self._own = {} if text is None else {"chat_template": text}
        self._seconds_left = SECONDS  # for all renderings of a request's template

    def replaced_by(self, text: str) -> "ChatTemplate":
        """Return the chat template with another text for the same model."""
        return ChatTemplate(self._owner, self._rules, text)

    @property
    def reads_tools(self) -> bool:
        """Whether the template mentions tools."""
        template = self._own.get("chat_template") or getattr(self._owner, "chat_template", None) or ""
        templates = template.values() if isinstance(template, dict) else [template]
        return any(re.search(r"\btools\b", one) for one in templates)

    @cached_property
    def takes_parts(self) -> bool:
        """Whether message content may be a list of parts: false if images reach the prompt only within strings.

        Raises RequestError for a template that takes too long.
        """
        if self._rules is None:
            return False
        user = {"role": "user", "content": list(_PARTS)}
        system = {"role": "system", "content": "Be brief."}  # which some templates demand, and others refuse
        conversations = ([user], [system, user])
        in_strings = [[*map(self._as_string, one)] for one in conversations]
        return any(map(self._writes_image, conversations)) or not any(map(self._writes_image, in_strings))

    def render(self, messages: list[dict], kwargs: Mapping[str, Any], options: Mapping[str, Any] = WITH_PROMPT) -> str:
        """Return the text of a prompt; `options` are arguments of `apply_chat_template`, `kwargs` of the template.

        Raises RequestError for a template that is missing, refuses, takes too long, or leaves out a message because of
        its role.
        """
        what = "these messages and chat_template_kwargs" if kwargs else "these messages"
        given = messages if self.takes_parts else [*map(self._as_string, messages)]
        try:
            keys = {**options, **kwargs}
            text = self._apply(given, keys)
            self._check_roles(given, keys)
            return text
        except RequestError:
            raise
        except Exception as error:  # templates are programs, and raise anything
            raise RequestError(f"the chat template cannot render {what}: {error}") from error

    def _check_roles(self, messages: list[dict], keys: Mapping[str, Any]) -> None:
        """Raise RequestError for a role other than `ROLES` whose messages the template leaves out."""
        probes = {i: _PROBE.format(i) for i, message in enumerate(messages) if message["role"] not in ROLES}
        if not probes:
            return
        probed = [_with_text(message, probes[i]) if i in probes else message for i, message in enumerate(messages)]
        text = self._apply(probed, keys)
        for i, probe in probes.items():
            if probe not in text:
                message = f"the chat template leaves out messages with the role {shown(messages[i]['role'], 100)}"
                raise RequestError(f"{message}; use one of {', '.join(sorted(ROLES))}", param="messages")

    def _apply(self, messages: list[dict], keys: Mapping[str, Any]) -> str:
        apply = partial(self._owner.apply_chat_template, messages, tokenize=False, **self._own, **keys)
        begin = time.monotonic()
        try:
            return _WATCHDOG.run(apply, max(0.0, self._seconds_left))
        except TimeIsOver:
            raise RequestError(f"the chat template takes longer than {SECONDS:g} s to render messages") from None
        finally:
            if self._own:
                self._seconds_left -= time.monotonic() - begin

    def _writes_image(self, messages: list[dict]) -> bool:
        try:
            return self._rules.image in self._apply(messages, WITH_PROMPT)
        except RequestError:
            raise
        except Exception:  # for example, a list is added to a string
            return False

    def _as_string(self, message: dict) -> dict:
        """Return the message with its parts joined to a string."""
        content = message["content"]
        return message if isinstance(content, str) else {**message, "content": "".join(map(self._text_of, content))}

    def _text_of(self, part: dict) -> str:
        """Return a part in the format of the family's templates."""
        if part["type"] == "text":
            return part["text"]
        return self._rules.start + getattr(self._rules, part["type"]) + self._rules.end


def _with_text(message: dict, text: str) -> dict:
    """Return the message with a text appended."""
    content = message["content"]
    content = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return {**message, "content": content}

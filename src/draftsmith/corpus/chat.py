"""The target's chat template as token ids: prompts, a user turn's start, ids that end a turn."""

from __future__ import annotations

from dataclasses import dataclass

from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.corpus.prompts import Prompt
from draftsmith.errors import CorpusError

_MARK = "draftsmith-user-turn"


@dataclass(frozen=True)
class Chat:
    """Template and tokenizer of a target.

    Attributes:
        tokenizer: The target's tokenizer, with a chat template.
        stop_ids: Ids that end an assistant turn.
    """

    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Exact ids up to the start of the assistant's answer."""
        try:
            text = self.tokenizer.apply_chat_template(
                prompt.as_messages(), tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise CorpusError(
                f"applying the chat template to prompt {prompt.prompt_id}",
                found=f"turns of {', '.join(role for role, _ in prompt.messages)}: {error}",
                expected="a conversation that the target's template allows",
                remedy="remove the turns that it refuses (often `system`) from the prompts",
            ) from error
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def user_turn(self) -> tuple[list[int], int]:
        """Ids up to where a user's words begin, and the id that ends them.

        Raises:
            CorpusError: The template changes the words, so the place cannot be found.
        """
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=False
        )
        before, mark, after = str(text).partition(_MARK)
        closing = self.tokenizer(after, add_special_tokens=False)["input_ids"]
        if not mark or not closing:
            raise CorpusError(
                "finding the user turn in the chat template",
                found="a template that hides or does not close the user's words",
                expected="the words, followed by the tokens that end the turn",
                remedy="remove the source of kind self from `corpus.sources`",
            )
        prefix = self.tokenizer(before, add_special_tokens=False)["input_ids"]
        return list(prefix), int(closing[0])


def make_chat(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Chat:
    """Chat of a loaded target; stop ids from its generation config and its tokenizer.

    Raises:
        CorpusError: The tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise CorpusError(
            "preparing prompts",
            found="a tokenizer without a chat template",
            expected="the template that the target is served with",
            remedy="add chat_template.jinja to the target's checkpoint",
        )
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    known = {int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None}
    return Chat(tokenizer, tuple(sorted(known)))

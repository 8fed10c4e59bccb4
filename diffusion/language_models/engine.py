"""Interface of an engine, which asks questions of a language model and yields the answers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from diffusion.config.prompt_files import Prompt


@dataclass(frozen=True)
class Question:
    """One prompt with an image, or with a text alone if the image is empty."""

    shard: int
    """Number of the image's shard in this process's list; an engine may restrict a batch to images of one shard."""
    row: int
    column: str
    prompt: Prompt
    image: bytes = b''
    """File in JPEG, PNG or WebP."""
    media_type: str = ''
    """Format of the file, such as image/jpeg."""
    caption: str = ''
    """First stored caption of the image, empty if it has none; or the text to rewrite."""

    @property
    def instruction(self) -> str:
        return self.prompt.filled(self.caption)


@dataclass(frozen=True)
class Answer:
    """Answer to a question, with the numbers of tokens of the answer, and of the prompt including the image."""

    question: Question
    text: str
    rejected: str | None = None
    """Name of the rule that rejects the answer; None if it is accepted."""
    tokens: int = 0
    prompt_tokens: int = 0


class Engine(Protocol):
    def answers(self, questions: Iterable[Question]) -> Iterator[Answer]:
        """Yield an answer to each question, in any order; take the next questions only when there is room for them.

        Raises:
            UserError: The model or the settings are wrong, so that no question can be answered.
            GaveUp: The server did not answer any question for `patience_seconds`.
        """
        ...

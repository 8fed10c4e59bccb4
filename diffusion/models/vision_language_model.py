"""Engine that runs a vision-language model of transformers in this process, on a GPU if there is one.

Batches hold images of one shard and one prompt, in the order of the shard, so that the answers do not depend on the
number of processes.
"""

import io
import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from diffusion.config.language_model import VisionLanguageConfig
from diffusion.errors import UserError
from diffusion.language_models.engine import Answer, Question
from diffusion.language_models.rejection import rejection


class LocalModel:
    """Engine that runs a model of transformers in this process; for its methods, see `engine.Engine`."""

    def __init__(self, settings: VisionLanguageConfig) -> None:
        self.settings = settings
        source, revision = settings.model, settings.revision
        rank = int(os.environ.get('LOCAL_RANK', 0))
        self.device = torch.device('cuda', rank) if torch.cuda.is_available() else torch.device('cpu')
        try:
            self.processor: Any = AutoProcessor.from_pretrained(source, revision=revision)
            model: Any = AutoModelForImageTextToText.from_pretrained(
                source, revision=revision, dtype=getattr(torch, settings.dtype), use_safetensors=True
            )
        except (OSError, ValueError) as error:
            raise UserError(f'model: {source} cannot be loaded as a vision-language model ({error})') from error
        if self.processor.chat_template is None and self.processor.tokenizer.chat_template is None:
            raise UserError(f'model: {source} has no chat template; use an instruction-tuned model')
        # The answers begin where the prompts end, so shorter prompts of a batch are padded at their beginning.
        self.processor.tokenizer.padding_side = 'left'
        self.model = model.to(self.device).eval()

    def answers(self, questions: Iterable[Question]) -> Iterator[Answer]:
        for _, of_shard in groupby(questions, lambda question: question.shard):
            waiting: dict[str, list[Question]] = {}
            for question in of_shard:
                waiting.setdefault(question.column, []).append(question)
                if len(waiting[question.column]) == self.settings.batch_size:
                    yield from self._answered(waiting.pop(question.column))
            for batch in waiting.values():
                yield from self._answered(batch)

    @torch.inference_mode()
    def _answered(self, batch: list[Question]) -> list[Answer]:
        """Return the answers to questions with the same prompt."""
        texts = self.processor.apply_chat_template([_conversation(each) for each in batch], add_generation_prompt=True)
        images = [[Image.open(io.BytesIO(question.image)).convert('RGB')] for question in batch]
        # Some templates write the first special token, which the tokenizer would add a second time.
        start = self.processor.tokenizer.bos_token
        inputs = self.processor(
            images=images,
            text=texts,
            padding=True,
            return_tensors='pt',
            add_special_tokens=start is None or not texts[0].startswith(start),
        ).to(self.device, dtype=self.model.dtype)
        temperature = self.settings.temperature
        sampling = {'do_sample': True, 'temperature': temperature} if temperature else {'do_sample': False}
        length = inputs['input_ids'].shape[1]
        with torch.random.fork_rng([self.device] if self.device.type == 'cuda' else []):
            # Seed each batch by its first image, so that several processes sample as one does.
            torch.manual_seed(self.settings.seed + 1_000_003 * batch[0].row)
            tokens = self.model.generate(**inputs, **sampling, max_new_tokens=self.settings.max_tokens)
        tokens = tokens[:, length:].cpu()
        answers = self.processor.batch_decode(tokens, skip_special_tokens=True)
        end = self.model.generation_config.eos_token_id
        ends = torch.tensor(end if isinstance(end, list) else [] if end is None else [end], dtype=torch.int64)
        found = []
        of_prompts = inputs['attention_mask'].sum(1).tolist()
        for question, text, is_end, of_prompt in zip(batch, answers, torch.isin(tokens, ends), of_prompts, strict=True):
            rule = rejection(text.strip(), question.prompt, cut_off=not is_end.any())
            count = int(is_end.int().argmax()) + 1 if is_end.any() else len(is_end)
            found.append(Answer(question, text.strip(), rule, count, of_prompt))
        return found


def _conversation(question: Question) -> list[dict[str, Any]]:
    return [{'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': question.instruction}]}]

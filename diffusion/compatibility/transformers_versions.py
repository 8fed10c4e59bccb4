"""Differences between transformers 4, which mosaicml-streaming 0.13 requires, and transformers 5."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers.models import BPE
from torch import Tensor, nn
from transformers import (
    CLIPPreTrainedModel,
    CLIPTextModel,
    CLIPTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

GENERAL_TOKENIZERS = ('PreTrainedTokenizerFast', 'TokenizersBackend')
"""Class names that transformers 4 and 5, respectively, write to files for a generic fast tokenizer."""
IS_VERSION_5 = int(transformers.__version__.partition('.')[0]) >= 5


class _WithTextModel(CLIPTextModel):
    """CLIP's text model with its parts in a submodule `text_model`, as in transformers 4."""

    def __init__(self, encoder: CLIPTextModel) -> None:
        CLIPPreTrainedModel.__init__(self, encoder.config)
        self.text_model = encoder
        self.train(encoder.training)

    @classmethod
    def from_pretrained(cls, *arguments: Any, output_loading_info: bool = False, **keywords: Any) -> Any:
        kind: Any = CLIPTextModel
        encoder, info = kind.from_pretrained(*arguments, output_loading_info=True, **keywords)
        return (cls(encoder), info) if output_loading_info else cls(encoder)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.text_model(*arguments, **keywords)


# diffusers and transformers write the names of the class and its package into a pipeline's files.
_WithTextModel.__name__, _WithTextModel.__module__ = CLIPTextModel.__name__, CLIPTextModel.__module__


def with_text_model(encoder: nn.Module) -> nn.Module:
    """Return a CLIPTextModel whose tensors have the names used in published files, `text_model.embeddings...`.

    transformers 5.6 removed the submodule `text_model`, and with it this prefix of the names, from CLIPTextModel but
    not from CLIPTextModelWithProjection. Checkpoints use the names of version 4, so that both versions can resume them.
    Other modules are returned unchanged. Remove this function when support for transformers 4 is dropped.
    """
    if isinstance(encoder, CLIPTextModel) and not hasattr(encoder, 'text_model'):
        return _WithTextModel(encoder)
    return encoder


def fast_tokenizer(name: str) -> type[PreTrainedTokenizerFast]:
    """Return the class of a model's fast tokenizers (from the package tokenizers): T5TokenizerFast for the name `T5`.

    transformers 5 only has fast tokenizers and names the class T5Tokenizer; T5TokenizerFast is an alias that type
    checkers do not know. Remove this function when support for transformers 4 is dropped.
    """
    return getattr(transformers, f'{name}TokenizerFast')


def byte_pairs(tokenizer: CLIPTokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the vocabulary of CLIP's tokenizer, and its merges in the order in which they are applied.

    The tokenizer of transformers 4 is written in Python; that of version 5 comes from the package tokenizers. Remove
    the branch for the former when support for transformers 4 is dropped.
    """
    parts: Any = tokenizer
    if hasattr(parts, 'bpe_ranks'):
        return parts.encoder, sorted(parts.bpe_ranks, key=parts.bpe_ranks.get)
    model = json.loads(parts.backend_tokenizer.to_str())['model']
    return model['vocab'], [tuple(pair) for pair in model['merges']]


def word_model(tokenizer: CLIPTokenizer) -> BPE:
    """Return the BPE model that splits words into CLIP's tokens; transformers 4 has none, so build it (0.2 s)."""
    parts: Any = tokenizer
    if hasattr(parts, 'bpe_ranks'):
        return BPE(*byte_pairs(tokenizer), end_of_word_suffix='</w>', unk_token=str(tokenizer.unk_token))
    return parts.backend_tokenizer.model


def clip_features(output: Any) -> Tensor:
    """Return the features [B, D] from CLIP's output: transformers 5 wraps them in an object, version 4 does not."""
    return output if isinstance(output, Tensor) else output.pooler_output


def mask_without_values(input_ids: Tensor) -> Tensor | None:
    """Return an attention mask of ones for token ids [B, L] on the meta device; None for transformers 4.

    FLOPs and memory are counted on the meta device, where tensors have no values. transformers 5 reads the values of a
    mask [B, L], even of its default, but not those of a mask of token pairs, bool [B, 1, L, L]. CLIP in transformers 4
    does not accept the latter. Remove this function when support for transformers 4 is dropped.
    """
    batch, length = input_ids.shape
    return torch.ones(batch, 1, length, length, dtype=torch.bool, device='meta') if IS_VERSION_5 else None


def make_readable_by_version_4(folder: Path, pipeline: Any) -> None:
    """Change the tokenizer files of a saved pipeline so that both versions can load them.

    transformers 5 writes class names that version 4 does not have or that need other files there, and it writes CLIP's
    vocabulary to a file that version 4 does not read. Remove this function when support for transformers 4 is dropped.
    """
    if not IS_VERSION_5:
        return
    index = folder / 'model_index.json'
    content = json.loads(index.read_bytes())
    for name, part in pipeline.components.items():
        if not isinstance(part, PreTrainedTokenizerBase):
            continue
        is_clip = isinstance(part, CLIPTokenizer)
        kind = type(part).__name__
        kind = 'PreTrainedTokenizerFast' if kind in GENERAL_TOKENIZERS else kind if is_clip else f'{kind}Fast'
        content[name] = ['transformers', kind]
        file = folder / name / 'tokenizer_config.json'
        settings = json.loads(file.read_bytes()) | {'tokenizer_class': kind}
        if not settings.get('extra_special_tokens'):  # version 5 writes a list, but version 4 expects a dictionary
            settings.pop('extra_special_tokens', None)
        _write_json(file, settings)
        if is_clip:
            vocabulary, merges = byte_pairs(part)
            _write_json(folder / name / 'vocab.json', vocabulary)
            lines = ['#version: 0.2', *(' '.join(pair) for pair in merges), '']
            (folder / name / 'merges.txt').write_text('\n'.join(lines), encoding='utf-8')
    _write_json(index, content)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + '\n', encoding='utf-8')

"""Loading of pretrained models and tokenizers of diffusers and transformers, from a folder or the Hugging Face Hub."""

import gzip
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from diffusers.models.modeling_utils import ModelMixin
from safetensors import SafetensorError
from torch import nn
from transformers import CLIPTokenizer, PreTrainedModel

from diffusion.errors import UserError
from diffusion.models import hub_files
from diffusion.models.hub_errors import WAY_OUT, check_config, loading_error

Loadable = TypeVar('Loadable')

_without_weights = False


@contextmanager
def without_weights() -> Iterator[None]:
    """Context in which `load_pretrained` builds modules from configurations only, on torch's default device."""
    global _without_weights
    before, _without_weights = _without_weights, True
    try:
        yield
    finally:
        _without_weights = before


def load_pretrained(
    part: type[Loadable],
    source: str,
    *,
    subfolder: str,
    revision: str | None = None,
    read_config: Callable[[dict[str, Any]], Any] | None = None,
) -> Loadable:
    """Load a model or tokenizer of a diffusers pipeline with `from_pretrained`, from a folder or the Hugging Face Hub.

    Args:
        part: Class to load.
        source: Local folder in diffusers' layout, or repository on the Hub.
        subfolder: `vae`, `text_encoder` or `tokenizer`; empty if the folder is the part itself.
        revision: Commit of the repository; ignored for a local folder.
        read_config: Function from the content of config.json to the configuration, for a model of transformers whose
            class does not read its own; by default the class reads it.

    Raises:
        UserError: The files do not exist, are not accessible, or are damaged.
        ExternalError: The Hub did not answer for minutes.
        OSError: The disk cannot be read.
    """
    options: dict[str, Any] = {}
    weights = issubclass(part, nn.Module) and not _without_weights
    if Path(source).is_dir():
        if issubclass(part, nn.Module):
            check_config(Path(source, subfolder, 'config.json'))
    else:
        revision = hub_files.fetch(part, source, subfolder=subfolder, revision=revision, weights=weights)
        options = {'revision': revision, 'local_files_only': True, 'cache_dir': hub_files.cache_folder()}
    if weights:
        options['use_safetensors'] = True  # unpickling a downloaded file could run any code
        options['output_loading_info'] = True
    if weights and issubclass(part, ModelMixin):
        options['low_cpu_mem_usage'] = False  # otherwise diffusers logs a long request to install accelerate
    loader: Any = part
    try:
        if _without_weights and issubclass(part, ModelMixin):
            return loader.from_config(loader.load_config(source, subfolder=subfolder, **options))
        if issubclass(part, PreTrainedModel) and (_without_weights or read_config is not None):
            config: Any = part.config_class
            content, _ = config.get_config_dict(source, subfolder=subfolder, **options)
            options['config'] = config(**content) if read_config is None else read_config(content)
            if _without_weights:
                return loader(options['config'])
        loaded = loader.from_pretrained(source, subfolder=subfolder, **options)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        replacement = loading_error(error, part, source, subfolder=subfolder, revision=revision)
        if replacement is None:
            raise
        raise replacement from error
    if not weights:
        return loaded
    model, info = loaded
    # from_pretrained only warns, and continues with random numbers in place of the missing tensors.
    if info['missing_keys']:
        name = min(info['missing_keys'])
        raise UserError(
            f'{"/".join(each for each in (source, subfolder) if each)}: its weight files lack '
            f'{len(info["missing_keys"])} tensors of {part.__name__}, such as {name}; {WAY_OUT}'
        )
    return model


def read_config(part: type[nn.Module], source: str, *, subfolder: str, revision: str | None = None) -> dict[str, Any]:
    """Return the content of config.json of a model, from a folder or the Hub; {} if a folder has none.

    Args:
        part: Class of the model, for messages.
        source: Local folder in diffusers' layout, or repository on the Hub.
        subfolder: Subfolder of the model; empty if the folder is the model itself.
        revision: Commit of the repository; ignored for a local folder.

    Raises:
        UserError: The file is not accessible, or is not a JSON object.
        ExternalError: The Hub did not answer for minutes.
    """
    path = Path(source, subfolder, 'config.json')
    if not Path(source).is_dir():
        revision = hub_files.fetch(part, source, subfolder=subfolder, revision=revision, weights=False)
        path = hub_files.cached_file(source, f'{subfolder}/config.json'.lstrip('/'), revision=revision)
    check_config(path)
    return json.loads(path.read_bytes()) if path.is_file() else {}


def clip_tokenizer(*, max_length: int = 77, pad_token: str = '!') -> CLIPTokenizer:
    """Build CLIP's tokenizer from the vocabulary in the open_clip package, without a download.

    Token ids equal those of `openai/clip-vit-large-patch14`. Stable Diffusion 2 pads with `!`, id 0.
    """
    package = find_spec('open_clip')
    assert package is not None and package.origin is not None, 'open-clip-torch is a core dependency'
    source = Path(package.origin).parent / 'bpe_simple_vocab_16e6.txt.gz'
    # A header line, then 49152 - 256 - 2 merges: the same slice as in transformers' tokenizer.
    merges = gzip.decompress(source.read_bytes()).decode('utf-8').split('\n')[1 : 49152 - 256 - 2 + 1]
    letters = [_byte_letter(byte) for byte in _byte_order()]
    tokens = letters + [letter + '</w>' for letter in letters] + [merge.replace(' ', '') for merge in merges]
    # open_clip names these <start_of_text> and <end_of_text>; under those names transformers would add new ids.
    tokens += ['<|startoftext|>', '<|endoftext|>']
    # CLIPTokenizer reads its vocabulary from files only.
    with tempfile.TemporaryDirectory() as folder:
        vocabulary, rules = Path(folder, 'vocab.json'), Path(folder, 'merges.txt')
        vocabulary.write_text(json.dumps({token: index for index, token in enumerate(tokens)}), encoding='utf-8')
        rules.write_text('#version: 0.2\n' + '\n'.join(merges) + '\n', encoding='utf-8')
        return CLIPTokenizer(str(vocabulary), str(rules), model_max_length=max_length, pad_token=pad_token)


def _byte_order() -> list[int]:
    """Return all 256 bytes in the order of their token ids in CLIP's vocabulary: printable characters first."""
    printable = [*range(ord('!'), ord('~') + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    return printable + [byte for byte in range(256) if byte not in printable]


def _byte_letter(byte: int) -> str:
    """Return the printable character for a byte in GPT-2's and CLIP's byte-level vocabularies."""
    order = _byte_order()
    printable = order[:188]
    return chr(byte) if byte in printable else chr(256 + order.index(byte) - 188)

"""Parameters, FLOPs per image and activation memory per sample of a recipe's model, counted on the model itself."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from diffusion.config import registry
from diffusion.config.autoencoders import PIXELS
from diffusion.config.image_shapes import Shape
from diffusion.config.recipe import Component, LoraConfig
from diffusion.errors import UserError
from diffusion.planning.count_cache import ModelKey
from diffusion.planning.counted_costs import CountedCosts, Precision
from diffusion.planning.token_route import TokenRoute

FLOAT32 = 4
HALF = 2


class ModelCosts(CountedCosts):
    """Parameters, FLOPs and activation memory of a recipe's model; counted on first use, in a separate process.

    Args:
        model: The model's name and keywords, as in a recipe.
        imports: The recipe's modules, which may register the model.
        lora: Settings of a LoRA that is trained instead of the denoiser's weights, or None.
    """

    def __init__(self, model: Component, imports: Sequence[str] = (), lora: LoraConfig | None = None) -> None:
        self.notes: list[str] = []
        """Assumptions that the plan prints."""
        self.posterior: str = model.kwargs.get('posterior', 'sample')
        key = _key_of(model, imports, self.notes)
        if lora is not None:
            # Alpha scales the updates, and costs nothing.
            key = replace(key, lora={'rank': lora.rank, 'targets': sorted(lora.targets)})
        super().__init__(key)

    def count(
        self,
        shapes: Sequence[Shape] = (),
        activations: Sequence[tuple[Shape, Precision]] = (),
        route: TokenRoute | None = None,
    ) -> None:
        """Count the FLOPs and activations of the model that are not known yet, all in one separate process.

        Args:
            activations: Pairs of shape and precision whose activations are needed.
            route: Route of tokens whose FLOPs are needed beside those of all tokens, or None.

        Raises:
            UserError: A shape is not a multiple of the latent cell, or the model cannot be built.
            CountingFailed: The forward pass failed.
        """
        if self.is_counted:
            self._check_shapes(shapes)
        names = [_flops_name(shape, each) for shape in shapes for each in dict.fromkeys((None, route))]
        self.require(names, activations)
        self._check_shapes(shapes)

    def _check_shapes(self, shapes: Sequence[Shape]) -> None:
        """Raise UserError if the sides of an image shape are not multiples of the latent cell."""
        step = self._counts['facts']['pixels_per_patch']
        for shape in shapes:
            if shape.width % step or shape.height % step:
                what = 'latent cell' if step == self._counts['facts']['pixels_per_cell'] else 'patch of the denoiser'
                raise UserError(f'streams: {shape} px is not a multiple of {step} px, the size of a {what}')

    @property
    def is_latent_diffusion(self) -> bool:
        """True if the model trains a denoiser on latents, which can be precomputed."""
        return bool(self.facts['latent_diffusion'])

    @property
    def is_on_pixels(self) -> bool:
        """True if the model trains a denoiser on pixels, without an autoencoder."""
        return self.is_latent_diffusion and self.facts['pixels_per_cell'] == 1

    @property
    def is_transformer(self) -> bool:
        """True if the denoiser is a transformer, False if it is a U-Net or the model has no denoiser."""
        return bool(self.facts['token_width'])

    @property
    def trains_text(self) -> bool:
        """True if the text encoder is trained."""
        return bool(self.facts['trains_text_encoder'])

    @property
    def trained_parameters(self) -> int:
        return self.facts['trained_parameters']

    @property
    def frozen_parameters(self) -> int:
        """Number of parameters of the frozen parts beside the denoiser: VAE and text encoder."""
        return self.facts['frozen_parameters']

    @property
    def frozen_denoiser_parameters(self) -> int:
        """Number of parameters of the denoiser that are not trained: all but those of a LoRA, or 0."""
        return self.facts['frozen_denoiser_parameters']

    @property
    def published_parameters(self) -> int:
        """Number of trained parameters, or those of a LoRA's frozen denoiser, which identifies its published runs."""
        return self.frozen_denoiser_parameters or self.trained_parameters

    @property
    def text_embedding_elements(self) -> int:
        """Number of elements in the text embedding of one caption."""
        return self.facts['text_length'] * self.facts['text_width']

    @property
    def text_encoder_flops(self) -> int:
        """FLOPs per caption of the text encoder's forward pass."""
        return self.facts['text_encoder_flops']

    def trained_flops(self, shape: Shape, route: TokenRoute | None = None) -> int:
        """Return the FLOPs of the denoiser's (or other trained modules') forward pass for one image of this shape."""
        return self.flops(_flops_name(shape, route))['trained']

    def image_encoder_flops(self, shape: Shape) -> int:
        """Return the FLOPs of the frozen image encoder for one image of this shape."""
        return self.flops(str(shape))['image_encoder']

    def latent_elements(self, shape: Shape) -> int:
        """Return the number of elements in the latent of one image of this shape, without variances."""
        cell = self.facts['pixels_per_cell']
        return self.facts['latent_channels'] * (shape.height // cell) * (shape.width // cell)


def _flops_name(shape: Shape, route: TokenRoute | None) -> str:
    """Return the name under which the FLOPs for a shape are stored, such as 512x512 or `512x512 tread=2:13:0.5`."""
    return str(shape) if route is None else f'{shape} {route}'


def _key_of(model: Component, imports: Sequence[str], notes: list[str]) -> ModelKey:
    """Return the cache key of a model: the settings and configuration files that determine its counts."""
    # The architecture of a third-party model may depend on any keyword and on the code of the imported modules.
    if not registry.is_own('model', model.name):
        return ModelKey(model.name, model.kwargs, tuple(imports))
    # Defaults are part of the key, so that a recipe that spells one out uses the same counts as one that omits it.
    signature = registry.signature('model', model.name)
    settings, contents = signature.defaults() | dict(model.kwargs), []
    for keyword in (each for each in signature.parameters if each.weights_of):
        location, parts = settings.get(keyword.name), keyword.weights_of
        if location in (None, keyword.default):
            configs = None
        elif location == PIXELS:  # not a folder
            configs = []
        elif (configs := [_config_of(location, part) for part in parts]) and None in configs:
            # A hub repository would have to be downloaded for its configuration; the planner works offline.
            part = parts[configs.index(None)]
            notes.append(f"{location} is not a local folder with a {part}; assumed this model's default architecture")
            configs = None
        settings[keyword.name] = None if configs is None else str(location)
        contents += configs or []
    same = {each.name for each in signature.parameters if not each.changes_architecture}
    kept = {key: value for key, value in settings.items() if key not in same}
    return ModelKey(model.name, kept, (), tuple(contents))


def _config_of(folder: str, part: str) -> str | None:
    """Return config.json (keys sorted) of a model part in a pipeline folder or its own folder; None if missing."""
    for path in (Path(folder, part, 'config.json'), Path(folder, 'config.json')):
        if path.is_file():
            try:
                return json.dumps(json.loads(path.read_text(encoding='utf-8')), sort_keys=True)
            except ValueError as error:
                raise UserError(f'{path}: not JSON ({error}); write the folder with save_pretrained') from error
    return None

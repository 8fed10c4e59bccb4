"""The transformer of i1 (Zeng et al. 2026, arXiv 2606.11289), written from the paper's description.

Image and text tokens have weights of their own and attend to each other. The timestep is not an input: the noisy tokens
reveal the noise level. The first half of the blocks is connected to the second half by long skips.

Exports contain a copy of this file, so it must not import the package that wrote it.

Shapes: B batch, C latent channels, H W latent size, N image tokens, L text tokens, T width of the text embeddings,
D width of the transformer, h channels per attention head.
"""

import math
from typing import Any

import torch
import torch.nn.functional as functional
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders.peft import PeftAdapterMixin
from diffusers.models.attention import AttentionMixin
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn
from torch.utils import checkpoint

GRID = 16
"""Side in tokens of the grid of 256 px images, whose rows and columns have the positions 0, 1, ..., 15."""
THETA = 10000.0
TEXT_BLOCKS = 2
EPSILON = 1e-6
SIZES: dict[str, tuple[int, int]] = {
    'xl': (1152, 16),
    '1.3b': (1296, 18),
    '1.6b': (1440, 20),
    '2b': (1584, 22),
    '2.3b': (1728, 24),
    '2.7b': (1872, 26),
    '3b': (2016, 28),
}
"""Width and number of attention heads of the published sizes."""


class RMSNorm(nn.RMSNorm):
    """RMSNorm computed in float32, with a result of the input's dtype."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        values = _at_least_float32(x)
        return functional.rms_norm(values, self.normalized_shape, self.weight.to(values.dtype), self.eps).to(x.dtype)


class SwiGLU(nn.Module):
    """MLP with a gate: down(silu(a) * b), where a and b are the two halves of up(x)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = int(4 * width * 2 / 3)
        self.up = nn.Linear(width, 2 * hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * value)


class TextBlock(nn.Module):
    """Block of the text adapter: self-attention over all text tokens, including padding, and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = RMSNorm(width), RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = RMSNorm(width // heads), RMSNorm(width // heads)
        self.mlp = SwiGLU(width)

    def forward(self, text: Tensor) -> Tensor:
        query, key, value = self.qkv(self.attention_norm(text)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        text = text + self.out(_attention(self.q_norm(query), self.k_norm(key), value))
        return text + self.mlp(self.mlp_norm(text))


class I1Block(nn.Module):
    """Joint attention over image and text tokens, and an MLP for each; the norms are shared by image and text.

    Args:
        has_skip: The block also receives the output of the mirrored block in the first half (a long skip).
        is_last: The block does not compute its text output, because nothing reads it.
    """

    def __init__(self, width: int, heads: int, *, has_skip: bool, is_last: bool) -> None:
        super().__init__()
        self.heads, self.is_last = heads, is_last
        self.image_skip = nn.Linear(2 * width, width) if has_skip else None
        self.text_skip = nn.Linear(2 * width, width) if has_skip else None
        self.attention_norm, self.mlp_norm = RMSNorm(width), RMSNorm(width)
        self.attention_output_norm, self.mlp_output_norm = RMSNorm(width), RMSNorm(width)
        self.image_qkv, self.text_qkv = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.image_out, self.text_out = nn.Linear(width, width), nn.Linear(width, width)
        self.q_norm, self.k_norm = RMSNorm(width // heads), RMSNorm(width // heads)
        self.image_mlp, self.text_mlp = SwiGLU(width), SwiGLU(width)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        image_rotary: Tensor,
        text_rotary: Tensor,
        attention_mask: Tensor | None = None,
        skip: Tensor | None = None,
        text_skip: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the image tokens [B, N, D] and text tokens [B, L, D] after this block; no text after the last one.

        Args:
            image_rotary: Rotations of the image tokens, [B, N, h / 2, 2], as returned by `rotations`.
            text_rotary: Rotations of the text tokens, [B, L, h / 2, 2].
            attention_mask: True for tokens of the caption, False for padding, bool [B, L].
            skip: Image tokens after the mirrored block, [B, N, D].
            text_skip: Text tokens after the mirrored block, [B, L, D].
        """
        image, text = hidden_states, encoder_hidden_states
        if self.image_skip is not None and self.text_skip is not None:
            assert skip is not None and text_skip is not None
            image = self.image_skip(torch.cat([image, skip], dim=-1))
            text = self.text_skip(torch.cat([text, text_skip], dim=-1))
        rotary = torch.cat([image_rotary, text_rotary], dim=1)
        count = image.shape[1]
        attended = self._attend(self.attention_norm(image), self.attention_norm(text), rotary, attention_mask)
        image = image + self.attention_output_norm(self.image_out(attended[:, :count]))
        image = image + self.mlp_output_norm(self.image_mlp(self.mlp_norm(image)))
        if self.is_last:
            return image + self._zero_of_unused_weights(), None
        text = text + self.attention_output_norm(self.text_out(attended[:, count:]))
        text = text + self.mlp_output_norm(self.text_mlp(self.mlp_norm(text)))
        # The published blocks also set padding to zero, which has no effect: no token attends to it.
        return image, text

    def _attend(self, image: Tensor, text: Tensor, rotary: Tensor, mask: Tensor | None) -> Tensor:
        """Return the heads' outputs for image and text tokens, [B, N + L, D]."""
        qkv = torch.cat([self.image_qkv(image), self.text_qkv(text)], dim=1)
        query, key, value = qkv.unflatten(-1, (3, self.heads, -1)).unbind(2)
        query, key = (rotate(norm(each), rotary) for norm, each in ((self.q_norm, query), (self.k_norm, key)))
        if mask is not None:
            mask = functional.pad(mask, (image.shape[1], 0), value=True)[:, None, None]
        return _attention(query, key, value, mask)

    def _zero_of_unused_weights(self) -> Tensor:
        """Return 0, computed from the last block's unused text weights, so that their gradients are 0, not None."""
        # These weights stay trained, since the published weights include them, and code for checkpoints and planning
        # assumes that all are. Without a gradient for each, DDP would wait forever.
        unused = [*self.text_out.parameters(), *self.text_mlp.parameters()]
        return torch.stack([each.flatten()[:0].sum() for each in unused]).sum()


class I1Transformer2DModel(ModelMixin, ConfigMixin, PeftAdapterMixin, AttentionMixin):  # type: ignore[misc]
    """Denoiser of i1.

    Args:
        in_channels: C.
        patch_size: Side of a token in latent cells.
        text_width: T.
        text_length: Number of tokens of the learned null caption, to which captions are padded.
        hidden_size: D, a multiple of 8 times `num_heads`.
        num_heads: Number of attention heads.
        depth: Number of blocks; must be odd, since the middle block has no skip.
    """

    _supports_gradient_checkpointing = True

    @register_to_config
    def __init__(
        self,
        in_channels: int = 32,
        patch_size: int = 2,
        text_width: int = 2304,
        text_length: int = 256,
        hidden_size: int = 1152,
        num_heads: int = 16,
        depth: int = 29,
    ) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(in_channels, hidden_size, patch_size, stride=patch_size)
        self.null_caption = nn.Parameter(torch.empty(1, text_length, text_width))
        self.text_embed = nn.Linear(text_width, hidden_size)
        self.text_blocks = nn.ModuleList(TextBlock(hidden_size, num_heads) for _ in range(TEXT_BLOCKS))
        self.blocks = nn.ModuleList(
            I1Block(hidden_size, num_heads, has_skip=number > depth // 2, is_last=number == depth - 1)
            for number in range(depth)
        )
        self.output_norm = RMSNorm(hidden_size)
        self.output = nn.Linear(hidden_size, patch_size**2 * in_channels)
        self.head_width = hidden_size // num_heads
        self.gradient_checkpointing = False
        # Initialize as published: LeCun normal; Xavier uniform for the skips and the text adapter's first layer.
        for name, layer in self.named_modules():
            if not isinstance(layer, nn.Linear | nn.Conv2d):
                continue
            if name == 'text_embed' or name.endswith('skip'):
                nn.init.xavier_uniform_(layer.weight)
            else:
                # 0.8796 is the standard deviation of a standard normal distribution truncated to [-2, 2].
                std = layer.weight[0].numel() ** -0.5 / 0.8796
                nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
        nn.init.normal_(self.null_caption, std=self.null_caption.shape[-1] ** -0.5)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """Return the prediction [B, C, H, W] for noisy latents [B, C, H, W].

        Args:
            encoder_hidden_states: Text embeddings including padding's, [B, L, T]. A caption with embeddings of zero is
                replaced by the learned null caption; its mask stays the same.
            attention_mask: True for tokens of the caption, False for padding, bool [B, L]; None attends to everything.
        """
        patch: int = self.config['patch_size']
        height, width = (side // patch for side in hidden_states.shape[2:])
        image = self.patch_embed(hidden_states).flatten(2).transpose(1, 2)
        positions = grid_positions(height, width, device=image.device)
        # The table is in float32, but weights in 16 bits need tokens in 16 bits. Autocast keeps tokens in float32.
        table = sine_cosine_table(positions, self.config['hidden_size'])
        image = (image + table).to(self.patch_embed.weight.dtype)
        text = self._adapt(encoder_hidden_states)
        rotary = self._rotations(positions, encoder_hidden_states, attention_mask)
        skips: list[tuple[Any, ...]] = []
        for number, block in enumerate(self.blocks):
            inputs = *rotary, attention_mask, *(skips.pop() if number > len(self.blocks) // 2 else ())
            image, text = self._run(block, image, text, *inputs)
            if number < len(self.blocks) // 2:
                skips.append((image, text))
        tokens = self.output(self.output_norm(image)).unflatten(1, (height, width)).unflatten(-1, (patch, patch, -1))
        sample = tokens.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def _run(self, block: nn.Module, *inputs: Any) -> Any:
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            # Call it as an attribute of torch's module: the planner replaces this to measure activation memory.
            return checkpoint.checkpoint(block, *inputs, use_reentrant=False)
        return block(*inputs)

    def _adapt(self, embeds: Tensor) -> Tensor:
        """Return the text adapter's tokens [B, L, D] for text embeddings, or for the null caption if they are zero."""
        is_caption = embeds.flatten(1).any(dim=1)[:, None, None]
        null = self.null_caption[:, : embeds.shape[1]].to(embeds.dtype)
        text = self.text_embed(torch.where(is_caption, embeds, null))
        for block in self.text_blocks:
            text = self._run(block, text)
        return text

    def _rotations(self, grid: Tensor, embeds: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the rotations of image tokens [B, N, h / 2, 2] and text tokens [B, L, h / 2, 2].

        Token i of a caption has the position (i, 0, 0), padding (0, 0, 0). Image tokens have (n, row, column), where n
        is the number of the caption's tokens.
        """
        batch, length = embeds.shape[:2]
        mask = torch.ones(batch, length, dtype=torch.bool, device=embeds.device) if mask is None else mask
        order = torch.arange(length, device=embeds.device) * mask
        text = functional.pad(order[:, :, None].float(), (0, 2))
        count = mask.sum(dim=1)[:, None, None].float().expand(-1, len(grid), -1)
        image = torch.cat([count, grid.expand(batch, -1, -1)], dim=-1)
        return rotations(image, self.head_width), rotations(text, self.head_width)


def grid_positions(height: int, width: int, *, device: Any) -> Tensor:
    """Return row and column of each token in a grid, in row-major order, float32 [N, 2].

    All grids cover the area of GRID x GRID, with square tokens around the same center, so that a square grid of side n
    has the published positions row * GRID / n.
    """
    scale = GRID / math.sqrt(height * width)
    rows, columns = (torch.arange(side, device=device) * scale + (GRID - side * scale) / 2 for side in (height, width))
    return torch.cartesian_prod(rows, columns)


def sine_cosine_table(positions: Tensor, width: int) -> Tensor:
    """Return fixed embeddings of positions [N, 2], float32 [N, width].

    Half of the channels is for the row, half for the column; in each half, the sines come before the cosines.
    """
    angles = positions[:, :, None] * _frequencies(width // 2, positions.device)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).flatten(1)


def rotations(positions: Tensor, channels: int) -> Tensor:
    """Return cosine and sine for each pair of a head's channels at positions [B, S, 3] (RoPE, Su et al. 2021).

    Half of the channels rotate with the first axis, and a quarter with each other one. The result, [B, S, channels / 2,
    2], is float32 viewed as int32, as `rotate` expects: FSDP2 would cast floating-point inputs of blocks to 16 bits.
    """
    parts = channels // 2, channels // 4, channels // 4
    frequencies = (_frequencies(part, positions.device) for part in parts)
    angles = torch.cat([positions[..., axis, None] * each for axis, each in enumerate(frequencies)], dim=-1)
    return torch.stack([angles.cos(), angles.sin()], dim=-1).view(torch.int32)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate pairs of neighboring channels of x, [B, S, heads, h], by the result of `rotations`."""
    cosine, sine = rotary.view(torch.float32)[:, :, None].unbind(-1)
    first, second = _at_least_float32(x).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([first * cosine - second * sine, first * sine + second * cosine], dim=-1).flatten(-2).to(x.dtype)


def _frequencies(channels: int, device: Any) -> Tensor:
    return THETA ** (-torch.arange(0, channels, 2, device=device, dtype=torch.float32) / channels)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the outputs of attention heads, [B, S, D], for queries, keys and values [B, S, heads, h]."""
    heads = (each.transpose(1, 2) for each in (query.to(value.dtype), key.to(value.dtype), value))
    return functional.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2)


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()

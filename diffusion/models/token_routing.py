"""Token routing: during training, some image tokens skip some transformer blocks (TREAD, Krause et al. 2025).

SPRINT (Park et al. 2025, arXiv 2510.21986) replaces the skipped tokens by a mask token and fuses the result with the
tokens before the blocks, by a trained layer that evaluation and sampling need too.

Shapes: B batch, N image tokens, K tokens kept in the blocks, D width of a token.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from diffusion.config.declarations import AtLeast
from diffusion.config.model_checks import SPRINT_DENSE_BLOCKS, sprint_problems
from diffusion.errors import UserError
from diffusion.models.families.adapter import TokenBlocks
from diffusion.models.randomness import Draws, Purpose

FUSION = 'token_fusion'
"""Name of the denoiser's submodule that SPRINT adds."""


@dataclass(frozen=True)
class Sprint:
    """Settings of SPRINT, sparse-dense residual fusion (Park et al. 2025): some blocks process only a few tokens.

    With x the N tokens before block `start`, m_i = 0 for tokens that blocks `start` to `end` - 1 drop, else 1, and a
    trained mask token and linear layer (2 D + 2 D^2 parameters):

        z_i = blocks({x_j: m_j = 1})_i if m_i = 1, else the mask token
        y_i = linear([x_i, z_i])

    Block `end` receives y. Evaluation and sampling drop no tokens, and fuse too. The paper drops 75% of the tokens and
    ends with a short training on all of them: `fraction: 0` in a second run with `init_from`. The tokens are drawn
    independently, as in TREAD, and not in groups of neighbors, and the paper's path-drop guidance is not implemented.
    """

    start: int = 2
    """Index (from 0) of the first block that processes only the kept tokens."""
    end: Annotated[int | None, AtLeast(1)] = None
    """Index of the first block that processes the fused tokens; by default the second-to-last block."""
    fraction: float = 0.75
    """Fraction of the image tokens that are dropped, in [0, 1)."""

    def route(self, depth: int) -> 'Route':
        """Return the route in a denoiser with `depth` blocks; raise UserError if a setting does not fit it."""
        end = depth - SPRINT_DENSE_BLOCKS if self.end is None else self.end
        for key, problem in sprint_problems(self.start, end, self.fraction, depth=depth).items():
            raise UserError(f'sprint.{key}: {problem}')
        return Route(self.start, end, self.fraction)


class TokenFusion(nn.Module):
    """SPRINT's trained parts: the mask token, and the linear layer that fuses tokens from before and after a route."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mask_token = nn.Parameter(torch.zeros(width))
        self.linear = nn.Linear(2 * width, width)

    def forward(self, before: Tensor, after: Tensor) -> Tensor:
        """Return the fused tokens [B, N, D] of the tokens before and after the route, both [B, N, D]."""
        # Keep the dtype of the residual stream, which autocast does not reduce.
        return self.linear(torch.cat([before, after.to(before.dtype)], dim=-1)).to(before.dtype)


@dataclass(frozen=True)
class Route:
    """Blocks that some image tokens skip."""

    start: int
    """Index of the first block that is skipped."""
    end: int
    """Index after the last block that is skipped."""
    fraction: float
    """Fraction of the image tokens that skip the blocks."""

    def tokens(self, count: int) -> int:
        """Return how many of a sample's `count` image tokens the route's blocks process, at least one."""
        return max(1, count - round(self.fraction * count))

    def tokens_after(self, block: int, count: int) -> int:
        """Return how many of `count` image tokens are in a block's output: fewer if the block is on the route."""
        return self.tokens(count) if self.start <= block < self.end else count

    def kept(self, draws: Draws, count: int) -> Tensor:
        """Return the ascending indices of each sample's kept tokens, drawn at random from `count` tokens, [B, K]."""
        order = draws.words(Purpose.ROUTING, count).argsort(dim=1, stable=True)
        return order[:, : self.tokens(count)].sort(dim=1).values


class TokenRouter:
    """Hooks on a route's blocks that remove some tokens before the first block and restore them after the last.

    The number of tokens in these blocks is fixed per image shape, without a mask, so compiled blocks need no dynamic
    shapes. The hooks are active from `begin` to `finish` if gradients are enabled, or always with `in_sampling`:
    evaluation and ordinary sampling use all tokens. They run outside a block's `forward`, so torch.compile, FSDP and
    activation checkpointing see an ordinary block. A recomputed forward pass gets the same tokens. Create the router
    before FSDP wraps the denoiser.

    If the denoiser has a TokenFusion, it fuses the tokens after the last block in every forward pass (SPRINT).
    """

    def __init__(self, denoiser: nn.Module, blocks: TokenBlocks, route: Route) -> None:
        self.route = route
        self._blocks = blocks
        self._fusion: TokenFusion | None = getattr(denoiser, FUSION, None)
        self._draws: Draws | None = None
        self._in_sampling = False
        self._kept: Tensor | None = None
        self._tokens: Tensor | None = None
        self._selected: dict[str, tuple[Tensor, Tensor]] = {}
        routed = blocks.of(denoiser)[route.start : route.end]
        # Inspect the class's `forward`: a compiled `forward` on the instance has the signature (*args, **kwargs).
        self._names = list(inspect.signature(type(routed[0]).forward).parameters)[1:]
        for block in routed:
            block.register_forward_pre_hook(self._enter, with_kwargs=True)
        routed[0].register_forward_pre_hook(self._remove, with_kwargs=True)
        routed[-1].register_forward_hook(self._restore)

    @property
    def kept(self) -> Tensor | None:
        """Indices of the tokens kept in the forward pass since `begin`, int64 [B, K]; None before a forward pass."""
        return self._kept

    def begin(self, draws: Draws, *, in_sampling: bool = False) -> None:
        """Start routing tokens that `draws` select at random; with `in_sampling`, also in passes without gradients."""
        self.finish()
        self._draws, self._in_sampling = draws, in_sampling

    def finish(self) -> None:
        """Stop routing and free the tokens; call it after the backward pass, which may recompute blocks."""
        self._draws = self._kept = self._tokens = None
        self._selected = {}

    @contextmanager
    def routing(self, draws: Draws, *, in_sampling: bool = False) -> Iterator[None]:
        self.begin(draws, in_sampling=in_sampling)
        try:
            yield
        finally:
            self.finish()

    @property
    def _routes(self) -> bool:
        return self._draws is not None and (self._in_sampling or torch.is_grad_enabled())

    def _remove(self, block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Remove tokens before the route's first block; a forward pre-hook that runs after `_enter`."""
        if not self._routes:
            if self._fusion is not None:
                named = {**dict(zip(self._names, args, strict=False)), **kwargs}
                self._tokens = named[self._blocks.argument]
            return None
        tokens = kwargs[self._blocks.argument]
        self._tokens = tokens
        return args, {**kwargs, self._blocks.argument: self._select(tokens, dim=1)}

    def _enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Reduce a block's per-token arguments, such as position embeddings, to the kept tokens; a forward pre-hook."""
        if not self._routes:
            return None
        # diffusers passes arguments by position when it checkpoints activations.
        named = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if self._kept is None:
            assert self._draws is not None
            self._kept = self.route.kept(self._draws, named[self._blocks.argument].shape[1])
        for name, dim in self._blocks.per_token.items():
            if named.get(name) is not None:
                named[name] = self._select_once(name, named[name], dim)
        return (), named

    def _restore(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Restore the skipped tokens after the route's last block, or fuse all tokens (SPRINT); a forward hook."""
        fusion = self._fusion
        if not self._routes and fusion is None:
            return None
        tokens, full = self._blocks.tokens(output), self._tokens
        assert full is not None
        if not self._routes:
            return self._blocks.replaced(output, fusion(full, tokens)) if fusion is not None else None
        assert self._kept is not None
        # Autocast may have changed the dtype of the tokens inside the blocks.
        dtype = torch.promote_types(full.dtype, tokens.dtype)
        index = self._kept[:, :, None].expand_as(tokens)
        skipped = full if fusion is None else fusion.mask_token.expand_as(full)
        merged = skipped.to(dtype).scatter(1, index, tokens.to(dtype))
        return self._blocks.replaced(output, merged if fusion is None else fusion(full, merged))

    def _select_once(self, name: str, values: Tensor, dim: int) -> Tensor:
        """Select the kept tokens in the block argument `name`; blocks that get the same `values` share the result."""
        # Select only once for all blocks: each copy would be kept for the backward pass.
        source, selected = self._selected.get(name, (None, None))
        if source is not values or selected is None:
            selected = self._select(values, dim=dim)
            self._selected[name] = values, selected
        return selected

    def _select(self, values: Tensor, *, dim: int) -> Tensor:
        """Select the kept tokens in a tensor whose dimension 0 is the batch and whose dimension `dim` is the tokens."""
        assert self._kept is not None
        shape = [1] * values.ndim
        shape[0], shape[dim] = self._kept.shape
        return torch.take_along_dim(values, self._kept.view(shape), dim=dim)

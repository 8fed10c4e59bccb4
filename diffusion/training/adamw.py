"""AdamW with less host overhead: 0.5 ms of CPU time per step instead of 27 ms, also under FSDP2."""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from diffusion.algorithms.average import local_shard
from diffusion.compatibility.private_names import _fused_adamw_
from diffusion.config.declarations import OPTIMIZER_STATE, SAME_UPDATE, AtLeast, Between, constrained


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW with less host overhead per step, bit-identical results and the same state.

    With `fused`, weights and moments are collected once instead of in every step, all weights share one step counter,
    and DTensors are updated through this device's shards.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Term added to the denominator.
        weight_decay: Decoupled weight decay, relative to the learning rate.
        amsgrad: Divide by the largest second moment so far.
        maximize: Maximize the loss instead of minimizing it.
        foreach: Use torch's implementation that operates on lists of tensors.
        capturable: Allow capturing the step in a CUDA graph.
        differentiable: Let autograd differentiate through the step.
        fused: Use the fused kernel.
    """

    # A training step takes 22 to 70 ms on 128 GPUs, which are idle while the host prepares the update. For the 686
    # tensors of Stable Diffusion 2 under FSDP2, torch's own update takes 10 to 30 ms on the host, mostly to determine
    # how DTensors are sharded. Updates are elementwise, so it is sufficient to update local shards.

    @constrained
    def __init__(
        self,
        params: Iterable[Any],
        lr: Annotated[float, AtLeast(0)] = 1e-3,
        betas: Annotated[tuple[float, float], Between(0, 1)] = (0.9, 0.999),
        eps: Annotated[float, AtLeast(0)] = 1e-8,
        weight_decay: Annotated[float, AtLeast(0)] = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: Annotated[bool, OPTIMIZER_STATE] = False,
        foreach: Annotated[bool | None, SAME_UPDATE] = None,
        capturable: Annotated[bool, OPTIMIZER_STATE] = False,
        differentiable: Annotated[bool, OPTIMIZER_STATE] = False,
        fused: Annotated[bool | None, SAME_UPDATE] = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        self._collected: dict[int, Collected] = {}
        self.register_state_dict_post_hook(_with_own_steps)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        if self.defaults['differentiable']:
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                self._update(group)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for group in self.param_groups:
            for weight in group['params']:
                weight.grad = None

    def _update(self, group: dict[str, Any]) -> None:
        known = self._collected.get(id(group))
        gradients = None if known is None else known.gradients(self.state, group)
        if known is None or gradients is None:
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            # This private method initializes the state exactly as torch does.
            self._init_group(group, *lists)  # type: ignore[attr-defined]
            lists = [[local_shard(each) for each in tensors] for tensors in lists]
            if not self._shares_steps(group, lists):
                self._update_plainly(group, lists)
                return
            weights, gradients, *others = lists
            whole = list(group['params'])
            is_plain = all(each is weight for each, weight in zip(whole, weights, strict=True))
            known = Collected(self.state, whole, whole if is_plain else weights, *others)
            self._collected[id(group)] = known
        scale, found_inf = getattr(self, 'grad_scale', None), getattr(self, 'found_inf', None)
        known.steps[0].add_(1)
        _fused_adamw_(
            known.shards,
            gradients,
            known.exp_avgs,
            known.exp_avg_sqs,
            known.max_exp_avg_sqs,
            known.steps,
            grad_scale=scale,
            found_inf=found_inf,
            **_settings(group),
        )
        if found_inf is not None:
            known.steps[0].sub_(found_inf)

    def _shares_steps(self, group: dict[str, Any], lists: list[list[Tensor]]) -> bool:
        """Make a group's weights share one step counter; return False if one fused call cannot update all of them."""
        weights, steps = lists[0], lists[5]
        if not group['fused'] or len(weights) != len(group['params']) or not weights:
            return False
        if len({(each.device, each.dtype) for each in weights}) > 1:
            return False
        # The counters are equal unless a weight had no gradient in some steps. Reading them waits for the device, but
        # only happens once per start of a run: afterwards they are all the same tensor.
        if len({id(each) for each in steps}) > 1 and torch.stack(steps).unique().numel() > 1:
            return False
        steps[:] = [steps[0]] * len(steps)
        for weight in group['params']:
            self.state[weight]['step'] = steps[0]
        return True

    def _update_plainly(self, group: dict[str, Any], lists: list[list[Tensor]]) -> None:
        if not lists[0]:
            return
        if self._collected.pop(id(group), None) is not None:
            # Give each weight its own counter: a shared one would be incremented once per weight, and even for weights
            # that this step does not update.
            for weight in group['params']:
                self.state[weight]['step'] = self.state[weight]['step'].clone()
            lists[5] = [self.state[weight]['step'] for weight in group['params'] if weight.grad is not None]
        adamw(
            *lists,
            foreach=group['foreach'],
            capturable=group['capturable'],
            differentiable=False,
            fused=group['fused'],
            grad_scale=getattr(self, 'grad_scale', None),
            found_inf=getattr(self, 'found_inf', None),
            has_complex=any(each.is_complex() for each in lists[0]),
            **_settings(group),
        )


class Collected(NamedTuple):
    """This device's tensors of a parameter group, as collected by an earlier step."""

    state: Any
    """The `state` from which the tensors were collected; if a checkpoint replaces it, they are collected again."""
    weights: list[Tensor]
    shards: list[Tensor]
    """Local shards of `weights`; the same list object as `weights` if none is a DTensor."""
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor]
    steps: list[Tensor]
    """Step counters: the same tensor for every weight."""

    def gradients(self, state: Any, group: dict[str, Any]) -> list[Tensor] | None:
        """Return this step's gradients, or None if the collected tensors are not the ones to update."""
        if self.state is not state or len(self.weights) != len(group['params']):
            return None
        if self.shards is self.weights:
            gradients = [weight.grad for weight in self.weights]
            return None if any(each is None for each in gradients) else gradients  # type: ignore[return-value]
        found = []
        for weight, shard in zip(self.weights, self.shards, strict=True):
            gradient = weight.grad
            # Compare addresses, since torch 2.14's to_local returns a new view of a parameter in each call.
            if gradient is None or local_shard(weight).data_ptr() != shard.data_ptr():
                return None
            found.append(local_shard(gradient))
        return found


def _with_own_steps(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Give each weight in a state dict its own step counter; a hook of `state_dict`."""
    # torch.optim.AdamW may load this state, and would increment a shared counter once per weight in each step.
    state = {key: values | {'step': values['step'].clone()} for key, values in state_dict['state'].items()}
    return state_dict | {'state': state}


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that all of torch's AdamW implementations accept, from a group's settings."""
    keys = ('lr', 'weight_decay', 'eps', 'amsgrad', 'maximize')
    return {key: group[key] for key in keys} | {'beta1': group['betas'][0], 'beta2': group['betas'][1]}

"""Names of diffusers' noise schedulers, read from its source file instead of importing it."""

import ast
import difflib
import functools

from diffusion.config.signatures import source_file

SHORT_NAMES = {
    'ddim': 'DDIMScheduler',
    'ddpm': 'DDPMScheduler',
    'dpm++': 'DPMSolverMultistepScheduler',
    'euler': 'EulerDiscreteScheduler',
    'euler_ancestral': 'EulerAncestralDiscreteScheduler',
    'heun': 'HeunDiscreteScheduler',
    'pndm': 'PNDMScheduler',
    'unipc': 'UniPCMultistepScheduler',
}


FLOW_SHORT_NAMES = {
    'ddim': 'FlowMatchEulerDiscreteScheduler',
    'dpm++': 'DPMSolverMultistepScheduler',
    'euler': 'FlowMatchEulerDiscreteScheduler',
    'heun': 'FlowMatchHeunDiscreteScheduler',
    'unipc': 'UniPCMultistepScheduler',
}
"""Short names for models that are trained on a flow, where DDIM is Euler's method (Gao et al. 2024)."""
FLOW_CLASSES = (*FLOW_SHORT_NAMES.values(), 'DPMSolverSinglestepScheduler')
"""diffusers' schedulers that can sample a flow; the others take the betas of diffusion."""


def class_name(name: str, *, flow: bool = False) -> str:
    """Return the name of a scheduler's class in diffusers, given that name or a short one (`ddim`, `dpm++`, ...)."""
    return (FLOW_SHORT_NAMES if flow else SHORT_NAMES).get(name, name)


def name_problem(name: str, *, flow: bool = False) -> str | None:
    """Return an error message with the nearest name if diffusers has no such noise scheduler, else None.

    Args:
        name: Class name in diffusers or short name.
        flow: True for a model that is trained on a flow, which only some schedulers can sample.
    """
    known = _class_names()
    if flow and class_name(name, flow=True) not in FLOW_CLASSES and class_name(name) in known:
        return f'{name!r} cannot sample a flow; use {", ".join(FLOW_SHORT_NAMES)}'
    if not flow and name.startswith('FlowMatch'):
        return f'{name!r} samples a flow, and this model is diffusion; use {", ".join(SHORT_NAMES)}'
    if class_name(name) in known:
        return None
    near = difflib.get_close_matches(name, [*SHORT_NAMES, *known], n=1)
    hint = f'did you mean {near[0]!r}? ' if near else ''
    return f'{name!r} is unknown; {hint}short names: {", ".join(SHORT_NAMES)}'


@functools.cache
def _class_names() -> list[str]:
    # diffusers imports each class on first use, so its source file lists the classes as strings.
    tree = ast.parse(source_file('diffusers.schedulers').read_text(encoding='utf-8'))
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return sorted(text for text in texts if text.endswith('Scheduler') and not text.startswith('Flax'))

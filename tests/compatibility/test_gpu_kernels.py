"""Versions of diffusers and GPUs that are refused at the start, and differences between versions of torch."""

import importlib.metadata
import warnings
from unittest.mock import Mock

import pytest
import torch

from diffusion.compatibility import check_diffusers
from diffusion.compatibility.diffusers_versions import without_own_deprecations
from diffusion.compatibility.torch_versions import average_by_summing, ignore_views_of_fsdp2
from diffusion.errors import UserError
from diffusion.exit_codes import CONFIG_ERROR
from diffusion.preflight import __main__ as preflight
from diffusion.training.components import check_device


@pytest.fixture
def gpus(monkeypatch):
    """An H100 and a B200, as torch.cuda would report them, under a torch that has kernels for the first."""
    capabilities = [(9, 0), (10, 0)]
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda index: ['NVIDIA H100', 'NVIDIA B200'][index])
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda index: capabilities[index])
    monkeypatch.setattr(torch.cuda, 'get_arch_list', lambda: ['sm_50', 'sm_80', 'sm_90'])


def test_preflight_names_the_gpu_and_the_way_out(gpus, monkeypatch):
    monkeypatch.setenv('RANK', '1')
    (found,) = preflight.check_cuda(1)
    assert not found.ok and found.status == CONFIG_ERROR
    assert 'NVIDIA B200' in found.detail and 'docs/install.md' in found.detail


def test_run_stops_before_its_model_is_built_on_the_gpu_without_kernels_alone(gpus, monkeypatch):
    from diffusion.config.load import load

    recipe = load('yamls/quickstart.yaml', ['trainer.device=gpu'])
    check_device(recipe)
    monkeypatch.setenv('LOCAL_RANK', '1')
    capabilities = r'compute capability 10\.0; it has kernels for sm_50, sm_80, sm_90'
    with pytest.raises(UserError, match=rf'has no kernels for NVIDIA B200 \({capabilities}\).*use torch 2\.9 or newer'):
        check_device(recipe)


def test_warnings_that_a_user_cannot_avoid_are_hidden():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        ignore_views_of_fsdp2()
        with without_own_deprecations():
            for message in ('The `local_dir_use_symlinks` argument is deprecated', '`LoraLoaderMixin` is deprecated'):
                warnings.warn(message, FutureWarning, stacklevel=1)
        warnings.warn('FSDP2-wrapped module PRX returned a view tensor', UserWarning, stacklevel=1)
        warnings.warn('another', UserWarning, stacklevel=1)
    assert [str(each.message) for each in seen] == ['another']


def test_torch_without_the_setting_divides_sums_of_gradients_itself():
    old, new = Mock(spec=['set_all_reduce_hook']), Mock()
    for module in (old, new):
        average_by_summing(module, 4)
    new.set_force_sum_reduction_for_comms.assert_called_once_with(True)
    (divide,) = old.set_all_reduce_hook.call_args.args
    for dtype, expected in ((torch.float32, 2), (torch.bfloat16, 2), (torch.float16, 8)):
        divide(gradients := torch.full((1,), 8.0, dtype=dtype))
        assert gradients.item() == expected


@pytest.mark.parametrize('version', ['0.39.0', '0.39.0rc1', '0.42.1'])
def test_version_within_the_bounds_is_accepted(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, 'version', lambda name: version)
    check_diffusers()


@pytest.mark.parametrize('version', ['0.38.9', '0.43.0.dev0', '1.0.0'])
def test_version_outside_the_bounds_is_refused_with_the_way_out(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, 'version', lambda name: version)
    with pytest.raises(UserError, match=rf"diffusers {version} is .* pip install 'diffusers>=0\.39,<0\.43', or"):
        check_diffusers()

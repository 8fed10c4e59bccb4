"""Resumed runs with changed recipes: each change is refused with both values, or it takes effect and is recorded."""

import json
import logging
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import yaml
from composer.core import Callback
from recipe_files import all_values, write_yaml

from diffusion.algorithms.average import trained_parameters
from diffusion.algorithms.ema import EMA
from diffusion.config.load import load
from diffusion.config.resume_rules import read_history
from diffusion.errors import UserError
from diffusion.tasks.export import export
from diffusion.training.resume import check_saver, compare_with_checkpoint, describe_resume
from diffusion.training.train import build_trainer


class Watch(Callback):
    """Copies of weights, gradients and moments right before the optimizer's step."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.gradients: dict[str, torch.Tensor] = {}
        self.moments: dict[str, tuple[torch.Tensor, torch.Tensor, float]] = {}

    def after_train_batch(self, state, logger) -> None:
        parameters = trained_parameters(state.model)
        self.weights = {name: whole(each) for name, each in parameters.items()}
        self.gradients = {name: whole(torch.as_tensor(each.grad)) for name, each in parameters.items()}
        states = {name: state.optimizers[0].state[each] for name, each in parameters.items()}
        for name, each in states.items():
            self.moments[name] = whole(each['exp_avg']), whole(each['exp_avg_sq']), float(each['step'])


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return a copy of a tensor, unsharded, in float64."""
    assert tensor is not None
    full = tensor.full_tensor() if hasattr(tensor, 'full_tensor') else tensor  # type: ignore[operator]
    return full.detach().double().clone()


def adamw_step(watch: Watch, name: str, *, lr: float, betas, eps: float, weight_decay: float) -> torch.Tensor:
    """Return a weight after a step of AdamW (Loshchilov and Hutter 2019, algorithm 2) in float64."""
    weight, gradient = watch.weights[name], watch.gradients[name]
    first, second, step = watch.moments[name]
    step += 1
    first = betas[0] * first + (1 - betas[0]) * gradient
    second = betas[1] * second + (1 - betas[1]) * gradient**2
    corrected = second / (1 - betas[1] ** step)
    update = first / (1 - betas[0] ** step) / (corrected.sqrt() + eps)
    return weight - lr * (update + weight_decay * weight)


@pytest.fixture(scope='module')
def trained(tmp_path_factory, tiny_recipe) -> Path:
    """Folder with a run stopped at batch 4, and its recipe `whole.yaml`."""
    root = tmp_path_factory.mktemp('whole')
    content = tiny_recipe(root / 'runs', name='whole', algorithms={'ema': {'ema_start': '3ba', 'smoothing': 0.5}})
    content['model']['objective'] = {'prediction_type': 'v_prediction'}
    content['scheduler'] = {'name': 'linear_with_warmup', 't_warmup': '6ba'}
    trainer = build_trainer(load(write_yaml(root / 'whole.yaml', content)))
    trainer.fit(duration='4ba')
    trainer.close()
    return root


@pytest.fixture
def run(trained, tmp_path):
    """Recipe, with the folder, of a copy of the run."""
    shutil.copytree(trained / 'runs' / 'whole', tmp_path / 'runs' / 'whole', symlinks=True)
    content = yaml.safe_load((trained / 'whole.yaml').read_text()) | {'runs_dir': str(tmp_path / 'runs')}
    path = write_yaml(tmp_path / 'whole.yaml', content)
    saved = tmp_path / 'runs' / 'whole' / 'recipe.yaml'
    saved.write_text(saved.read_text().replace(str(trained), str(tmp_path)))
    return path, tmp_path / 'runs' / 'whole'


REFUSED = {
    'model.objective.prediction_type=epsilon': 'prediction_type: v_prediction in the checkpoint, epsilon now',
    'model.objective.zero_terminal_snr=true': 'model.objective.zero_terminal_snr: false in the checkpoint, true now',
    'model.objective.timesteps=stratified': 'model.objective.timesteps: uniform in the checkpoint, stratified now',
    'model.block_out_channels=[32, 64]': 'model.block_out_channels: [32, 32] in the checkpoint, [32, 64] now',
    'model.vae=null': 'in the checkpoint, null now',
    'model.train_text_encoder=false': 'model.train_text_encoder: true in the checkpoint, false now',
    'model.caption_dropout_mode=zeros': 'model.caption_dropout_mode: empty in the checkpoint, zeros now',
    'algorithms.ema.ema_start=5000ba': 'algorithms.ema.ema_start: 3ba in the checkpoint, 5000ba now',
    'algorithms.ema=false': '"smoothing": 0.5, "half_life": null, "update_interval": "1ba"} in the checkpoint, null',
    'algorithms.post_hoc_ema={}': 'algorithms.post_hoc_ema: null in the checkpoint, {"name": "post_hoc_ema"',
    'trainer.save_folder=elsewhere': 'trainer.save_folder: elsewhere, but the checkpoints of this run are in .*ba4',
    'global_batch=16': 'global_batch: 8 in the checkpoint, 16 now',
}
"""Changes that are refused, with their messages; the last one is data, see also tests/data/test_fingerprint.py."""
BUILT = ('model.objective.prediction_type=epsilon', 'trainer.save_folder=elsewhere', 'global_batch=16')
"""Changes that are tested by building a Trainer."""


def test_changes_of_fixed_settings_are_refused_with_both_values(run):
    """Resume with an average, before the model is built; `recipe.yaml` and export keep saying what was trained."""
    path, folder = run
    before = (folder / 'recipe.yaml').read_text()
    for override, message in REFUSED.items():
        recipe = load(path, [override])
        with pytest.raises(UserError) as refused:
            # Building takes six times longer, since it verifies the checkpoint first.
            build_trainer(recipe) if override in BUILT else compare_with_checkpoint(recipe, folder / 'ba4')
        if '.*' in message:
            refused.match(message)
        else:
            assert message in str(refused.value), override
        assert any(way_out in str(refused.value) for way_out in ('set it back', 'set them back', 'allow_data_change'))
    assert (folder / 'recipe.yaml').read_text() == before
    export(folder, folder.parent / 'exported', weights='training')
    scheduler = json.loads((folder.parent / 'exported' / 'scheduler' / 'scheduler_config.json').read_text())
    assert scheduler['prediction_type'] == 'v_prediction'


APPLIED = {
    'optimizer.lr=0.02': 'optimizer.lr 0.001 -> 0.02',
    'optimizer.weight_decay=0.5': 'optimizer.weight_decay 0.01 -> 0.5',
    'optimizer.betas=[0.7, 0.9]': 'optimizer.betas [0.9, 0.999] -> [0.7, 0.9]',
    'optimizer.eps=1e-3': 'optimizer.eps 1e-08 -> 0.001',
    'optimizer.foreach=false': 'optimizer.foreach null -> false',
    'scheduler.t_warmup=12ba': 'scheduler.t_warmup 6ba -> 12ba',
    'model.caption_dropout=1.0': 'model.caption_dropout 0.1 -> 1.0',
    'algorithms.ema.smoothing=0.9': 'algorithms.ema.smoothing 0.5 -> 0.9',
    'algorithms.gradient_clipping={clipping_type: norm, clipping_threshold: 0.01}': 'algorithms.gradient_clipping null '
    '-> {"name": "gradient_clipping", "clipping_type": "norm", "clipping_threshold": 0.01}',
    'trainer.max_duration=24ba': 'trainer.max_duration 8ba -> 24ba',
    'trainer.save_interval=5ba': 'trainer.save_interval 4ba -> 5ba',
    'trainer.deterministic_mode=false': None,
    'device_train_microbatch_size=4': 'device_train_microbatch_size null -> 4',
    'loader.max_bad_samples=0.5': 'loader.max_bad_samples 0.0001 -> 0.5',
    'callbacks.loss_guard={window: 7}': 'callbacks.loss_guard null -> {"name": "loss_guard", "action": "stop", '
    '"max_skips": 10, "explosion": 20.0, "window": 7, "check_gradients": true}',
    'loggers.prometheus_file={path: metrics.prom}': 'loggers.prometheus_file null -> {"name": "prometheus_file", '
    '"path": "metrics.prom", "every_seconds": 15.0}',
    'speed.tf32=true': 'speed.tf32 null -> true',
    'generate.seed=5': 'generate.seed 0 -> 5',
    'loader.num_canonical_nodes=8': 'loader.num_canonical_nodes null -> 8',
}
"""Changes that are applied, with their lines in log and history; None for a default that is only written explicitly."""


def test_changes_of_other_settings_are_applied_logged_and_kept_as_history(run, caplog, monkeypatch, tmp_path):
    caplog.set_level(logging.INFO, logger='diffusion')
    monkeypatch.chdir(tmp_path)
    path, folder = run
    trainer = build_trainer(load(path, list(APPLIED)))
    state = trainer.state
    assert state.timestamp.batch.value == 4
    ema = next(each for each in state.algorithms if isinstance(each, EMA))
    ema.average.place(state.model)
    average = {name: whole(each) for name, each in ema.average.shards(state.model).items()}
    assert state.max_duration == '24ba'
    watch = Watch()
    state.callbacks.append(watch)
    trainer.fit(duration='1ba')
    # The optimizer's step, computed by hand: the rate of batch 5 under the new schedule is 3/12 of the new base rate.
    settings = {'lr': 0.02 * 3 / 12, 'betas': (0.7, 0.9), 'eps': 1e-3, 'weight_decay': 0.5}
    weights = {name: whole(each) for name, each in trained_parameters(state.model).items()}
    for name, weight in weights.items():
        torch.testing.assert_close(weight, adamw_step(watch, name, **settings), rtol=1e-5, atol=1e-7)
    norm = sum(float(each.square().sum()) for each in watch.gradients.values()) ** 0.5
    assert norm == pytest.approx(0.01, rel=1e-3), 'clipped'
    for name, each in ema.average.shards(state.model).items():
        expected = 0.9 * average[name] + 0.1 * weights[name]
        torch.testing.assert_close(whole(each), expected, rtol=1e-5, atol=1e-7)
    assert ema.updates == 2
    # The next batch follows the new schedule too, and everything else has the values of the recipe.
    assert state.optimizers[0].param_groups[0]['lr'] == pytest.approx(0.02 * 4 / 12)
    module = getattr(state.model, 'module', state.model)
    assert (module.caption_dropout, state.device_train_microbatch_size) == (1.0, 4)
    assert state.optimizers[0].param_groups[0]['foreach'] is False
    assert (tmp_path / 'metrics.prom').is_file()
    trainer.close()
    # Log and history.
    line = next(each.message for each in caplog.records if 'resumed with other settings' in each.message)
    history = read_history((folder / 'recipe.yaml').read_text())
    expected = [text for text in APPLIED.values() if text]
    assert len(history) == len(expected) + 1, 'the run was moved too'
    for text in expected:
        assert f'{text} (applied)' in line
        assert any(each.startswith('# changed at batch 4 (20') and each.endswith(f'): {text}') for each in history)
    resumed = load(path, list(APPLIED))
    assert all_values(load(folder / 'recipe.yaml')) == all_values(resumed), 'the history is not part of the recipe'


def test_run_is_compared_with_the_recipe_in_its_checkpoint_first(run, caplog):
    path, folder = run
    recipe = load(path, ['optimizer.lr=0.5', 'seed=18'])
    shutil.copy(folder / 'recipe.yaml', folder / 'ba4' / 'recipe.yaml')
    text = (folder / 'recipe.yaml').read_text().replace('seed: 17', 'seed: 18')
    (folder / 'recipe.yaml').write_text(text + '# changed at batch 2 (2026-01-01): optimizer.lr 1 -> 0.001\n')
    with pytest.raises(UserError, match='seed: 17 in the checkpoint, 18 now'):
        compare_with_checkpoint(recipe, folder / 'ba4')
    (folder / 'ba4' / 'recipe.yaml').unlink()
    resumed = compare_with_checkpoint(recipe, folder / 'ba4')
    assert [str(each) for each in resumed.changes] == ['optimizer.lr 0.001 -> 0.5']
    assert len(resumed.history) == 1, 'earlier changes are kept'
    assert ', 0.5 in batch 4' in describe_resume(load(path, ['scheduler=null', 'optimizer.lr=0.5', 'seed=18']))[-1]
    assert 'Composer finds the checkpoint' in describe_resume(load(path, ['trainer.save_folder=x']))[0]
    (folder / 'recipe.yaml').write_text(text.replace('num_workers', 'workers'))
    compare_with_checkpoint(recipe, folder / 'ba4')
    assert 'does not know are not compared: loader.workers' in caplog.text
    (folder / 'recipe.yaml').unlink()
    assert compare_with_checkpoint(recipe, folder / 'ba4').changes == ()
    assert 'no recipe.yaml next to the checkpoint, so its model, optimizer and other settings cannot' in caplog.text


def test_checkpoints_of_composer_are_not_left_behind_in_another_folder(tmp_path):
    """A local folder without files has none; a bucket is not listed and may have some."""
    used, empty = str(tmp_path / 'used'), str(tmp_path / 'empty')
    (tmp_path / 'used').mkdir()
    (tmp_path / 'used' / 'ep0-ba5-rank0.pt').touch()
    for before, now in (('s3://a/b', 'c'), (used, None), (used, used), (empty, 'c')):
        (tmp_path / 'recipe.yaml').write_text(f'trainer: {{save_folder: {before}}}')
        message = f'save_folder: {now or "null"}, but .* saves its checkpoints to {before}; set it back to resume'
        with nullcontext() if before in (now, empty) else pytest.raises(UserError, match=message):
            check_saver({'autoresume': True, 'save_folder': now}, tmp_path)


@pytest.mark.slow
def test_every_rank_refuses_with_the_same_message(trained, ranks):
    for output in ranks.start(2, trained / 'whole.yaml', 'model.objective.prediction_type=epsilon').end(78):
        assert 'model.objective.prediction_type: v_prediction in the checkpoint, epsilon now (the training' in output

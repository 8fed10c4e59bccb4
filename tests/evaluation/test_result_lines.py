"""Lines about an evaluation: directions of metrics, and changes since the last evaluation of the run."""

import json

from diffusion.evaluation.result_lines import earlier_results, result_lines
from diffusion.storage.places import LocalPlace


def results(batch: int, loss: float, fid: float, images: int = 2048, top1: float = 0.5, weights: str = 'ema') -> dict:
    guidance: list[dict] = [{'guidance_scale': scale, 'metrics': {'fid': fid + scale}} for scale in (3.0, 7.5)]
    guidance.append(
        guidance[0]
        | {'guidance': {'name': 'interval', 'low': 0.1, 'high': 0.7}, 'noise_scheduler': 'ddpm'}
        | {'num_inference_steps': 10, 'snr_shift': 2.0}
    )
    return {
        **{'checkpoint': f'ba{batch}', 'batch': batch, 'weights': weights, 'images': images, 'prompts': 'own'},
        **{'losses': {'loss': loss}, 'metrics': {'fid': fid + 3, 'retrieval_top1': top1}, 'guidance': guidance},
    }


def test_each_metric_has_its_direction_and_its_change_since_the_last_comparable_evaluation(tmp_path):
    (tmp_path / 'evaluations').mkdir()
    for each in (
        results(2, 0.9, 20.0),
        results(4, 0.5, 40.0, images=100),
        results(6, 0.1, 1.0, weights='training'),
        results(8, 0.6, 30.0),
        results(20, 0.1, 1.0),
    ):
        (tmp_path / f'evaluations/{each["checkpoint"]}.json').write_text(json.dumps(each))
    for name in ('ba3', 'bad'):
        (tmp_path / f'evaluations/{name}.json').write_text('[]')
    last = results(8, 0.6, 30.0)
    assert [*result_lines(last, earlier_results(LocalPlace(tmp_path), 8, 'ema'))] == [
        'loss                                 0.6000  lower is better, ↑ worse than 0.5000 at ba4',
        'fid                                 33.0000  lower is better, ↑ worse than 23.0000 at ba2',
        'retrieval_top1                       0.5000  higher is better, = equal to ba4',
        'guidance 7.5                     fid 37.5000',
        'guidance 3 interval low=0.1 high=0.7 steps 10 ddpm shift 2.0 fid 33.0000',
    ]
    assert [each['batch'] for each in earlier_results(LocalPlace(tmp_path), 21, 'ema')] == [20, 8, 4], 'of the last 5'
    first = results(9, 0.4, 10.0, top1=0.7)
    assert [line.partition(' is better, ')[2] for line in result_lines(first, [last])][:3] == [
        '↓ better than 0.6000 at ba8',
        '↓ better than 33.0000 at ba8',
        '↑ better than 0.5000 at ba8',
    ]
    assert [line.partition('better')[2] for line in result_lines(first, [])][:3] == ['', '', '']


def test_intervals_and_categories_of_a_benchmark_are_printed():
    found = results(8, 0.6, 30.0)
    found['metrics'] = {'geneval_hf': 0.5}
    found['guidance'] = [
        {
            **{'guidance_scale': 3.0, 'metrics': {'geneval_hf': 0.5}},
            'categories': {'geneval_hf': {'counting': 0.25, 'colors': 0.75}, 'clip_score': {'colors': 30.0}},
            'intervals': {'geneval_hf': {'': [0.4, 0.6], 'counting': [0.2, 0.3], 'colors': [0.7, 0.8]}},
        }
    ]
    assert [*result_lines(found, [])][1:] == [
        'geneval_hf                           0.5000  higher is better  (95% interval 0.4000 to 0.6000)',
        '  counting                           0.2500  (95% interval 0.2000 to 0.3000)',
        '  colors                             0.7500  (95% interval 0.7000 to 0.8000)',
    ]

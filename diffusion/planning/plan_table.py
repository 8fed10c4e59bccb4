"""Text form of a plan: tables with aligned columns, then notes and warnings."""

import math
from collections.abc import Collection, Sequence

from diffusion.planning import amounts
from diffusion.planning.checkpoints import kept_checkpoints
from diffusion.planning.data_volume import PRICE_DATE, StoreReads, nodes_per_shard, reads_per_epoch
from diffusion.planning.goodput_simulation import simulate_strategies
from diffusion.planning.gpus import GPU
from diffusion.planning.memory import GIB
from diffusion.planning.plan import PhasePlan, Plan
from diffusion.planning.throughput import PRECOMPUTE_MFU, Cost
from diffusion.planning.workload import Phase

PARTS = {
    'weights': 'weights',
    'gradients': 'gradients',
    'optimizer': 'optimizer',
    'averages': 'averages (EMA)',
    'encoders': 'frozen encoders',
    'buckets': 'gradients to reduce',
    'compute_weights': 'compute weights',
    'graphs': 'CUDA graphs',
    'activations': 'activations',
    'working': 'working tensors',
}
ENCODING_NAMES = {'pictures': 'images', 'latents': 'latents, text online', 'latents+text': 'latents and text'}


def plan_text(plan: Plan) -> str:
    """Return a plan as the text that `diffusion plan` prints: tables, notes and warnings."""
    tables = (_overview, _time, _techniques, _memory, _data, _store_reads, _checkpoints, _strategies)
    several = len(plan.phases) > 1
    first = [first_line(each, plan.given.gpu, name=each.phase.name if several else '') for each in plan.phases]
    sections = ['\n'.join(first), *(table(plan) for table in tables)]
    sections += [_bullets('Notes', plan.notes), _bullets('WARNINGS', plan.warnings)]
    return '\n\n'.join(section for section in sections if section)


def first_line(each: PhasePlan, gpu: GPU, *, name: str = '', expected: bool = False) -> str:
    """Return a line with a recipe's time and cost as written, and with the overrides for faster settings, if found.

    Args:
        name: Name of the recipe or job at the beginning of the line.
        expected: Include the time of saves and failures.
    """
    written = amounts.time_and_price(each.expected if expected else each.cost)
    if not each.fit[0].fits:
        written = 'does not fit in memory'
    elif each.is_bound_by_launches:
        written = f'at least {written}'
    line = f'{name}, as written: {written}.' if name else f'As written: {written}.'
    if (faster := each.faster) is None:
        return line
    cost = amounts.time_and_price(faster.expected if expected else faster.cost)
    memory = f'{faster.memory.reserved / GIB:.1f} of {gpu.memory_gib:.1f} GiB per GPU'
    return f'{line} With {" ".join(faster.settings)}: {cost}, {memory}.'


def _overview(plan: Plan) -> str:
    rows = [['', 'shape', 'batches', 'global batch', 'images', 'parameters', 'GFLOP per image']]
    for phase in (each.phase for each in plan.phases):
        work = [_shapes(phase), f'{phase.batches:,}', f'{phase.recipe.global_batch:,}', amounts.count(phase.images)]
        rows.append([phase.name, *work, f'{phase.model.trained_parameters / 1e6:,.1f} M', _flops(phase)])
    given = plan.given
    price = given.price_usd_per_hour
    price_text = 'price unknown' if price is None else f'${price:.2f} per GPU-hour'
    nodes = f'{given.nodes} nodes' if given.nodes > 1 else 'one node'
    title = f'{given.gpus} x {given.gpu.name} ({nodes}), {price_text}'
    return _section(title, rows)


def _time(plan: Plan) -> str:
    rows = [['', 'images/s', 'MFU', 'time', 'GPU-hours', 'dollars', 'source']]
    for each in plan.phases:
        speed = each.speed
        rows.append(
            [each.phase.name, f'{speed.images_per_second:,.0f}', f'{speed.mfu:.1%}', *_cost(each.cost), speed.source]
        )
    for each in plan.phases:
        if each.precompute.hours:
            name = ENCODING_NAMES[each.phase.encoding]
            source = f'{name}, once, at {PRECOMPUTE_MFU:.1%} MFU as published'
            rows.append([f'precompute {each.phase.name}', '', '', *_cost(each.precompute), source])
    if len(rows) > 2:
        rows.append(['total', '', '', *_cost(plan.total), f'{plan.flops:.2e} training FLOP'])
    short = all(each.resilience.is_short for each in plan.phases)
    goodput = 'mostly saves' if short else f'goodput {plan.goodput:.3f}, see Checkpoints'
    rows.append(['with saves, failures', '', '', *_cost(plan.expected), goodput])
    run = plan.published
    if run is not None:
        count = len(run.stages)
        what = f'{run.source}: {run.hours:.0f} hours on {run.gpus} {run.gpu} at ${run.usd_per_gpu_hour:.2f}'
        if count > 1:
            what += f', all {count} stages' if count == len(plan.phases) else f', {count} stages, of which this is one'
        cost = Cost(run.hours, run.gpu_hours, run.usd)
        rows.append(['published', '', '', *_cost(cost), what])
    return _section('Time and cost', rows, left={6})


def _techniques(plan: Plan) -> str:
    blocks = []
    for each in plan.phases:
        batch = each.phase.recipe.global_batch
        rows = [['', 'GFLOP per image', 'throughput', 'images', 'batches', 'by published throughput']]
        rows.append(['with all', '', '', amounts.count(each.phase.images), f'{each.phase.batches:,}', ''])
        for technique in each.techniques:
            effects = [
                f'x {1 / effect.speedup:.2f}, {effect.images_without / batch:,.0f} batches ({effect.conditions})'
                for effect in technique.published
            ]
            effort = [f'{0 - technique.flops_per_image / 1e9:+,.1f}', f'x {1 / technique.speedup:.2f}']
            without = [amounts.count(technique.images_without), f'{technique.images_without / batch:,.0f}']
            rows.append([f'without {technique.name}', *effort, *without, '; '.join(effects)])
        if len(rows) > 2:
            money = f'{amounts.gpu_hours(each.cost)} GPU-hours'
            if each.cost.usd is not None:
                money += f', {amounts.dollars(each.cost)}'
            blocks.append(_section(f'Techniques, {each.phase.name}: what {money} buy at equal MFU', rows, left={5}))
    return '\n\n'.join(blocks)


def _memory(plan: Plan) -> str:
    blocks = []
    for each in plan.phases:
        recipe_fit = each.fit[0]
        title = f'Memory per GPU in GiB (of {plan.given.gpu.memory_gib:.1f}), {each.phase.name}'
        used = {name: max(getattr(fit.memory, name) for fit in each.fit) for name in PARTS}
        shown = [name for name in PARTS if used[name] >= 0.005 * GIB]
        rows = [['strategy', *(PARTS[name] for name in shown), 'peak', 'with allowance']]
        rows[0] += ['largest microbatch', 'GB sent per batch']
        for fit in each.fit:
            mark = '' if fit.fits else '  does not fit'
            cells = [_gib(getattr(fit.memory, name)) for name in shown]
            label = fit.setup.label + (' (recipe)' if fit is recipe_fit else '')
            share = each.phase.recipe.global_batch // plan.given.gpus
            largest = f'{fit.largest_microbatch} of {share}' if fit.largest_microbatch else 'none'
            rows.append([label, *cells, _gib(fit.memory.allocated), _gib(fit.memory.reserved), largest + mark])
            rows[-1].append(f'{fit.communication_bytes / 1e9:,.2f}')
        # Purposes are rows and strategies are columns.
        columns = [*zip(*rows, strict=True)]
        blocks.append(_section(f'{title}, microbatch {recipe_fit.setup.microbatch}', columns))
    return '\n\n'.join(blocks)


def _data(plan: Plan) -> str:
    blocks = []
    for each in plan.phases:
        rows = [['stored as', 'per sample', 'stored', 'read', 'GB/s', 'GB/s per node']]
        rows[0] += ['total time', 'total dollars', 'precompute dollars']
        for other in each.alternatives:
            mark = ' (recipe)' if other.encoding == each.phase.encoding else ''
            storage = other.storage
            sizes = map(amounts.size, (storage.bytes_per_sample, storage.stored_bytes, storage.read_bytes))
            rates = map(_gb, (storage.bytes_per_second, storage.bytes_per_second_per_node))
            costs = [*_cost(other.total)[::2], amounts.dollars(other.precompute)]
            rows.append([ENCODING_NAMES[other.encoding] + mark, *sizes, *rates, *costs])
        images = amounts.count(each.phase.distinct_images)
        blocks.append(_section(f'Data, {each.phase.name}, {images} distinct images', rows))
    return '\n\n'.join(blocks)


def _store_reads(plan: Plan) -> str:
    rows = [['', 'nodes per shard', 'first epoch', 'requests', 'egress', 'later epochs', 'requests', 'egress']]
    for each in plan.phases:
        stored = next(other.storage for other in each.alternatives if other.encoding == each.phase.encoding)
        reads = reads_per_epoch(each.phase.recipe, stored.stored_bytes, nodes=plan.given.nodes)
        readers = nodes_per_shard(each.phase.recipe, plan.given.nodes)
        rows.append([each.phase.name, f'{readers:g}', *_cells_of(reads.first), *_cells_of(reads.later)])
    prices = f'S3 list prices as of {PRICE_DATE}; egress is free within a region'
    title = f'Reads from the object store per epoch over all data ({prices})'
    return _section(title, rows)


def _cells_of(reads: StoreReads) -> list[str]:
    requests = f'{amounts.count(math.ceil(reads.requests), decimals=2)} = {amounts.usd(reads.request_usd)}'
    return [amounts.size(reads.bytes), requests, amounts.usd(reads.egress_usd)]


def _checkpoints(plan: Plan) -> str:
    columns = ['', 'weights', '+ optimizer', '+ averages', 'host memory per node']
    rows = [[*columns, 'save takes', 'save every', 'goodput', 'recipe saves every', 'and keeps at most']]
    for each in plan.phases:
        saving, sizes = each.resilience, each.sizes
        kept = kept_checkpoints(each.phase, saving, sizes)
        recipe_interval = '(unknown: neither batches nor a time)'
        if saving.recipe_interval_seconds is not None:
            interval = each.phase.recipe.trainer['save_interval']
            recipe_interval = f'{interval} = {amounts.duration(saving.recipe_interval_seconds)}'
            recipe_interval += '' if saving.is_short else f', goodput {saving.recipe_goodput:.3f}'
        stored = map(amounts.size, (sizes.weights, sizes.with_optimizer, sizes.with_averages, each.snapshot_bytes))
        save_every = f'{saving.interval_batches:,}ba = {amounts.duration(saving.interval_seconds)}'
        goodput = '(short run)' if saving.is_short else f'{saving.goodput:.3f}'
        stall = saving.stall_seconds
        best = [f'{stall:,.0f} s' if stall >= 10 else amounts.duration(stall), save_every, goodput]
        most = '(not known)' if kept is None else f'{kept.count:,} = {amounts.size(kept.bytes)}'
        rows.append([each.phase.name, *stored, *best, recipe_interval, most])
    return _section(f'Checkpoints, with {_failures(plan)}', rows, left={8, 9})


def _strategies(plan: Plan) -> str:
    plans = [each for each in plan.phases if not each.resilience.is_short]
    if not plans:
        return ''
    simulated = [simulate_strategies(each.resilience) for each in plans]
    names = list(dict.fromkeys(each.strategy.name for phase in simulated for each in phase))
    rows = [['', *names]]
    for each, phase in zip(plans, simulated, strict=True):
        cells = {
            found.strategy.name: f'{found.goodput:.3f} every {amounts.duration(found.strategy.interval)}'
            for found in phase
        }
        rows.append([each.phase.name, *(cells.get(name, '') for name in names)])
    failures = f'{_failures(plan)} and restarts of {amounts.duration(plan.given.restart_seconds)}'
    return _section(f'Goodput of save strategies, with {failures} (simulated)', rows)


def _failures(plan: Plan) -> str:
    return f'one failure every {amounts.duration(3600 * plan.phases[0].resilience.mtbf_hours)}'


def _flops(phase: Phase) -> str:
    parts = [f'{phase.training_flops / 1e9:,.1f}']
    others = {'encoders': phase.encoder_flops(phase.encoding), 'REPA': phase.alignment_flops()}
    others['perceptual losses'] = phase.perceptual_flops
    parts += [f'+ {flops / 1e9:,.1f} {name}' for name, flops in others.items() if flops]
    if len(parts) > 1:
        parts.append(f'(x {phase.flops() / phase.training_flops:.2f})')
    return ' '.join(parts)


def _shapes(phase: Phase) -> str:
    shapes = list(phase.shapes)
    return str(shapes[0]) if len(shapes) == 1 else f'{len(shapes)} shapes up to {phase.largest_shape}'


def _cost(cost: Cost) -> list[str]:
    return [amounts.run_time(cost.hours), amounts.gpu_hours(cost), amounts.dollars(cost)]


def _gib(count: float) -> str:
    return f'{count / GIB:,.2f}'


def _gb(count: float) -> str:
    return f'{count / 1e9:,.2f}' if count >= 1e9 else f'{count / 1e9:.3g}'


def _section(title: str, rows: Sequence[Sequence[str]], *, left: Collection[int] = ()) -> str:
    """Format a table with a title; the first column and those in `left` are left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column == 0 or column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append('  ' + '  '.join(cells).rstrip())
    return '\n'.join([title, *lines])


def _bullets(title: str, lines: Sequence[str]) -> str:
    return '\n'.join([title, *(f'  - {line}' for line in lines)]) if lines else ''

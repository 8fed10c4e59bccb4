"""Times, costs, counts and bytes as text, each in the unit that fits its size."""

from diffusion.planning.throughput import Cost

SMALLEST = 0.01
"""Dollars or GPU-hours below which an amount is printed as `under 0.01`."""


def run_time(hours: float) -> str:
    """Return the time of a run, such as 5.65 days, 1.2 hours or 3 minutes."""
    if hours >= 2.4:
        return f'{hours / 24:,.2f} days'
    for unit, size in (('hours', 1.0), ('minutes', 1 / 60)):
        if hours >= size:
            return f'{hours / size:,.1f} {unit}'
    return f'{3600 * hours:.2g} seconds'


def duration(seconds: float) -> str:
    """Return a duration within a run, such as 2.5 h, 90.7 min or 29 ms."""
    for unit, size in (('d', 86400), ('h', 3600), ('min', 60)):
        if seconds >= 2 * size:
            return f'{seconds / size:,.1f} {unit}'
    return f'{1000 * seconds:.2g} ms' if 0 < seconds < 0.1 else f'{seconds:,.1f} s'


def dollars(cost: Cost) -> str:
    """Return a cost such as $6,403 or $0.02, or an empty text if the price is unknown."""
    return '' if cost.usd is None else usd(cost.usd)


def usd(amount: float) -> str:
    if 0 < amount < SMALLEST:
        return f'under ${SMALLEST}'
    return f'${amount:,.2f}' if 0 < amount < 10 else f'${amount:,.0f}'


def gpu_hours(cost: Cost) -> str:
    if 0 < cost.gpu_hours < SMALLEST:
        return f'under {SMALLEST}'
    return f'{cost.gpu_hours:.2g}' if 0 < cost.gpu_hours < 10 else f'{cost.gpu_hours:,.0f}'


def time_and_price(cost: Cost) -> str:
    """Return time and dollars, such as `5.65 days, $6,403`; the time alone if the price is unknown."""
    return ', '.join(text for text in (run_time(cost.hours), dollars(cost)) if text)


def count(number: float, decimals: int = 1) -> str:
    """Return a number of images or requests, such as 790.0 M or 36."""
    return f'{number / 1e6:,.{decimals}f} M' if number >= 1e6 else f'{number:,.0f}'


def size(number: float) -> str:
    """Return a number of bytes, such as 13.85 GB."""
    for unit, factor in (('PB', 1e15), ('TB', 1e12), ('GB', 1e9), ('MB', 1e6), ('kB', 1e3)):
        if number >= factor:
            return f'{number / factor:,.2f} {unit}'
    return f'{number:,.0f} B'

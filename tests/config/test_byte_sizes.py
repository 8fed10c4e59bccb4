"""Sizes in bytes as text."""

import pytest

from diffusion.config.byte_sizes import bytes_text, parse_bytes
from diffusion.errors import UserError


@pytest.mark.parametrize('power', range(1, 6))
def test_every_unit_is_a_power_of_1000_or_1024(power):
    letter = 'kmgtp'[power - 1]
    assert (parse_bytes(f'2{letter}b'), parse_bytes(f' 2 {letter.upper()}iB ')) == (2 * 1000**power, 2 * 1024**power)
    assert parse_bytes(f'0.5{letter}b') == 500 * 1000 ** (power - 1)
    assert (parse_bytes(17), parse_bytes('9b'), parse_bytes('1.5 GiB')) == (17, 9, 3 * 2**29)
    for wrong in ('', '5 apples', '-1gb', '0', '0.0kb', '1e3'):
        with pytest.raises(UserError, match=f'{wrong!r} is not a size; write a number and a unit'):
            parse_bytes(wrong)


def test_bytes_are_printed_with_a_decimal_unit():
    sizes = (0, 999, 1000, 1550, 999_949, 1e6, 2.5e9, 1e12, 7e15)
    assert [bytes_text(size) for size in sizes] == [
        *('0 B', '999 B', '1.0 kB', '1.6 kB', '999.9 kB', '1.0 MB', '2.5 GB', '1.0 TB', '7000.0 TB')
    ]

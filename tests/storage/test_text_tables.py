"""CSV and JSON Lines files, and the list of caption tables, with any content."""

import json
from pathlib import Path

import pytest
from golden import check_transcripts

from diffusion.errors import UserError
from diffusion.storage.caption_tables import read_list
from diffusion.storage.text_tables import MAX_LINE_BYTES, csv_rows, is_misread, parse_json_lines


def test_rows_and_mistakes_of_csv_files(tmp_path: Path) -> None:
    """The lines of the files are the texts of CSV files, as JSON."""
    path = tmp_path / 'a.csv'

    def outcome(line: str) -> list[object]:
        path.write_bytes(json.loads(line).encode('utf-8', 'surrogateescape'))
        try:
            return list(csv_rows(path, 'a.csv', errors='surrogateescape'))
        except UserError as error:
            return [error]

    check_transcripts(Path(__file__).parent / 'golden' / 'csv', outcome)


def test_control_characters_tell_other_encodings() -> None:
    texts = ['plain', 'ä', '\t', 'a\0', '\udc80', '\x04abc', '\x04abcd', '\x0e\x1fäöü\x08x', '\x20\x7f', '']
    assert [is_misread(each) for each in texts] == [False, False, False, True, True, True, False, True, False, False]
    long = [f'{count * chr(1)}{(1000 - count) * "ä"}{1000 * chr(1)}' for count in (249, 250)]
    assert [is_misread(each) for each in long] == [False, True], 'only the first 1000 characters are counted'


def test_lines_that_are_no_objects_or_too_long_are_skipped() -> None:
    longest = json.dumps({'a': 'x' * (MAX_LINE_BYTES - 9)})
    longer = json.dumps({'b': 'x' * (MAX_LINE_BYTES - 8)})
    lines = [longest, longer, '[1]', '{"c": 1}', '{"d": ', '', '[' * 60_000, '{"e": "\xff"}']
    found = parse_json_lines('\n'.join(lines).encode('latin-1'))
    assert [*map(list, found)] == [['a'], ['c']]


def test_list_of_caption_tables_that_cannot_be_read_is_refused() -> None:
    causes = {'{"version": 1}': 'format 1 of another version of diffusion, not 2', '{"version": 2}': "'columns'"}
    for content, cause in (causes | {'[]': 'list indices', '{': 'Expecting'}).items():
        with pytest.raises(UserError, match=rf'^a: cannot be read \({cause}.*\); delete it and run diffusion caption'):
            read_list(content.encode(), 'a')
    assert read_list(None, 'a') == {} and read_list(b'{"version": 2, "columns": {"b": {}}}', 'a') == {'b': {}}

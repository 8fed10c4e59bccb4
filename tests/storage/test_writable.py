"""Checks of output folders for write access."""

import os

import pytest

from diffusion.errors import UserError
from diffusion.storage.local_files import check_writable, why_not_writable


def test_folder_that_exists_or_can_be_created_passes(tmp_path, monkeypatch):
    assert why_not_writable(tmp_path) is None
    assert why_not_writable(tmp_path / 'new' / 'deeper') is None
    monkeypatch.chdir(tmp_path)
    assert why_not_writable('relative') is None
    assert not list(tmp_path.iterdir()), 'nothing is created'


def test_error_has_the_part_of_the_path_that_is_wrong(tmp_path):
    (tmp_path / 'file').touch()
    (tmp_path / 'link').symlink_to('nowhere')
    assert why_not_writable(tmp_path / 'file' / 'a' / 'b') == f'{tmp_path}/file is not a folder; choose another path'
    assert str(why_not_writable(tmp_path / 'link' / 'a')).startswith(f'{tmp_path}/link is a dangling link')
    with pytest.raises(UserError, match='^--out: .*file is not a folder'):
        check_writable(tmp_path / 'file', '--out')


@pytest.mark.skipif(os.getuid() == 0, reason='root can write everywhere')
def test_folder_without_write_permission_is_refused(tmp_path):
    (tmp_path / 'closed').mkdir(mode=0o500)
    assert 'closed cannot be written to' in str(why_not_writable(tmp_path / 'closed' / 'new'))

"""An index.json of any content is refused by the checks that read it first."""

import json
import os

import pytest

from diffusion.config.path_checks import check_stream_folders
from diffusion.config.recipe import StreamConfig
from diffusion.errors import UserError

INDEX = {
    'negative samples': json.dumps({'shards': [{'samples': -5}]}),
    '10**12 samples': json.dumps({'shards': [{'samples': 10**12}]}),
    'infinite samples': '{"shards": [{"samples": 1e999}]}',
    'samples as text': json.dumps({'shards': [{'samples': 'x'}]}),
    'a list': '[1]',
    'deep nesting': '[' * 100_000,
    'a pipe': None,
}


@pytest.mark.parametrize('name', INDEX)
def test_hostile_index_is_refused(name, tmp_path):
    from diffusion.inspection.shard_checks import read_index, source_of

    path = tmp_path / 'index.json'
    if (text := INDEX[name]) is None:
        os.mkfifo(path)
    else:
        path.write_text(text)
    stream = StreamConfig(resolution=64, local=str(tmp_path))
    (problem,) = check_stream_folders('streams', {'a': stream})
    assert problem.where == 'streams.a.local'
    with pytest.raises(UserError, match=r'index\.json'):
        read_index(source_of(stream))

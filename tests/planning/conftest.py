"""Counting for the tests of planning: in this process, which has torch already, and cached for one session."""

import json

import pytest

from diffusion.errors import UserError
from diffusion.planning import count_cache


@pytest.fixture(scope='session', autouse=True)
def counting_here(tmp_path_factory):
    def count(request):
        from diffusion.models.cost_counting import answer

        try:
            return json.loads(json.dumps(answer(request)))
        except UserError as error:
            return {'mistake': str(error)}

    folder = tmp_path_factory.mktemp('model_counts')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(count_cache, 'run_counter', count)
        patch.setattr(count_cache, 'cache_folder', lambda: folder)
        yield
